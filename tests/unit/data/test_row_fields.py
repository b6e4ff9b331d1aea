"""What cannot be read: each fault is one error that names file, row and field and says what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl.data.manifest import read_samples
from audiorl.data.preferences import read_pairs, read_steps
from audiorl.data.rollout_rows import read_rollouts, rollout_row
from audiorl.data.rows import Row, read_rows
from audiorl.data.text import read_passages, read_questions
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.tts.texts import read_utterances
from audiorl.types import Message, Rollout, Sample, Segment

Read = Callable[[Path], object]
NAN = float("nan")
QUESTION = {"id": "q", "audio": "a.wav", "question": "Which?", "choices": ["a dog", "a cat"], "answer": "a cat"}
SPEECH = {"id": "u", "audio": "a.wav", "text": "good morning"}
AVQA = {"id": 1, "video_name": "a", "question_text": "What?", "multi_choice": ["rain", "a bell"], "answer": 1}
MUSIC = {"location": "a.wav", "key": ["C", "major"], "prompt_bpm": "Allegro", "prompt_key": "", "prompt_bt": "4/4"}
UNIT = {"start": 0.1, "end": 0.5, "target": "uno"}
STREAM = {"id": "s", "audio": "a.wav", "source_language": "en", "target_language": "es", "units": [UNIT]}
WORDS = [{"word": "one", "start": 0.1, "end": 0.3}, {"word": "two", "start": 0.4, "end": 0.8}]
PAIR = {**STREAM, "source": "one two", "target": "uno dos", "words": WORDS}
del PAIR["units"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.wav of 2 s."""
    soundfile.write(tmp_path / "a.wav", (0.3 * np.sin(np.arange(32_000) * 0.2)).astype(np.float32), 16_000)
    return tmp_path


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in QUESTION.items() if key != name}


def array(values: Any, **fields: Any) -> dict[str, Any]:
    return {"audio": {"array": values, "sampling_rate": 16_000, **fields}}


FIELDS: list[tuple[Any, ...]] = [
    # Audio.
    (SPEECH | array([0, 1000, -30_000]), "audio.array", "its samples are whole numbers; give floats"),
    (SPEECH | array([]), "audio.array", "empty; give samples"),
    (SPEECH | array([[0.1, 0.2], [0.1]]), "audio.array", "no array"),
    (SPEECH | array([0.1], sampling_rate=-1), "audio.sampling_rate", "-1 is not a sampling rate"),
    (SPEECH | array([0.1], sampling_rate=None), "audio.sampling_rate", "missing; give"),
    (SPEECH | {"audio": {"bytes": "UklGRg=="}}, "audio.bytes", "is not bytes"),
    (SPEECH | {"audio": 3}, "audio", "3 is not audio; give a path, or an object"),
    (SPEECH | {"audio": None}, "audio", "missing or empty; give a path"),
    (SPEECH | {"audio": {"bytes": None, "path": ""}}, "audio", "missing or empty"),
    (SPEECH | {"audio": "https://x.org/a.wav"}, "audio", "'https://x.org/a.wav' is a URL, which is not read; download"),
    (SPEECH | {"audio": "data:audio/wav;base64,UklG"}, "audio", "is a URL, which is not read"),
    (SPEECH | {"audio": ["a.wav"]}, "audio", r"\['a.wav'\] is not audio; give a path"),
    (SPEECH | {"audio": "gone.wav"}, "audio", r"gone\.wav: missing"),
    (SPEECH | {"audio": "cut.wav"}, "audio", r"cut\.wav: truncated"),
    (SPEECH | {"sampling_rate": -1}, "sampling_rate", "-1 is not a sampling rate; give Hz"),
    (SPEECH | {"sample_rate": "16k"}, "sample_rate", "is not a sampling rate"),
    (SPEECH | {"sample_rate": 8000}, "audio", "declared as 8000 Hz but the file has 16000 Hz"),
    (SPEECH | {"start": "0:10"}, "start", "is not a time; give seconds"),
    (SPEECH | {"start": -1, "duration": 1}, "start", "is not a time; give seconds"),
    (SPEECH | {"start": 100, "duration": 1}, "audio", "lies past the end"),
    (SPEECH | {"duration": NAN}, "duration", "nan is not a time; give seconds"),
    (SPEECH | {"start": 0, "duration": 0}, "duration", "0 s; give how long the part lasts"),
    (SPEECH | {"start": 1, "end": 1}, "end", "1 does not lie after the start, 1; correct the times"),
    (SPEECH | {"offset": 0, "end_time": "soon"}, "end_time", "'soon' is not a time; give seconds"),
    # Questions and speech.
    ('{"id": "x", "audio": ', "", r"not valid JSON \(.*\); write one object a line"),
    ("[1, 2]", "", "a JSON list, not an object"),
    (QUESTION | {"answer": ""}, "answer", "empty"),
    (QUESTION | {"answer": None}, "answer", "empty"),
    (without("answer"), "answer", r"missing; .* --columns answer=NAME \(the columns are .*question, choices\)"),
    (without("question"), "question", r"missing; .* \(the columns are .*choices, answer\)"),
    (QUESTION | {"answer": "a cow"}, "answer", r"'a cow' is not among the choices \['a dog', 'a cat'\]"),
    (QUESTION | {"answer": 2}, "answer", "index 2 lies outside the 2 choices; count from 0"),
    (QUESTION | {"answer": NAN}, "answer", "nan is not a text; give the text of the answer"),
    (QUESTION | {"answer": ["a cat"]}, "answer", "a question with choices has one answer"),
    (QUESTION | {"choices": ["a cat"]}, "choices", "two or more different choices"),
    (QUESTION | {"choices": ["a cat", ""]}, "choices", "is not a list of texts"),
    (QUESTION | {"choices": ["a dog", 3]}, "choices", r"\['a dog', 3\] is not a list of texts"),
    (QUESTION | {"question": 3}, "question", "3 is not a text; give the question"),
    (QUESTION | {"question": " "}, "question", "is not a text; give the question"),
    (QUESTION | {"task": ["qa"]}, "task", "is not the name of a task"),
    (QUESTION | {"id": True}, "id", "True is not an id; give a text or a whole number, or leave the column out"),
    (QUESTION | {"id": None}, "id", "empty; give every row its own id, or leave the column out"),
    (QUESTION | {"id": "good"}, "id", "'good' also names row 1; give every row its own id"),
    (SPEECH | {"text": ""}, "text", "empty; give the transcript"),
    (
        {"id": "t", "audio": "a.wav"},
        "text",
        r"missing; give the transcript in text, .* --columns text=NAME \(the columns are id, audio\)",
    ),
    (SPEECH | {"language": ["en"]}, "language", r"\['en'\] is not a language; give an ISO code"),
    (SPEECH | {"text": "half \ud83d"}, "text", "half a character; write both halves"),
    (SPEECH | {"note": ["a", {"b": "\udc00"}]}, "note[1].b", "half a character"),
    (AVQA | {"answer": 4}, "answer", "index 4 lies outside the 2 choices"),
    (AVQA | {"answer": 1.5}, "answer", "'1.5' is not among the choices"),
    (AVQA | {"multi_choice": ["a", "a", " a"]}, "multi_choice", "two or more different choices"),
    (AVQA | {"multi_choice": ["rain", None]}, "multi_choice", "is not a list of texts"),
    (MUSIC | {"location": ""}, "location", "'' is not a path; give that of the clip"),
    (MUSIC | {"key": "C major"}, "key", "'C major' is not a list; give the root and the mode"),
]


@pytest.mark.parametrize(("row", "field", "message"), FIELDS)
def test_a_bad_row_is_named_or_skipped(folder: Path, row: Any, field: str, message: str) -> None:
    (folder / "cut.wav").write_bytes((folder / "a.wav").read_bytes()[:5000])
    good = MUSIC | {"location": "good.wav"} if "location" in row else (AVQA if "video_name" in row else QUESTION)
    good = good | {"id": "good"}
    path = folder / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in (good, row)))
    (folder / "good.wav").write_bytes((folder / "a.wav").read_bytes())
    where = f", field '{re.escape(field)}'" if field else ""
    with pytest.raises(ValueError, match=rf"rows\.jsonl: row 2{where}: .*{message}") as caught:
        read_samples(path, check_audio=True)
    assert "\n" not in str(caught.value)
    loaded = read_samples(path, check_audio=True, on_error="skip")
    (skipped,) = loaded.skipped
    assert (skipped.file, skipped.row, skipped.field) == (str(path), 2, field)
    assert loaded.summary().endswith(f", 1 row skipped (first: {skipped})") and loaded.samples


@pytest.mark.parametrize(
    ("read", "row", "field", "message"),
    [
        # Answers with a verdict.
        (read_pairs, QUESTION | {"chosen": NAN, "rejected": "b"}, "chosen", "nan is not a text"),
        (read_pairs, QUESTION | {"chosen": "a", "rejected": "b", "margin": "1"}, "margin", "'1' is not a finite"),
        (read_steps, QUESTION | {"steps": ["a"], "labels": [NAN]}, "labels[0]", "nan is not a label"),
        # Streams.
        (read_streams, STREAM | {"seconds": 99}, "seconds", r"99 s declared, but the audio has 2\.00 s"),
        (read_streams, STREAM | {"duration": 0.5}, "duration", r"0\.5 s declared, but the audio has 2\.00 s"),
        (read_streams, STREAM | {"source_language": ["en"]}, "source_language", "is not a language"),
        (read_streams, STREAM | {"units": [UNIT | {"target": 3}]}, "units[0].target", "3 is not a text"),
        (read_streams, STREAM | {"units": [UNIT | {"end": 10**400}]}, "units[0].end", "is not a time"),
        (
            read_streams,
            STREAM | {"units": [UNIT | {"target_audio": {"path": 3}}]},
            "units[0].target_audio.path",
            "3 is",
        ),
        (read_streams, PAIR | {"words": [WORDS[0] | {"start": 0.9}, WORDS[1]]}, "words", "before it starts at 0.9 s"),
        (
            read_streams,
            PAIR | {"words": [WORDS[0] | {"start": 0.5, "end": 0.6}, WORDS[1]]},
            "words",
            "the previous one",
        ),
        # Texts.
        (read_utterances, SPEECH | {"language": ["en"]}, "language", "is not a language"),
        (read_utterances, SPEECH | {"speaker": 1.5}, "speaker", "1.5 is not a name"),
        (read_passages, {"text": ["a"]}, "text", "is not a text; give a passage"),
        (read_questions, {"question": "?", "choices": "ab", "answer": "a"}, "choices", "is not a list of texts"),
    ],
)
def test_fields_that_cannot_be(folder: Path, read: Read, row: Mapping[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl: row 1, field '{re.escape(field)}': .*{message}") as caught:
        read(write(folder / "rows.jsonl", row))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", [-1, 0, True, 1.5])
@pytest.mark.parametrize("read", [read_samples, read_pairs, read_streams, read_utterances, read_passages])
def test_a_limit_below_one(folder: Path, read: Callable[..., object], limit: Any) -> None:
    path = write(folder / "rows.jsonl", SPEECH)
    with pytest.raises(ValueError, match="limit must be a whole number from 1, or None for all rows, got"):
        read(path, limit=limit)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("gone.jsonl", None, {}, r"gone\.jsonl: missing; check the path"),
        ("empty.jsonl", "\n", {}, r"empty\.jsonl: empty"),
        ("list.json", "[]", {}, "an empty list"),
        ("list.json", '[{"id": 1},', {}, "not a JSON list"),
        ("m.xlsx", "id,audio\n", {}, r"m\.xlsx: no data file; give \.jsonl"),
        ("m.jsonl", '{"name": "x"}\n', {}, "row 1: no known kind of manifest has the columns name"),
        ("m.jsonl", "{\n{\n", {"on_error": "skip"}, "no readable row"),
        (
            "m.jsonl",
            '{"id": "caf\udce9"}\n{"audio": "a", "text": "b"}',
            {},
            "row 1: byte 0xe9 at column 12 is not UTF-8; save the file",
        ),
        ("m.csv", "audio,text\na.wav,caf\udce9\n", {}, r"m\.csv, line 2: byte 0xe9 at column 10 is not UTF-8; save"),
        ("m.csv", "audio,question,choices\na.wav,?,[a\n", {}, "row 1, field 'choices': not a JSON list"),
        ("m.csv", 'audio,question,answer\na.wav,?,"[""a, b"\n', {}, "row 1, field 'answer': not a JSON list"),
        (
            "m.csv",
            "wav,label\na.wav,b\n",
            {},
            "no known kind .* the columns wav, label; give audio .*--columns audio=NAME",
        ),
        ("m.parquet", "no parquet", {}, r"m\.parquet: not readable as parquet"),
        ("m.jsonl", '{"audio": "a"}\n', {"kind": "nemo"}, "no kind of manifest is called 'nemo'; choose from auto"),
        ("m.jsonl", '{"audio": "a"}\n', {"kind": "librispeech"}, r"no \*\.trans\.txt below it"),
        ("m.jsonl", '{"audio": "a"}\n', {"kind": "wenetspeech"}, "no WenetSpeech file"),
        ("m.jsonl", '{"audio": "a"}\n', {"on_error": "ignore"}, "on_error must be"),
        ("m.jsonl", '{"audio": "a"}\n', {"audio_root": "no/such"}, "audio_root no/such: no such folder"),
        ("w.json", '{"audios": []}', {}, "field 'audios': empty; give the recordings"),
        (
            "w.json",
            '{"audios": [{"path": "a", "segments": []}]}',
            {},
            r"row 1, field 'segments': \[\] is not a list of",
        ),
        ("w.json", '{"audios": [{"segments": [{}]}]}', {}, "row 1, field 'path': missing"),
        ("w.json", '{"audios": [3]}', {}, "row 1: 3 is not an object"),
        ("w.json", '{"audios": [{"path": "a", "segments": [{"begin_time": "0"}]}]}', {}, "'0' is not a time"),
        *((name, "[" * 100_000, {}, "not (valid JSON|a JSON list)") for name in ("rows.jsonl", "rows.json")),
        ("rows.jsonl", '{"audio": ' + "9" * 5000 + "}", {}, "not valid JSON"),
        ("rows.json", "\0" * 99, {}, "not valid JSON"),
    ],
)
def test_unusable_files_and_arguments(
    tmp_path: Path, name: str, content: str | None, arguments: dict[str, Any], message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_samples(tmp_path / name, **arguments)
    with pytest.raises(TypeError, match="no option strict; they are think, audio_root"):
        read_samples([SPEECH], strict=True)  # type: ignore[call-arg]


def test_rows_in_memory_and_folders_that_are_none(tmp_path: Path) -> None:
    assert [str(r) for r in read_samples([SPEECH, 3], on_error="skip").skipped] == [
        "rows: row 2: a int, not a dictionary of columns; give {…}"
    ]
    for data in ({"audio": ["a.wav"]}, None, 3):
        with pytest.raises(
            ValueError, match=f"^{type(data).__name__}: not read as data; give a file, a folder, a list"
        ):
            read_samples(data)
    asked = [{"audio": "a.wav", "question": question, "answer": "b"} for question in ("Which?", "Who?", "Who?")]
    loaded = read_samples(asked, on_error="skip")
    assert [s.id for s in loaded.samples] == ["a.wav", "a.wav:2", "a.wav:3"]
    assert [r.field for r in read_samples(asked[1:], on_error="skip").skipped] == ["id"]
    with pytest.raises(ValueError, match=r"a folder without metadata\.csv.*; name a data file"):
        read_samples(tmp_path)
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "metadata.csv").write_text("file_name,transcription\na.wav,hello\n")
    with pytest.raises(ValueError, match=r"an audio folder with test/metadata\.csv, train/metadata\.csv; name one of"):
        read_samples(tmp_path)
    (tmp_path / "test" / "metadata.csv").unlink()
    (sample,) = read_samples(tmp_path).samples
    assert sample.audio[0].path == str(tmp_path / "train" / "a.wav") and sample.references == ("hello",)


def test_half_a_character_spoils_its_row_only(folder: Path) -> None:
    rows = [SPEECH | {"id": "1"}, SPEECH | {"id": "2", "text": "\ud800"}, SPEECH | {"id": "3", "text": "😀"}]
    (folder / "rows.json").write_text(json.dumps(rows))
    for path in (write(folder / "rows.jsonl", *rows), folder / "rows.json"):
        loaded = read_samples(path, on_error="skip")
        assert [s.references[0] for s in loaded.samples] == ["good morning", "😀"]
        assert [(r.row, r.field) for r in loaded.skipped] == [(2, "text")]


# -- tables ------------------------------------------------------------------------------------------------------------


def arrow(path: Path, rows: int = 2000) -> Path:
    table = pa.table({"audio": [f"clips/{i}.wav" for i in range(rows)], "text": ["good morning " * 9] * rows})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


@pytest.mark.parametrize("written", ["{", "[]", '{"info": {"features": {"text": {"_type": "ClassLabel"}}}}'])
def test_damaged_names_of_class_labels(tmp_path: Path, written: str) -> None:
    table = pa.table({"audio": ["a.wav"], "text": ["hello"]}).replace_schema_metadata({"huggingface": written})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet: not readable as parquet \(.*\); write it again"):
        read_samples(tmp_path / "t.parquet")


def test_a_cut_arrow_file_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    path = arrow(tmp_path / "rows.arrow")
    content = path.read_bytes()
    for end in (len(content) - 8, len(content) // 2, len(content) // 3, 700, 8):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"rows\.arrow: (not readable as arrow|holds no rows)"):
            list(read_rows(path))
    # Cut while it is read: a mapped file would raise SIGBUS.
    path.write_bytes(content)
    rows = read_rows(path)
    next(rows)
    path.write_bytes(content[:5000])
    with pytest.raises(ValueError, match=r"rows\.arrow: not readable as arrow"):
        list(rows)


def test_offsets_of_an_arrow_file_are_checked(tmp_path: Path) -> None:
    """A text that ends far beyond the data: read as it stands, it is other memory or a crash."""
    path = tmp_path / "rows.arrow"
    offsets = np.array([0, 3, 6], np.int32)
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"onetwo"))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch([texts], ["text"]))
    content = path.read_bytes()
    assert content.count(offsets.tobytes()) == 1
    path.write_bytes(content.replace(offsets.tobytes(), np.array([0, 3, 2**30], np.int32).tobytes()))
    code = f"from pathlib import Path; from audiorl.data.rows import read_rows; list(read_rows(Path({str(path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, "the process ended by a signal"
    assert "rows.arrow: not readable as arrow" in done.stderr


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_damaged_tables_are_named(tmp_path: Path, suffix: str) -> None:
    path = arrow(tmp_path / "rows.arrow", 50)
    if suffix == "parquet":
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"audio": [f"{i}.wav" for i in range(500)], "text": ["a"] * 500}), path)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 8):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            list(read_rows(path))
        except ValueError as error:
            assert str(error).startswith(f"{path}: "), error
            refused += 1
    assert refused > 10


def test_a_saved_dataset_is_read_without_mapping(tmp_path: Path) -> None:
    arrow(tmp_path / "data-00000-of-00002.arrow", 150)
    content = arrow(tmp_path / "data-00001-of-00002.arrow", 50).read_bytes()
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"_data_files": files}))
    assert [row.number for row in read_rows(tmp_path) if isinstance(row, Row)] == [*range(1, 201)]
    (tmp_path / "data-00001-of-00002.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow: not readable as arrow"):
        list(read_rows(tmp_path))
    for content_, message in (
        ("{}", r"state\.json: damaged \(KeyError\('_data_files'\)\)"),
        (
            '{"_data_files": [{"filename": "../other.arrow"}]}',
            r"state\.json: '../other.arrow' is not the name of a file",
        ),
        ("{", r"state\.json: damaged"),
    ):
        state.write_text(content_)
        with pytest.raises(ValueError, match=message):
            list(read_rows(tmp_path))


# -- recorded rollouts -------------------------------------------------------------------------------------------------


def tensor(shape: list[int], data: str, dtype: str = "int64") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": []}, "field 'segments': empty"),
        ({"index": True}, "index': True is not a whole number"),
        ({"segments.policy_version": 0.5}, r"segments\[0\].policy_version': 0.5 is not a whole number"),
        ({"segments.policy_version": -1}, r"segments\[0\].policy_version': holds -1, expected 0 or more"),
        ({"segments.ids": tensor([1], "//////////8=")}, "ids': holds -1, expected 0 or more"),
        ({"segments.code_mask": None}, "codes without code_mask, or code_mask without codes"),
        ({"segments.prompt_codes": tensor([1, 2], "AAAAAAAAAAAAAAAAAAAAAA==")}, "not as long as its ids"),
        ({"segments.text": "\ud800"}, "half a character"),
        ({"segments.audio": [{"path": "a.wav", "start": "x"}]}, r"audio\[0\].start': 'x' is not a number"),
        ({"segments.audio": [{"path": "a.wav", "start": -1.0}]}, r"audio\[0\]': .*start must be >= 0, got -1"),
        ({"spoken_audio": {"path": "a.wav", "start": -1.0}}, "field 'spoken_audio': .*start must be >= 0"),
        ({"segments.ids": tensor([], "", "int8")}, "'int8' is none of int64"),
        ({"spoken_audio": {"path": 3}}, "field 'spoken_audio.path': 3 is not a text"),
    ],
)
def test_rollouts_that_cannot_be(tmp_path: Path, change: Mapping[str, Any], message: str) -> None:
    import torch

    from audiorl.audio import AudioClip

    prompt = (Message("user", (AudioClip(path="/a.wav"), "Say it.")),)
    codes, mask = torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.bool)
    ids = torch.zeros(1, dtype=torch.long)
    segment = Segment(torch.arange(3), ids, torch.zeros(1, 2), codes=codes, code_mask=mask)
    row = json.loads(json.dumps(rollout_row(Rollout(Sample("s", prompt), (segment,), "g"), 1, 0.0)))
    (tmp_path / "rollouts").mkdir()
    assert read_rollouts(write(tmp_path / "rollouts" / "step.jsonl", row))
    for name, value in change.items():
        part, _, field = name.partition(".")
        row[part] = [row[part][0] | {field: value}] if field else value
    with pytest.raises(ValueError, match=rf"step\.jsonl: row 1.*{message}"):
        read_rollouts(write(tmp_path / "rollouts" / "step.jsonl", row))

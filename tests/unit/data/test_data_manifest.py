"""Every kind of manifest over real recordings, and one clear line for every way a row can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance, bundled_speech
from audiorl.data.manifest import Loaded, read_samples, samples_from_rows
from audiorl.data.views import views_of
from audiorl.types import Sample

UTTERANCES = bundled_speech(("en",), min_seconds=0.5, max_seconds=2)[:4]
QUESTION = {"id": "q1", "audio": "a0.wav", "question": "Which?", "choices": ["a dog", "a cat"], "answer": "a cat"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a0.wav … a3.wav: real recordings at 16 kHz."""
    for i, u in enumerate(UTTERANCES):
        soundfile.write(tmp_path / f"a{i}.wav", u.clip.load(16_000), 16_000)
    return tmp_path


def write_lines(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def prompt(sample: Sample) -> str:
    text = sample.messages[0].content[1]
    assert isinstance(text, str)
    return text


def assert_hears(clip: AudioClip, utterance: Utterance) -> None:
    expected = utterance.clip.load(16_000)
    heard = clip.load(16_000)
    assert len(heard) == len(expected)
    np.testing.assert_allclose(heard, expected, atol=1e-4)


def test_rows_give_what_views_of_a_prompt_need(folder: Path) -> None:
    rows = [{**QUESTION, "clean_audio": "a1.wav", "rationale": "It meows."}]
    (sample,) = read_samples(write_lines(folder / "m.jsonl", rows)).samples
    (view,) = views_of([sample], "clean")
    assert_hears(view.audio[0], UTTERANCES[1])
    assert str(views_of([sample], "rationale")[0].messages[-1].content[-1]).endswith("answer: It meows.")


def test_native_questions_and_transcripts_in_one_file(folder: Path) -> None:
    rows = [
        {**QUESTION, "answer": 1, "difficulty": "hard"},
        {"id": "u1", "audio": "a1.wav", "text": "good morning", "language": "en"},
        {"id": "o1", "audio": "a2.wav", "question": "Say it.", "answer": ["one", "a one"], "task": "open"},
    ]
    loaded = read_samples(write_lines(folder / "m.jsonl", rows), check_audio=True)
    assert loaded.summary() == f"{folder / 'm.jsonl'}: 3 samples"
    q, u, o = loaded.samples
    assert (q.id, q.references, q.choices, q.task) == ("q1", ("a cat",), ("a dog", "a cat"), "qa")
    assert q.metadata == {"difficulty": "hard"}
    assert "Which?" in prompt(q) and "- a dog" in prompt(q) and "<think>" in prompt(q)
    assert (u.references, u.choices, u.task) == (("good morning",), (), "asr")
    assert u.metadata["language"] == "en" and "English" in prompt(u)
    assert (o.references, o.task) == (("one", "a one"), "open")
    for sample, utterance in zip(loaded.samples, UTTERANCES, strict=False):
        assert_hears(sample.audio[0], utterance)


def test_no_think_and_a_question_for_all(folder: Path) -> None:
    rows = [{"id": "x", "audio": "a0.wav", "answer": "dog"}]
    loaded = read_samples(write_lines(folder / "m.jsonl", rows), think=False, question="Which animal is it?")
    assert "Which animal is it?" in prompt(loaded.samples[0]) and "think" not in prompt(loaded.samples[0])
    rows = [{"audio": "a0.wav", "text": "hola"}]
    loaded = read_samples(write_lines(folder / "m.jsonl", rows), think=False, question="Transcribe en español.")
    assert prompt(loaded.samples[0]) == "Transcribe en español."


def test_json_list_parquet_arrow_and_saved_dataset_read_the_same(folder: Path) -> None:
    import datasets

    encoded = (folder / "a1.wav").read_bytes()
    columns = {"question": "Which?", "choices": ["a", "b"], "answer": "b", "level": 3}
    rows: list[dict[str, Any]] = [
        {"id": "1", "audio": {"bytes": None, "path": str(folder / "a0.wav")}, **columns},
        {"id": "2", "audio": {"bytes": encoded, "path": None}, **columns},
    ]
    (folder / "list.json").write_text(json.dumps([{**r, "audio": f"a{i}.wav"} for i, r in enumerate(rows)]))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "t.parquet")
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    dataset = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio())
    dataset.save_to_disk(str(folder / "saved"))

    for name in ("list.json", "t.parquet", "stream.arrow", "file.arrow", "saved"):
        samples = read_samples(folder / name, check_audio=True).samples
        assert [(s.id, s.references, s.metadata) for s in samples] == [
            ("1", ("b",), {"level": 3}),
            ("2", ("b",), {"level": 3}),
        ], name
        assert_hears(samples[0].audio[0], UTTERANCES[0])
        assert_hears(samples[1].audio[0], UTTERANCES[1])
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(str(folder / "splits"))
    with pytest.raises(ValueError, match="a dataset with the splits train, test; name one of these folders"):
        read_samples(folder / "splits")
    assert len(read_samples(folder / "splits" / "test").samples) == 2


def test_avqa_and_musicbench(folder: Path) -> None:
    avqa = {
        "id": 7,
        "video_name": "v7",
        "question_text": "What is heard?",
        "multi_choice": ["rain", "a train", "a dog", "music"],
        "answer": 2,
        "question_relation": "Sound",
        "question_type": "Which",
        "dataset_name": "avqa",
        "audio_path": "a0.wav",
    }
    (sample,) = read_samples(write_lines(folder / "avqa.jsonl", [avqa])).samples
    assert (sample.id, sample.references, len(sample.choices)) == ("7", ("a dog",), 4)
    assert sample.metadata["question_type"] == "Which" and sample.metadata["video_name"] == "v7"
    music = {k: avqa[k] for k in ("id", "question_text", "multi_choice", "audio_path")} | {
        "answer": "music",
        "dataset_name": "musicbench",
    }
    for kind in ("auto", "musicbench"):
        (sample,) = read_samples(write_lines(folder / "mb.jsonl", [music]), kind).samples
        assert sample.references == ("music",) and sample.metadata == {"dataset_name": "musicbench"}
        assert_hears(sample.audio[0], UTTERANCES[0])


AVQA = {
    "id": 183,
    "video_name": "-HG3Omg_89c_000030",
    "question_text": "What happened in the video?",
    "multi_choice": ["motorboat", "Yacht consignment", "Sailboat set sail", "Consignment car"],
    "answer": 1,
    "question_relation": "View",
    "question_type": "Happening",
    "dataset_name": "AVQA",
    "audio_path": "a0.wav",
}
MUSICBENCH = {
    "id": 12,
    "question_text": "What is the tempo of the piece?",
    "multi_choice": ["90", "120", "60", "150"],
    "answer": 1,
    "audio_path": "a1.wav",
    "dataset_name": "MusicBench",
}


def test_avqa_asks_about_the_audio(folder: Path) -> None:
    questions = {
        "What happened in the video?": "What happened in the audio?",
        "Video: who speaks in these videos?": "Audio: who speaks in these audio?",
        "Is it a videotape?": "Is it a videotape?",
    }
    rows = [AVQA | {"id": i, "question_text": q} for i, q in enumerate(questions)]
    samples = read_samples(write_lines(folder / "avqa.jsonl", rows)).samples
    asked = [str(s.messages[-1].content[1]).split("\n")[0] for s in samples]
    assert asked == list(questions.values())
    (sample,) = read_samples(write_lines(folder / "mb.jsonl", [MUSICBENCH | {"question_text": "Which video?"}])).samples
    assert "Which video?" in str(sample.messages[-1].content[1]), "only AVQA's clips come from videos"


@pytest.mark.parametrize(
    ("row", "choices", "answer"),
    [
        (AVQA, tuple(AVQA["multi_choice"]), "Yacht consignment"),  # type: ignore[arg-type]
        (AVQA | {"multi_choice": ["car", "bus ", "bus", "rain"], "answer": 2}, ("car", "bus", "rain"), "bus"),
        (AVQA | {"multi_choice": [1, 2, 3, 4], "answer": 2}, ("1", "2", "3", "4"), "3"),
        (AVQA | {"answer": 2.0}, tuple(AVQA["multi_choice"]), "Sailboat set sail"),  # type: ignore[arg-type]
        (AVQA | {"answer": "3"}, tuple(AVQA["multi_choice"]), "Consignment car"),  # type: ignore[arg-type]
        (MUSICBENCH, ("90", "120", "60", "150"), "120"),
        (MUSICBENCH | {"answer": "60"}, ("90", "120", "60", "150"), "60"),
    ],
)
def test_rows_as_published(folder: Path, row: dict[str, Any], choices: tuple[str, ...], answer: str) -> None:
    pq.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    for path in (write_lines(folder / "rows.jsonl", [row]), folder / "rows.parquet"):
        (sample,) = read_samples(path, check_audio=True).samples
        assert (sample.choices, sample.references) == (choices, (answer,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 4}, "index 4 lies outside the 4 choices"),
        ({"answer": "9"}, "index 9 lies outside"),
        ({"answer": 1.5}, "'1.5' is not among the choices"),
        ({"multi_choice": ["a", "a", " a"]}, "two or more different choices"),
        ({"multi_choice": ["a", ""]}, "not empty"),
        ({"multi_choice": "a, b"}, "not a list of texts"),
    ],
)
def test_published_rows_that_are_damaged(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"row 1, field '.*': .*{message}"):
        read_samples(write_lines(folder / "rows.jsonl", [AVQA | change]))


def test_mmau_and_mmar(folder: Path) -> None:
    (folder / "audio").mkdir()
    shutil.copy(folder / "a2.wav", folder / "audio/x.wav")
    mmau = {
        "id": "9b4",
        "audio_id": "./audio/x.wav",
        "question": "Who speaks?",
        "choices": ["A man", "A woman"],
        "answer": "A woman",
        "dataset": "d",
        "task": "speech",
        "split": "test-mini",
        "category": ["Reasoning"],
        "sub-category": "s",
        "difficulty": "easy",
    }
    (folder / "mmau.json").write_text(json.dumps([mmau]))
    (sample,) = read_samples(folder / "mmau.json", check_audio=True).samples
    assert (sample.id, sample.references, sample.task) == ("9b4", ("A woman",), "speech")
    assert sample.metadata["category"] == ["Reasoning"] and sample.metadata["difficulty"] == "easy"
    assert_hears(sample.audio[0], UTTERANCES[2])
    mmar = {k: mmau[k] for k in ("id", "question", "choices", "answer", "category")}
    mmar |= {"audio_path": "./x.wav", "modality": "speech"}
    path = write_lines(folder / "mmar.jsonl", [mmar])
    for kind in ("auto", "mmar"):
        (sample,) = read_samples(path, kind, audio_root=folder / "audio").samples
        assert sample.choices == ("A man", "A woman") and sample.metadata["modality"] == "speech"
        assert_hears(sample.audio[0], UTTERANCES[2])


def test_nemo_manifest_selects_parts(folder: Path) -> None:
    rows = [
        {"audio_filepath": "a0.wav", "offset": 0.1, "duration": 0.3, "text": "a part"},
        {"audio_filepath": "a0.wav", "duration": UTTERANCES[0].duration, "text": "the whole"},
    ]
    part, whole = read_samples(write_lines(folder / "asr.jsonl", rows), "asr", check_audio=True).samples
    assert (part.references, part.task) == (("a part",), "asr")
    np.testing.assert_allclose(part.audio[0].load(), UTTERANCES[0].clip.load()[1600:6400], atol=1e-4)
    assert_hears(whole.audio[0], UTTERANCES[0])
    assert part.id != whole.id


@pytest.mark.parametrize("kind", ["auto", "asr", "librispeech"])
def test_librispeech_folder(folder: Path, kind: str) -> None:
    chapter = folder / "test-clean/1089/134686"
    chapter.mkdir(parents=True)
    for i in range(2):
        wav, rate = soundfile.read(folder / f"a{i}.wav")
        soundfile.write(chapter / f"1089-134686-000{i}.flac", wav, rate)
    (chapter / "1089-134686.trans.txt").write_text("1089-134686-0000 HE HOPED\n1089-134686-0001 STUFF IT\n")
    samples = read_samples(folder / "test-clean", kind, check_audio=True, think=False).samples
    assert [(s.id, s.references) for s in samples] == [
        ("1089-134686-0000", ("HE HOPED",)),
        ("1089-134686-0001", ("STUFF IT",)),
    ]
    assert samples[0].metadata == {"language": "en", "speaker": "1089", "text": "HE HOPED"}
    assert samples[0].task == "asr" and views_of(samples, "transcript")[0].messages[-1].content[0] == "HE HOPED\n"
    assert_hears(samples[1].audio[0], UTTERANCES[1])
    (chapter / "1089-134686-0001.flac").unlink()
    with pytest.raises(ValueError, match=r"trans\.txt: row 2, field 'audio': no 1089-134686-0001\.flac"):
        read_samples(folder / "test-clean", kind)


def test_wenetspeech_segments(folder: Path) -> None:
    segments: list[dict[str, Any]] = [
        {"sid": "Y1_S0", "begin_time": 0.1, "end_time": 0.4, "text": "你好", "subsets": ["TEST_NET"]},
        {"sid": "Y1_S1", "begin_time": 0.4, "end_time": 0.3, "text": "再见"},
    ]
    path = folder / "WenetSpeech.json"
    path.write_text(json.dumps({"audios": [{"aid": "Y1", "path": "a3.wav", "segments": segments}]}))
    loaded = read_samples(path, on_error="skip", check_audio=True)
    (sample,) = loaded.samples
    assert (sample.id, sample.references, sample.metadata["language"]) == ("Y1_S0", ("你好",), "zh")
    np.testing.assert_allclose(sample.audio[0].load(), UTTERANCES[3].clip.load()[1600:6400], atol=1e-4)
    assert str(loaded.skipped[0]) == (
        f"{path}: row 2, field 'end_time': 0.3 does not lie after begin_time 0.4; correct the times"
    )


BAD_ROWS: list[tuple[Mapping[str, Any] | str, str, str]] = [
    ('{"id": "x", "audio": ', "", r"not valid JSON \(.*\); write one object a line"),
    ("[1, 2]", "", r"a JSON list, not an object"),
    ({**QUESTION, "answer": ""}, "answer", "empty"),
    ({**QUESTION, "answer": None}, "answer", "empty"),
    (
        {k: v for k, v in QUESTION.items() if k != "answer"},
        "answer",
        r"missing; .* index from 0 \(the columns are .*question, choices\)",
    ),
    (
        {k: v for k, v in QUESTION.items() if k != "question"},
        "question",
        r"missing; .* \(the columns are .*choices, answer\)",
    ),
    ({**QUESTION, "answer": "a cow"}, "answer", r"'a cow' is not among the choices \['a dog', 'a cat'\]"),
    ({**QUESTION, "answer": 2}, "answer", "index 2 lies outside the 2 choices; count from 0"),
    ({**QUESTION, "answer": -1}, "answer", "index -1 lies outside"),
    ({**QUESTION, "choices": ["a cat"]}, "choices", "two or more different choices"),
    ({**QUESTION, "choices": ["a cat", ""]}, "choices", "is not a list of texts"),
    ({**QUESTION, "choices": "a cat, a dog"}, "choices", "is not a list of texts"),
    ({**QUESTION, "question": 3}, "question", "3 is not a text; give the question"),
    ({**QUESTION, "question": " "}, "question", "is not a text; give the question"),
    ({**QUESTION, "id": ""}, "id", "is not an id; give a text or a whole number, or leave the column out"),
    ({**QUESTION, "id": "good"}, "id", "'good' also names row 1; give every row its own id"),
    ({**QUESTION, "audio": None}, "audio", "missing or empty; give a path"),
    ({**QUESTION, "audio": {"bytes": None, "path": ""}}, "audio", "missing or empty"),
    ({**QUESTION, "audio": "gone.wav"}, "audio", r"gone\.wav: missing"),
    ({**QUESTION, "audio": "empty.wav"}, "audio", r"empty\.wav: empty \(0 bytes\)"),
    ({**QUESTION, "audio": "cut.wav"}, "audio", r"cut\.wav: truncated"),
    ({**QUESTION, "sample_rate": 8000}, "audio", "declared as 8000 Hz but the file has 16000 Hz"),
    ({**QUESTION, "sample_rate": "16k"}, "sample_rate", "is not a sampling rate; give Hz"),
    ({**QUESTION, "start": "0:10"}, "start", "is not a time; give seconds"),
    ({**QUESTION, "start": 100, "duration": 1}, "audio", "lies past the end"),
    ({"id": "t", "audio": "a0.wav", "text": ""}, "text", "empty; give the transcript"),
    ({"id": "t", "audio": "a0.wav"}, "text", r"missing; give the transcript in text \(the columns are id, audio\)"),
]


@pytest.mark.parametrize(("row", "field", "message"), BAD_ROWS)
def test_every_bad_row_is_named_or_skipped(
    folder: Path, row: Mapping[str, Any] | str, field: str, message: str
) -> None:
    (folder / "empty.wav").write_bytes(b"")
    (folder / "cut.wav").write_bytes((folder / "a0.wav").read_bytes()[:5000])
    good = [{**QUESTION, "id": "good"}, {**QUESTION, "id": "last"}]
    path = write_lines(folder / "m.jsonl", [good[0], row, good[1]])
    where = rf"m\.jsonl: row 2, field '{field}': " if field else r"m\.jsonl: row 2: "
    with pytest.raises(ValueError, match=where + ".*" + message) as caught:
        read_samples(path, check_audio=True)
    assert "\n" not in str(caught.value)
    loaded = read_samples(path, check_audio=True, on_error="skip")
    assert [s.id for s in loaded.samples] == ["good", "last"]
    (skipped,) = loaded.skipped
    assert (skipped.file, skipped.row, skipped.field) == (str(path), 2, field)
    assert loaded.summary() == f"{path}: 2 samples, 1 row skipped (first: {skipped})"


def test_rows_in_memory_are_read_like_a_file(folder: Path) -> None:
    rows = [QUESTION, {"audio": "a0.wav", "text": "good morning"}]
    loaded = samples_from_rows(rows, audio_root=folder, check_audio=True)
    of_file = read_samples(write_lines(folder / "m.jsonl", rows)).samples
    assert [s.references for s in loaded.samples] == [s.references for s in of_file] and len(of_file) == 2
    assert [s.audio[0].path for s in loaded.samples] == [s.audio[0].path for s in of_file]
    with pytest.raises(ValueError, match=r"rows: row 2, field 'text': missing; give the transcript"):
        samples_from_rows([QUESTION, {"audio": "a0.wav"}], audio_root=folder)
    with pytest.raises(TypeError, match="no option strict; they are think, audio_root"):
        samples_from_rows(rows, strict=True)  # type: ignore[call-arg]


def test_invalid_utf8_names_the_byte(folder: Path) -> None:
    path = folder / "m.jsonl"
    path.write_bytes(json.dumps(QUESTION).encode() + b'\n{"id": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl: row 2: byte 0xe9 at column 12 is not UTF-8; save the file"):
        read_samples(path)


def test_a_byte_order_mark_and_blank_lines_do_not_matter(folder: Path) -> None:
    path = folder / "m.jsonl"
    second = json.dumps({**QUESTION, "id": "q2"})
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(QUESTION).encode() + b"\r\n\r\n" + second.encode())
    assert [s.id for s in read_samples(path).samples] == ["q1", "q2"]


def test_a_bad_first_row_does_not_hide_the_kind(folder: Path) -> None:
    loaded = read_samples(write_lines(folder / "m.jsonl", ["{", QUESTION]), on_error="skip")
    assert len(loaded.samples) == len(loaded.skipped) == 1


def test_audio_is_not_touched_unless_asked(folder: Path) -> None:
    path = write_lines(folder / "m.jsonl", [{**QUESTION, "audio": "gone.wav"}])
    assert read_samples(path).samples[0].audio[0].path == str(folder / "gone.wav")


def test_limit_counts_samples(folder: Path) -> None:
    path = write_lines(folder / "m.jsonl", ["{", *({**QUESTION, "id": str(i)} for i in range(5))])
    loaded: Loaded = read_samples(path, on_error="skip", limit=2)
    assert [s.id for s in loaded.samples] == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("gone.jsonl", None, {}, r"gone\.jsonl: missing; check the path"),
        ("empty.jsonl", "\n", {}, r"empty\.jsonl: empty"),
        ("list.json", "[]", {}, "an empty list"),
        ("list.json", '[{"id": 1},', {}, "not a JSON list"),
        ("m.csv", "id,audio\n", {}, r"m\.csv: no data file; give \.jsonl"),
        ("m.jsonl", '{"name": "x"}\n', {}, "row 1: no known kind of manifest has the columns name"),
        ("m.jsonl", "{\n{\n", {"on_error": "skip"}, "no readable row"),
        ("m.parquet", "no parquet", {}, r"m\.parquet: not readable as parquet"),
        ("m.jsonl", '{"audio": "a"}\n', {"kind": "nemo"}, "no kind of manifest is called 'nemo'; choose from auto"),
        ("m.jsonl", '{"audio": "a"}\n', {"kind": "librispeech"}, r"no \*\.trans\.txt below it"),
        ("m.jsonl", '{"audio": "a"}\n', {"kind": "wenetspeech"}, "no WenetSpeech file"),
        ("m.jsonl", '{"audio": "a"}\n', {"on_error": "ignore"}, "on_error must be"),
        ("m.jsonl", '{"audio": "a"}\n', {"audio_root": "no/such"}, "audio_root no/such: no such folder"),
    ],
)
def test_unusable_files_and_arguments(
    tmp_path: Path, name: str, content: str | None, arguments: dict[str, Any], message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_samples(tmp_path / name, **arguments)


def test_the_bundled_manifest_is_readable_too() -> None:
    from importlib import resources

    path = Path(str(resources.files("audiorl"))) / "assets/speech/manifest.jsonl"
    loaded = read_samples(path, think=False, limit=50)
    assert [s.id for s in loaded.samples] == [u.id for u in bundled_speech()][:50]
    assert all(s.task == "asr" for s in loaded.samples)

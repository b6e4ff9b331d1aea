"""Preference rows over real recordings, one clear line for every way a row can be wrong, pairs of scored rollouts."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.corpus import bundled_speech
from audiorl.data.manifest import Loaded, read_samples
from audiorl.data.preferences import (
    Judged,
    Pair,
    pair_row,
    pairs_to_judged,
    read_judged,
    read_pairs,
    read_pairs_and_judged,
    read_steps,
)
from audiorl.models.prompts import wants_speech
from audiorl.types import Message, Sample

Reader = Callable[..., Loaded[Any]]
UTTERANCES = bundled_speech(("en",), min_seconds=0.5, max_seconds=2)[:2]
ASKED: dict[str, Any] = {"id": "q1", "audio": "a0.wav", "question": "Which?"}
CHOICES: dict[str, Any] = {**ASKED, "choices": ["a dog", "a cat"], "answer": "a cat"}
PAIR: dict[str, Any] = {**CHOICES, "chosen": "a cat", "rejected": "a dog"}
JUDGED: dict[str, Any] = {**ASKED, "answer": "a dog", "desirable": False}
STEPS: dict[str, Any] = {**ASKED, "steps": ["It barks.", "a cat"], "labels": [1, 0]}
HEARD = {"type": "audio", "audio": "a0.wav"}
SAID = [{"role": "assistant", "content": [HEARD]}]
PROMPT = [{"role": "user", "content": [HEARD, {"type": "text", "text": "Which?"}]}]
ASK, PLACED = ([{"role": "user", "content": content}] for content in ("Which?", [{"type": "audio"}, "Which?"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a0.wav and a1.wav: real recordings at 16 kHz."""
    for i, u in enumerate(UTTERANCES):
        soundfile.write(tmp_path / f"a{i}.wav", u.clip.load(16_000), 16_000)
    return tmp_path


def write_lines(path: Path, *rows: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def sample(clip: AudioClip | None = None, name: str = "s") -> Sample:
    return Sample(name, (Message("user", (clip or UTTERANCES[0].clip, "Which?")),), ("a cat",))


def test_pairs_share_everything_with_their_samples(folder: Path) -> None:
    rows = [
        {**PAIR, "level": 3},
        {"id": "u1", "audio": "a1.wav", "text": "hi", "chosen": "hi ", "rejected": "he", "margin": 2},
    ]
    path = write_lines(folder / "m.jsonl", *rows)
    loaded = read_pairs(path, think=False, check_audio=True)
    assert loaded.summary() == f"{path}: 2 samples"
    a, b = loaded.samples
    assert (a.chosen, a.rejected, a.margin) == ("a cat", "a dog", 0.0)
    assert (b.chosen, b.rejected, b.margin) == ("hi ", "he", 2.0)
    for pair, row, plain in zip(
        loaded.samples, ({"level": 3}, {"text": "hi"}), read_samples(path, think=False).samples, strict=True
    ):
        theirs = asdict(plain) | {"metadata": row}  # read_samples keeps the answers as metadata
        assert asdict(pair.sample) == theirs


def test_the_gold_answer_may_be_missing(folder: Path) -> None:
    rows = [{k: v for k, v in PAIR.items() if k != "answer"}, {**ASKED, "id": "o", "chosen": "one", "rejected": "two"}]
    a, b = read_pairs(write_lines(folder / "m.jsonl", *rows)).samples
    assert (a.sample.references, a.sample.choices, a.sample.metadata) == ((), ("a dog", "a cat"), {})
    assert (b.sample.references, b.sample.choices, b.sample.metadata) == ((), (), {})
    avqa: dict[str, Any] = {
        "id": 7,
        "audio_path": "a0.wav",
        "question_text": "What?",
        "multi_choice": ["rain", "a dog"],
    }
    given = {"chosen": "a dog", "rejected": "rain"}
    a, b = read_pairs(write_lines(folder / "avqa.jsonl", avqa | given, {**avqa, **given, "id": 8, "answer": 1})).samples
    assert (a.sample.references, b.sample.references) == ((), ("a dog",))


def test_answers_as_conversations_and_tables(folder: Path) -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("a cat", [{"type": "text", "text": "a dog"}])]
    (pair,) = read_pairs(write_lines(folder / "m.jsonl", {**PAIR, "chosen": said[0], "rejected": said[1]})).samples
    assert (pair.chosen, pair.rejected) == ("a cat", "a dog")
    rows = [PAIR, {**PAIR, "id": "q2", "margin": 0.5}]
    pq.write_table(pa.Table.from_pylist([{"margin": None, **r} for r in rows]), folder / "t.parquet")
    expected = [asdict(p) for p in read_pairs(write_lines(folder / "m.jsonl", *rows)).samples]
    assert [p["margin"] for p in expected] == [0.0, 0.5]
    assert [asdict(p) for p in read_pairs(folder / "t.parquet").samples] == expected


def test_pairs_and_judged_answers_of_one_table(folder: Path) -> None:
    """A table has all columns in every row, empty ones too."""
    rows: list[dict[str, Any]] = [PAIR, {**JUDGED, "id": "q2"}, {**ASKED, "id": "q3", "completion": "x", "label": True}]
    columns = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), folder / "t.parquet")
    expected = [asdict(item) for item in read_pairs_and_judged(write_lines(folder / "m.jsonl", *rows)).samples]
    assert [asdict(item) for item in read_pairs_and_judged(folder / "t.parquet").samples] == expected


def test_prompts_as_conversations(folder: Path) -> None:
    later = [{"role": "system", "content": ""}, *PROMPT, {"role": "assistant", "content": "A cat?"}]
    later += [{"role": "user", "content": ["Sure?", {**HEARD, "start": 0.1, "duration": 0.2}]}]
    rows = [
        {"prompt": PROMPT, "completion": "a cat", "label": True, "level": 3},
        {"id": "long", "prompt": later, "references": ["a cat"], "answer": "a dog", "label": 0, "task": ""},
    ]
    a, b = read_judged(write_lines(folder / "m.jsonl", *rows), check_audio=True).samples
    assert (a.answer, a.desirable, b.answer, b.desirable) == ("a cat", True, "a dog", False)
    assert (a.sample.id, a.sample.task, a.sample.metadata) == ("m:1", "qa", {"level": 3})
    clip, text = a.sample.messages[0].content
    assert isinstance(clip, AudioClip) and clip.path == str(folder / "a0.wav") and text == "Which?"
    assert [m.role for m in b.sample.messages] == ["system", "user", "assistant", "user"]
    assert b.sample.messages[0].content == ("",)
    assert (b.sample.references, b.sample.task) == (("a cat",), "")
    assert len(b.sample.audio[1].load(16_000)) == 3200


def test_judged_answers(folder: Path) -> None:
    """Under either name; a completion leaves the gold answer."""
    for key, value in (("desirable", True), ("label", True), ("desirable", 1), ("label", 0)):
        (j,) = read_judged(write_lines(folder / "m.jsonl", {**ASKED, "answer": "a dog", key: value})).samples
        assert (j.answer, j.desirable, j.sample.references, j.sample.metadata) == ("a dog", bool(value), (), {})
    (j,) = read_judged(write_lines(folder / "m.jsonl", {**CHOICES, "completion": "a dog!", "label": False})).samples
    assert (j.answer, j.desirable, j.sample.references) == ("a dog!", False, ("a cat",))


def test_steps_have_hard_or_soft_labels(folder: Path) -> None:
    rows = [{**STEPS, "id": str(i), "labels": labels} for i, labels in enumerate(([1, 0], [True, False], [0.25, 1.0]))]
    loaded = read_steps(write_lines(folder / "m.jsonl", *rows))
    assert [s.labels for s in loaded.samples] == [(1.0, 0.0), (1.0, 0.0), (0.25, 1.0)]
    assert all(isinstance(x, float) for s in loaded.samples for x in s.labels)
    assert loaded.samples[0].steps == ("It barks.", "a cat")


TEXTS: list[tuple[Reader, dict[str, str], Callable[[Any], Any], Any]] = [
    (read_pairs, {"chosen": "a cat", "rejected": "no", "margin": "-0.5"}, lambda p: p.margin, -0.5),
    (read_pairs, {"chosen": json.dumps(SAID), "rejected": "[music]"}, lambda p: p.rejected, "[music]"),
    (read_pairs, {"chosen": json.dumps(SAID), "rejected": "no"}, lambda p: Path(p.chosen.path).name, "a0.wav"),
    (read_pairs, {"chosen": '["a", "b"]', "rejected": "no"}, lambda p: p.chosen, '["a", "b"]'),
    *(
        (read_judged, {"completion": "[1, 2]", "label": written}, lambda j: (j.answer, j.desirable), ("[1, 2]", good))
        for written, good in (("true", True), ("False", False), ("1", True), ("0", False))
    ),
    (read_steps, {"steps": '["It barks.", "so"]', "labels": "[1, 0.5]"}, lambda s: (*s.steps, *s.labels),
     ("It barks.", "so", 1.0, 0.5)),
    (read_steps, {"steps": '["It barks."]', "labels": "[false]"}, lambda s: s.labels, (0.0,)),
    (read_samples, {"answer": '["cat", "a cat"]'}, lambda s: s.references, ("cat", "a cat")),
    (read_samples, {"answer": "[1, 2]", "labels": "['Speech']"}, lambda s: (*s.references, s.metadata["labels"]),
     ("[1, 2]", "['Speech']")),
    (read_samples, {"choices": '["a dog", "a cat"]', "answer": "1"}, lambda s: s.references, ("a cat",)),
    (read_samples, {"choices": '["2", "1"]', "answer": "1"}, lambda s: s.references, ("1",)),
]  # fmt: skip


@pytest.mark.parametrize(("read", "row", "made", "expected"), TEXTS)
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_values_of_text_files(
    folder: Path, read: Reader, row: dict[str, str], made: Callable[[Any], Any], expected: Any, kind: str
) -> None:
    row = {**ASKED, **row}
    with open(folder / f"m.{kind}", "w", newline="") as file:
        plain: Any = {} if kind == "csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        csv.writer(file, **plain).writerows([row, row.values()])
    (value,) = read(folder / f"m.{kind}").samples
    assert made(value) == expected


BAD_ROWS: list[tuple[Reader, Mapping[str, Any] | str, str, str]] = [
    (read_pairs, {**PAIR, "rejected": " a cat\n"}, "rejected", "are the same answer; give two different ones"),
    (read_pairs, {**PAIR, "chosen": "  "}, "chosen", "the chosen text is empty"),
    (read_pairs, {**PAIR, "rejected": ""}, "rejected", "the rejected text is empty"),
    (read_pairs, {**PAIR, "rejected": [{"role": "assistant", "content": " "}]}, "rejected", "text is empty"),
    (read_pairs, {**CHOICES, "chosen": "a cat"}, "rejected", r"missing; .* \(the columns are id, audio, .*, chosen\)"),
    (read_pairs, {**PAIR, "chosen": None}, "chosen", "missing; give"),
    (read_pairs, {**PAIR, "chosen": 3}, "chosen", "3 is not a text"),
    (read_pairs, {**PAIR, "chosen": [{"role": "user", "content": "a cat"}]}, "chosen", "is not one assistant message"),
    (read_pairs, {**PAIR, "chosen": [*PROMPT, {"role": "assistant", "content": "x"}]}, "chosen", "belongs in prompt"),
    (read_pairs, {**PAIR, "chosen": [{"role": "assistant", "content": ["x", HEARD]}]}, "chosen", "holds audio besides"),
    (read_pairs, {**PAIR, "chosen": SAID, "rejected": SAID}, "rejected", "are the same answer"),
    (read_pairs, {**PAIR, "margin": float("nan")}, "margin", "nan is not a finite number"),
    (read_pairs, {**PAIR, "margin": float("inf")}, "margin", "inf is not a finite number"),
    (read_pairs, {**PAIR, "margin": "0.5"}, "margin", "'0.5' is not a finite number"),
    (read_pairs, {**PAIR, "margin": True}, "margin", "True is not a finite number"),
    (read_judged, {**JUDGED, "answer": ""}, "answer", "the answer text is empty"),
    (read_judged, {**JUDGED, "completion": " "}, "completion", "the completion text is empty"),
    (read_judged, {**ASKED, "desirable": True}, "answer", r"missing; .* \(the columns are .*, desirable\)"),
    (read_judged, {**JUDGED, "answer": ["a dog"]}, "answer[0]", "'a dog' is not a message; give role"),
    (read_judged, {**JUDGED, "desirable": None}, "desirable", "missing; give true or false"),
    (read_judged, {**JUDGED, "desirable": "yes"}, "desirable", "'yes' is not a verdict; give true or false"),
    (read_judged, {**ASKED, "answer": "x", "label": 0.5}, "label", "0.5 is not a verdict; give true or false"),
    (read_steps, {**STEPS, "labels": [1, 1.5]}, "labels[1]", r"1\.5 is not a label; give a number from 0"),
    (read_steps, {**STEPS, "labels": [-0.1, 1]}, "labels[0]", r"-0\.1 is not a label"),
    (read_steps, {**STEPS, "labels": [1, float("nan")]}, "labels[1]", "nan is not a label"),
    (read_steps, {**STEPS, "labels": [1, "0"]}, "labels[1]", "'0' is not a label"),
    (read_steps, {**STEPS, "labels": 1}, "labels", "1 is not a list; give one label a step"),
    (read_steps, {**STEPS, "labels": [1]}, "labels", r"1 label\(s\) for 2 step\(s\); give one label a step"),
    (read_steps, {**STEPS, "steps": [], "labels": []}, "steps", "is not a list of texts; give one text a step"),
    (read_steps, {**STEPS, "steps": ["It barks.", " "]}, "steps[1]", "' ' is not a text"),
    (read_steps, {**STEPS, "steps": ["It barks.", 2]}, "steps[1]", "2 is not a text"),
    (read_steps, {**STEPS, "steps": "It barks."}, "steps", "is not a list of texts; give one text a step"),
    (read_steps, {**ASKED, "labels": [1]}, "steps", "missing; give one text a step"),
    # What samples reject, pairs reject.
    (read_pairs, "{", "", "not valid JSON"),
    (read_pairs, {**PAIR, "answer": "a cow"}, "answer", "'a cow' is not among the choices"),
    (read_pairs, {**PAIR, "choices": ["a cat"]}, "choices", "two or more different choices"),
    (read_pairs, {**PAIR, "question": " "}, "question", "is not a text; give the question"),
    (read_pairs, {**PAIR, "audio": "gone.wav"}, "audio", r"gone\.wav: missing"),
    (read_judged, {**JUDGED, "sample_rate": 8000}, "audio", "declared as 8000 Hz but the file has 16000 Hz"),
    (read_steps, {**STEPS, "id": ""}, "id", "is not an id"),
    (read_pairs, {**PAIR, "id": "good", "question": "How?"}, "id", "also names row 1; give every prompt its own id"),
    # Conversations.
    (
        read_pairs,
        {**PAIR, "prompt": [{"role": "human", "content": "x"}]},
        "prompt[0].role",
        "'human' is not one of system, user, assistant",
    ),
    (read_pairs, {**PAIR, "prompt": ASK, "audio": None}, "prompt", "holds no audio"),
    (read_pairs, {**PAIR, "prompt": ASK, "audios": ["a0.wav", 3]}, "audios[1]", "3 is not audio"),
    (
        read_pairs,
        {**PAIR, "prompt": PROMPT, "audios": ["a0.wav"]},
        "audios",
        "1 clip, 0 places for one in prompt; write",
    ),
    (
        read_pairs,
        {**PAIR, "prompt": [{"role": "user", "content": [HEARD, 3]}]},
        "prompt[0].content[1]",
        "3 is not text, audio or an image; give",
    ),
    (
        read_pairs,
        {**PAIR, "prompt": PLACED, "audio": None},
        "audio",
        "0 clips, 1 place for one in prompt; write <audio>",
    ),
    (read_pairs, {**PAIR, "prompt": PROMPT, "id": " "}, "id", "is not an id"),
    (read_pairs, {**PAIR, "prompt": PROMPT, "choices": ["a", ""]}, "choices[1]", "is not a text"),
    (read_pairs, {**PAIR, "prompt": PROMPT, "metadata": [1]}, "metadata", "is not an object"),
]


@pytest.mark.parametrize(("read", "row", "field", "message"), BAD_ROWS)
def test_every_bad_row_is_named_or_skipped(
    folder: Path, read: Reader, row: Mapping[str, Any] | str, field: str, message: str
) -> None:
    good = {**CHOICES, **{read_pairs: PAIR, read_judged: JUDGED, read_steps: STEPS}[read], "id": "good"}
    path = write_lines(folder / "m.jsonl", good, row, {**good, "id": "last"})
    where = rf"m\.jsonl: row 2, field '{re.escape(field)}': " if field else r"m\.jsonl: row 2: "
    with pytest.raises(ValueError, match=where + ".*" + message) as caught:
        read(path, check_audio=True)
    assert "\n" not in str(caught.value)
    loaded = read(path, check_audio=True, on_error="skip")
    assert [v.sample.id for v in loaded.samples] == ["good", "last"]
    assert loaded.summary() == f"{path}: 2 samples, 1 row skipped (first: {caught.value})"


def test_a_prompt_may_come_again(folder: Path) -> None:
    path = write_lines(folder / "m.jsonl", PAIR, {**PAIR, "chosen": "a cat!"}, {**PAIR, "audio": "a1.wav"})
    loaded = read_pairs(path, on_error="skip")
    assert [p.chosen for p in loaded.samples] == ["a cat", "a cat!"]
    assert [(s.row, s.field) for s in loaded.skipped] == [(3, "id")]
    with pytest.raises(ValueError, match="row 2, field 'id': 'q1' also names row 1; give every row its own id"):
        read_samples(path)


def test_pairs_to_judged() -> None:
    s = sample()
    assert pairs_to_judged([Pair(s, "a", "b", 1.0), Pair(s, "c", "a")]) == [
        Judged(s, "a", True),
        Judged(s, "b", False),
        Judged(s, "c", True),
        Judged(s, "a", False),
    ]


def test_written_pairs_read_back_equal(folder: Path) -> None:
    path = str(folder / "a0.wav")
    messages = (
        Message("system", ("",)),
        Message("user", (AudioClip(path=path), "¿Cuál?", AudioClip(path=path, duration=0.25, sample_rate=16_000))),
        Message("assistant", ("猫?",)),
        Message("user", ("Sure?", AudioClip(path=path, start=0.1, duration=0.2))),
    )
    metadata = {"text": "hola", "nested": {"audio": [1, None]}, "id": "other"}
    pairs = [
        Pair(Sample("a", messages, ("a cat", "cat"), ("a cat", "a dog"), "", metadata), " a cat\n", "a dog", 0.1),
        Pair(sample(), "<answer>y</answer>", "n", -1.0),
        Pair(sample(), "again", "n"),
    ]
    write_lines(folder / "out.jsonl", *map(pair_row, pairs))
    loaded = read_pairs(folder / "out.jsonl", check_audio=True)
    assert [asdict(p) for p in loaded.samples] == [asdict(p) for p in pairs]
    (part,) = loaded.samples[0].sample.messages[3].content[1:]
    assert isinstance(part, AudioClip) and len(part.load(16_000)) == 3200


def test_spoken_answers(folder: Path) -> None:
    spoken, other = ([{"role": "assistant", "content": [{**HEARD, "audio": name}]}] for name in ("a0.wav", "a1.wav"))
    asked = {"prompt": [{"role": "user", "content": "Say yes."}], "metadata": {"respond": "speech"}}
    path = write_lines(folder / "m.jsonl", {**asked, "chosen": spoken, "rejected": other})
    (pair,) = read_pairs(path, check_audio=True).samples
    assert [a.path for a in (pair.chosen, pair.rejected) if isinstance(a, AudioClip)] == [
        str(folder / name) for name in ("a0.wav", "a1.wav")
    ]
    assert wants_speech(pair.sample)
    write_lines(folder / "out.jsonl", pair_row(pair))
    assert [asdict(p) for p in read_pairs(folder / "out.jsonl").samples] == [asdict(pair)]
    (folder / "a1.wav").write_bytes(b"no audio")
    with pytest.raises(ValueError, match=r"m\.jsonl: row 1, field 'rejected': .*a1\.wav"):
        read_pairs(path, check_audio=True)


def test_relative_paths_are_written_absolute_and_audio_in_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "out").mkdir()
    pair = Pair(sample(AudioClip(path="a0.wav")), "x", "y")
    (back,) = read_pairs(write_lines(folder / "out" / "pairs.jsonl", pair_row(pair)), check_audio=True).samples
    assert back.sample.audio[0].key == pair.sample.audio[0].key
    clip = AudioClip(array=UTTERANCES[0].clip.load(16_000), sample_rate=16_000)
    with pytest.raises(ValueError, match="<audio array> has no path; write the audio to a file"):
        pair_row(Pair(sample(clip), "x", "y"))

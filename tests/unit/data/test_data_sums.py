"""Spoken numbers: recordings of single words become questions, and thoughts are read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.cli import main
from audiorl.data.manifest import read_samples
from audiorl.data.sums import OPERATIONS, number_words, read_thought, split_speakers, spoken_numbers, work_out
from audiorl.rewards import SpokenNumbers
from audiorl.types import Rollout, Sample, Segment


@pytest.mark.parametrize(
    ("operation", "numbers", "thought", "answer"),
    [
        ("sum", [4], "4", "4"),
        ("sum", [3, 8, 2], "3+8=11+2=13", "13"),
        ("difference", [3, 8, 2], "3-8=-5-2=-7", "-7"),
        ("largest", [3, 8, 2], "3^8=8^2=8", "8"),
        ("count", [7, 7, 7, 7], "7,7,7,7=4", "4"),
        ("twice", [5, 3, 5, 1], "5,3,5,1=5", "5"),
    ],
)
def test_thoughts_are_written_and_read(operation: str, numbers: list[int], thought: str, answer: str) -> None:
    assert work_out(numbers, operation) == (thought, answer)
    assert read_thought(thought, operation) == (numbers, answer)
    assert read_thought(f" {thought} ", operation) == (numbers, answer)
    assert read_thought(thought + "0", operation)[1] != answer


@pytest.mark.parametrize(
    ("said", "response", "parts", "total"),
    [
        ([3, 8, 2], "<think>3+8=11+2=13</think><answer>13</answer>", (1, 1, 1, 0), 2),
        ([3, 8, 2], "<think>3+8=11+3=14</think><answer>14</answer>", (2 / 3, 0, 1, 0), 5 / 3),  # consistent, misheard
        ([3, 8, 2], "<think>3+7=10+3=13</think><answer>13</answer>", (1 / 3, 0, 1, 1), 4 / 3),  # two errors that cancel
        ([3, 8, 2], "<think>3+8=12+2=13</think><answer>13</answer>", (1, 1, 0, 0), 1),  # a wrong step
        ([3, 8, 2], "<think>3+8=11+2=13</think><answer>12</answer>", (1, 1, 0, 0), 1),  # an answer of its own
        ([3, 8, 2], "<think>3+8=11</think><answer>13</answer>", (2 / 3, 0, 0, 1), 2 / 3),
        ([3, 8, 2], "<think>three and eight</think><answer>13</answer>", (0, 0, 0, 1), 0),
        ([3, 8, 2], "<answer>13</answer>", (0, 0, 0, 1), 0),
        ([3], "<think>3+8=11+2=13+1=14</think><answer>14</answer>", (0, 0, 1, 0), 1),  # more wrong numbers than said
    ],
)
def test_the_reward_by_hand(said: list[int], response: str, parts: tuple[float, ...], total: float) -> None:
    sample = Sample("s", (), (work_out(said, "sum")[1],), metadata={"numbers": said, "operation": "sum"})
    (score,) = SpokenNumbers()([Rollout(sample, (Segment(None, None, None, response),), "s")])  # type: ignore[arg-type]
    assert score.total == pytest.approx(total)
    names = ("heard", "exact", "follows", "luck")
    assert tuple(score.parts[n] for n in names) == pytest.approx(parts)


def test_a_reward_wants_to_know_what_was_said() -> None:
    with pytest.raises(ValueError, match="sample 's' needs the numbers that are said and an operation"):
        SpokenNumbers().check(Sample("s", (), ("3",), metadata={"numbers": [1, 2]}))


@pytest.mark.parametrize("language", ["en", "es", "fr"])
def test_the_bundled_voices_count(language: str) -> None:
    words = number_words("bundled", language)
    assert {w.value for w in words} == set(range(1, 10)) and all(w.language == language for w in words)


def test_sequences_say_their_numbers() -> None:
    words = number_words("bundled") + number_words("synthetic:2")
    for operation in OPERATIONS:
        samples = spoken_numbers(words, 9, (3, 4), operation, seed=1)
        assert len({s.metadata["speaker"] for s in samples}) == 3, "speakers take turns"
        for s in samples:
            numbers = s.metadata["numbers"]
            assert work_out(numbers, operation) == (s.metadata["thought"], s.references[0])
            assert s.task == f"{len(numbers)} numbers" and 3 <= len(numbers) <= 4
            assert 0.2 * len(numbers) < len(s.audio[0].load(16_000)) / 16_000 < 1.5 * len(numbers)
    again = spoken_numbers(words, 9, (3, 4), OPERATIONS[-1], seed=1)
    for one, other in zip(samples, again, strict=True):
        assert np.array_equal(one.audio[0].load(16_000), other.audio[0].load(16_000))
    assert [s.metadata["numbers"] for s in spoken_numbers(words, 9, (3, 4), OPERATIONS[-1], seed=2)] != [
        s.metadata["numbers"] for s in samples
    ]
    train, test = (
        {tuple(s.metadata["numbers"]) for s in spoken_numbers(words, 200, seed=3, written=True, split=split)}
        for split in ("train", "test")
    )
    assert not train & test and len(train) > 100 and len(test) > 50
    (written,) = spoken_numbers(words, 1, (2, 2), written=True)
    assert not written.audio and str(written.messages[0].content[0]).split() == written.metadata["text"].split()


def test_folders_of_recordings(tmp_path: Path) -> None:
    wav = np.sin(np.arange(4000) * 0.3) * 0.4
    for value in range(1, 10):
        soundfile.write(tmp_path / f"{value}_ann_0.wav", wav, 8000)
    assert [(w.value, w.speaker) for w in number_words(str(tmp_path))] == [(v, "ann") for v in range(1, 10)]
    (tmp_path / "7_ann_0.wav").unlink()
    for source, language in ((tmp_path, "en"), (tmp_path / "nothing", "en"), ("bundled", "de")):
        with pytest.raises(
            ValueError, match=rf"{source}: no recording of [17] \((seven|one|eins)\); expected a folder"
        ):
            number_words(str(source), language)
    row = {"id": "a", "audio": "1_ann_0.wav", "text": "one", "language": "en", "duration": 0.5, "speaker": "ann"}
    rows = [row, row | {"id": "b", "text": "two"}]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(r | {"licence": "CC0-1.0"}) + "\n" for r in rows))
    with pytest.raises(ValueError, match=r"1_ann_0\.wav: is 1 in one row and 2 in another"):
        number_words(str(tmp_path))


@pytest.mark.parametrize(
    ("operation", "lengths", "message"),
    [
        ("difference", (1, 3), "'difference' has a result from 2 numbers on"),
        ("twice", (2, 3), "'twice' has a result from 3 numbers on"),
        ("sum", (3, 2), "give SHORTEST LONGEST"),
        ("product", (2, 3), "operation 'product' is not one of sum, difference"),
        ("twice", (20, 20), "9 numbers are too few for 20 of which one comes twice"),
    ],
)
def test_questions_without_an_answer(operation: str, lengths: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spoken_numbers(number_words("bundled"), 2, lengths, operation)
    ones = [word for word in number_words("bundled") if word.value == 1]
    with pytest.raises(ValueError, match=r"no sequence of 1 to 1 numbers is of the split '(train|test)'"):
        [spoken_numbers(ones, 1, (1, 1), written=True, split=split) for split in ("train", "test")]


@pytest.mark.parametrize("source", ["synthetic:0", "synthetic:x", "synthetic:100000"])
def test_voices_that_there_are_not(source: str) -> None:
    with pytest.raises(ValueError, match=rf"{source}: give 1 to \d+ voices"):
        number_words(source)


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "build-sums", str(tmp_path / "out"), "--words", "bundled", "synthetic:1", "--train", "4"]
    stranger = number_words("synthetic:1")[0].speaker
    assert main([*command, "--held-out", "2", "--unseen", stranger]) == 0
    made = spoken_numbers(number_words("bundled"), 4, seed=0, split="train")
    samples = read_samples(tmp_path / "out" / "train.jsonl").samples
    for given, read in zip(made, samples, strict=True):
        assert (read.messages[0].content[1], read.references) == (given.messages[0].content[1], given.references)
        assert {k: read.metadata[k] for k in given.metadata if k != "question"} | {"question": 0} == {
            **given.metadata,
            "question": 0,
        }
        assert np.allclose(read.audio[0].load(16_000), given.audio[0].load(16_000), atol=1e-4)
    assert {s.metadata["speaker"] for s in read_samples(tmp_path / "out" / "unseen.jsonl").samples} == {stranger}
    assert main(command) == 2
    assert "exists already; give a new folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unseen speaker 'nobody': the words are by Allison Smith"):
        split_speakers(number_words("bundled"), ["nobody"])

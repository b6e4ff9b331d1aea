"""Views change what a model is given and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.data.views import (
    clean,
    noise,
    rationale,
    silence,
    swapped,
    swapped_alike,
    text_only,
    transcript,
    view_named,
    views_of,
)
from audiorl.types import Message, Sample, Turn


def clip(level: float = 0.1, length: int = 12_000, rate: int = 8000, start: float = 0.5) -> AudioClip:
    return AudioClip(array=np.full(length, level, np.float32), sample_rate=rate, start=start)


def question(name: str = "1", audio: AudioClip | None = None, answer: str = "x") -> Sample:
    messages = (Message("system", ("Hi",)), Message("user", (audio or clip(), "What?")))
    return Sample(name, messages, (answer,), ("x", "y"), "qa", {"text": " said this "})


def test_silence_is_silence_of_the_same_length() -> None:
    view = silence(question())
    assert [len(c.load()) for c in view.audio] == [16_000] and not view.audio[0].load().any()
    assert view.messages[1].content[1] == "What?" and (view.references, view.choices) == (("x",), ("x", "y"))


def test_noise_is_as_long_and_as_loud_and_repeats() -> None:
    first, again, other = noise(question()), noise(question()), noise(question("2"))
    wav = first.audio[0].load()
    assert len(wav) == 16_000 and np.sqrt(np.mean(wav**2)) == pytest.approx(0.1, rel=0.03)
    assert np.array_equal(wav, again.audio[0].load()) and not np.array_equal(wav, other.audio[0].load())


def test_text_and_transcript_have_no_audio() -> None:
    assert text_only(question()).messages == (Message("system", ("Hi",)), Message("user", ("What?",)))
    assert transcript(question()).messages[1].content == ("said this\n", "What?")


def test_a_clean_recording_replaces_the_clip() -> None:
    recording = clip(0.5)
    sample = replace(question(), metadata={"clean_audio": recording})
    assert clean(sample).audio == (recording,) and clean(sample).messages[1].content[1] == "What?"


def test_reasons_follow_the_question() -> None:
    sample = replace(question(), metadata={"rationale": " It barks. "})
    view = rationale(sample)
    assert view.audio == sample.audio and view.messages[1].content[1:] == (
        "What?",
        "\n\nReasons for the right answer: It barks.",
    )


def test_swap_takes_the_most_alike_clip_with_another_answer() -> None:
    rows = [
        question("a", clip(0.1, 12_000)),
        question("b", clip(0.2, 12_100)),  # nearest to a, but with the same answer
        question("c", clip(0.3, 13_000), "y"),
        question("d", clip(0.4, 30_000), "y"),
    ]
    views = swapped(rows)
    assert [v.audio[0].key for v in views] == [rows[i].audio[0].key for i in (2, 2, 1, 1)]
    assert [v.references for v in views] == [r.references for r in rows]


def test_swap_alike_takes_the_same_answer_if_there_is_one() -> None:
    rows = [
        question("a", clip(0.1, 12_000)),
        question("b", clip(0.2, 12_100), "y"),
        question("c", clip(0.3, 14_000)),
    ]
    assert [v.audio[0].key for v in swapped_alike(rows)] == [rows[i].audio[0].key for i in (2, 0, 0)]
    assert views_of(rows, "swap-alike") == swapped_alike(rows)


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ([question(), question("2")], "swap", "sample '1': no other sample has other audio and another answer"),
        ([question()], "swap-alike", "no other sample has other audio to"),
        ([replace(question(), messages=(Message("user", ("What?",)),))], "silence", "sample '1' has no audio"),
        ([replace(question(), turns=(Turn(clip(), 1.0),))], "noise", "sample '1' is a stream"),
        ([replace(question(), metadata={})], "transcript", "sample '1': no transcript in metadata"),
        ([question()], "louder", "no view is called 'louder'; choose from silence, noise, text, transcript"),
        ([question()], "clean", "sample '1': no \"clean_audio\" to put in place"),
        ([replace(question(), metadata={"clean_audio": question().audio[0]})], "clean", "changes nothing in sample"),
        ([question()], "rationale", "sample '1': no \"rationale\" to add to the prompt"),
        ([silence(question())], "silence", "changes nothing in sample '1'"),
    ],
)
def test_what_is_no_view_is_refused(rows: list[Sample], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        views_of(rows, name)


def test_a_view_of_the_users_may_not_change_the_answers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from audiorl.data.views import text_only\n"
        "def easier(sample):\n    return replace(text_only(sample), choices=('x',))\n"
        "def short(sample):\n    return text_only(sample)\n"
    )
    assert view_named(f"{file}:short")(question()) == text_only(question())
    assert views_of([question()], f"{file}:short") == [text_only(question())]
    with pytest.raises(ValueError, match="changes the choices or references of sample '1'"):
        views_of([question()], f"{file}:easier")

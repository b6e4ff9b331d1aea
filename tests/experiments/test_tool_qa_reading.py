"""Questions that say in words what the audio would: their answer is the choice that the words are nearest to."""

from __future__ import annotations

from difflib import SequenceMatcher

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.data.prompts import choice_question
from audiorl.data.views import views_of
from audiorl.types import Sample
from tests.support.tools import load_tool

ANSWERS = ("washing machine", "vacuum cleaner", "a dog that barks", "French", "two people", "please try again later")


def questions(think: bool) -> list[Sample]:
    clip = AudioClip(array=np.ones(8000, np.float32), sample_rate=16_000)
    return [
        Sample(f"q{i}", choice_question(clip, f"Question {i}?", ANSWERS[:4], think), (ANSWERS[i],), ANSWERS[:4])
        for i in range(4)
    ] + [Sample("q4", choice_question(clip, "Question 4?", ANSWERS[2:], think), (ANSWERS[4],), ANSWERS[2:])]


def words_of(sample: Sample) -> str:
    first = str(sample.messages[0].content[-1]).split("\n")[0]
    assert first.startswith("The audio: ")
    return first.removeprefix("The audio: ")


def test_a_misspelled_answer_is_nearest_to_the_right_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = load_tool("qa_reading", monkeypatch)
    forms = {"answers": questions(False), "think": questions(True)}
    rows, again = (reading.reading_questions(forms, 200, seed=0) for _ in range(2))
    assert [(words_of(s), s.choices) for s, _ in rows] == [(words_of(s), s.choices) for s, _ in again]
    assert [form for _, form in rows] == ["answers", "think"] * 100
    nearest = exact = 0
    for sample, form in rows:
        words, (answer,) = words_of(sample), sample.references
        assert answer in sample.choices and len(set(sample.choices)) == 4
        request = str(sample.messages[0].content[-1])
        assert all(f"- {choice}\n" in request for choice in sample.choices) and ("<think>" in request) == (
            form == "think"
        )
        nearest += max(sample.choices, key=lambda c: SequenceMatcher(None, words, c).ratio()) == answer
        exact += words == answer
    assert nearest >= 190 and 80 <= exact <= 130
    answers = [sample.references[0] for sample, _ in rows]
    new = [answer for answer in answers if answer not in ANSWERS]
    assert set(ANSWERS) < set(answers) and 45 <= len(set(new)) == len(new) <= 90


def test_words_stand_where_the_audio_was(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = load_tool("qa_reading", monkeypatch)
    sample = questions(False)[1]
    (without,) = views_of([sample], "text")
    said = reading.in_words(without)
    assert said.messages[0].content == (f"The audio: vacuum cleaner\n{without.messages[0].content[0]}",)
    assert said.references == sample.references and not said.audio
    assert reading.in_words(sample, "a hum").messages[0].content[0] is sample.messages[0].content[0]

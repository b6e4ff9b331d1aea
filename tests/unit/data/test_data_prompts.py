"""Prompts carry the clip first, every choice in full, and ask for exactly the tags that the rewards read."""

from __future__ import annotations

import pytest

from audiorl.audio import AudioClip
from audiorl.data.prompts import asr_prompt, choice_question, open_question
from audiorl.types import Message

CLIP = AudioClip(path="a.wav")


def text_of(messages: tuple[Message, ...]) -> str:
    (message,) = messages
    clip, text = message.content
    assert message.role == "user" and clip is CLIP and isinstance(text, str)
    return text


def test_choice_question_with_and_without_think() -> None:
    text = text_of(choice_question(CLIP, " Which animal? ", ["a dog", "a cat"]))
    assert text.startswith("Which animal?\n")
    assert "\n- a dog\n- a cat\n" in text
    assert "<think> </think>" in text and "<answer> </answer>" in text and "fewer than 50 words" in text
    plain = text_of(choice_question(CLIP, "Which animal?", ["a dog", "a cat"], think=False))
    assert "think" not in plain and "<answer> </answer>" in plain and "- a cat" in plain


def test_open_question_lists_nothing() -> None:
    assert "\n- " not in text_of(open_question(CLIP, "What is said?"))


def test_asr_prompt_names_the_language_and_asks_for_bare_words() -> None:
    assert "Spanish" in text_of(asr_prompt(CLIP, "es"))
    assert "Klingon" in text_of(asr_prompt(CLIP, "Klingon"))
    assert "<" not in text_of(asr_prompt(CLIP))
    assert "<think> </think>" in text_of(asr_prompt(CLIP, think=True))
    assert text_of(asr_prompt(CLIP, "zh", ask="请写出你听到的话。")) == "请写出你听到的话。"


def test_bad_questions() -> None:
    with pytest.raises(ValueError, match="two or more different choices"):
        choice_question(CLIP, "q", ["a"])
    with pytest.raises(ValueError, match="two or more different choices"):
        choice_question(CLIP, "q", ["a", " a"])
    with pytest.raises(ValueError, match="the question is empty"):
        choice_question(CLIP, " ", ["a", "b"])

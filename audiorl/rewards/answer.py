"""Is the answer right? The accuracy reward of audio question answering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.rewards.choices import match_choice, normalize_text
from audiorl.rewards.maths import maths_equal
from audiorl.rewards.tags import after_think, extract_answer
from audiorl.types import Rollout, Sample, Score

Fallback = Literal["none", "text", "last_line"]


@dataclass(frozen=True)
class AnswerAccuracy:
    """1 if the answer equals a reference, else 0.

    The answer is the text of the last well-formed <answer> outside the thinking. Without one, `fallback` decides:
    "none" scores 0, "text" takes all that follows the thinking, "last_line" its last line that is not empty.

    With choices, an answer that names a choice by letter or by text is right exactly when it names the reference's
    choice. Otherwise symbolic maths decides where both sides are expressions (`maths`), else equality of the texts up
    to case, punctuation and whitespace.

    `strict` is the rule of Ke-Omni-R: symbolic maths first, else exact equality of the stripped texts; letters and
    choices play no part. There 6/8 equals 3/4, even as a time signature.

    Raises ValueError for a sample without references. Source: Ke-Omni-R's released accuracy reward.
    """

    strict: bool = False
    maths: bool = True
    fallback: Fallback = "none"

    def __post_init__(self) -> None:
        if self.fallback not in ("none", "text", "last_line"):
            raise ValueError(f"AnswerAccuracy: fallback {self.fallback!r} is not one of 'none', 'text', 'last_line'")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float(self.correct(r.text, r.sample))) for r in rollouts]

    def correct(self, text: str, sample: Sample) -> bool:
        if not sample.references:
            raise ValueError(f"AnswerAccuracy: sample {sample.id!r} has no reference answer")
        answer = self._answer(text)
        return bool(answer) and any(self._equal(answer, gold, sample.choices) for gold in sample.references)

    def _answer(self, text: str) -> str:
        answer = extract_answer(text)
        if answer is None and self.fallback != "none":
            rest = after_think(text).strip()
            if "<think>" in rest:  # cut off while thinking
                return ""
            lines = rest.splitlines()
            answer = rest if self.fallback == "text" or not lines else lines[-1].strip()
        return answer or ""

    def _equal(self, answer: str, gold: str, choices: Sequence[str]) -> bool:
        if not self.strict and choices:
            named, wanted = match_choice(answer, choices), match_choice(gold, choices)
            if wanted is not None:
                if named is not None:
                    return named == wanted
                gold = choices[wanted]
        if self.maths and maths_equal(answer, gold):
            return True
        if self.strict:
            return answer == gold.strip()
        return answer == gold.strip() or (normalize_text(answer) or answer) == (normalize_text(gold) or gold.strip())

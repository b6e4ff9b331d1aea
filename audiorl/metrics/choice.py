"""Multiple choice: the matcher of MMAU and MMAR, and accuracy with an interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.metrics.interval import bootstrap_interval

_TOKEN = re.compile(r"\b\w+\b")


def word_set(text: str) -> set[str]:
    return set(_TOKEN.findall(text.lower()))


def mmau_match(answer: str, prediction: str, choices: Sequence[str]) -> bool:
    """Whether `prediction` (free text) gives `answer`, by the words it holds.

    With tokens = the set of lower-cased \\b\\w+\\b: the prediction has tokens, all of the answer's are among them, and
    none that belongs to a wrong choice and not to the answer. A letter ("B") is not matched, and so is no prediction
    that repeats the choices. Source: MMAU's official evaluation script, which MMAR shares.
    """
    wanted, given = word_set(answer), word_set(prediction)
    wrong = set().union(*(word_set(choice) for choice in choices)) - wanted
    return bool(given) and wanted <= given and not given & wrong


@dataclass(frozen=True)
class Accuracy:
    """A share of correct answers in [0, 1] with its bootstrap interval."""

    value: float
    n: int
    low: float
    high: float


def bootstrap_accuracy(
    correct: Sequence[bool], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Accuracy:
    """Accuracy with its bootstrap interval over questions. Raises ValueError without answers."""
    if not len(correct):
        raise ValueError("accuracy needs at least one answer")
    values = [float(bool(c)) for c in correct]
    low, high = bootstrap_interval(values, confidence, resamples, seed)
    return Accuracy(sum(values) / len(values), len(values), low, high)

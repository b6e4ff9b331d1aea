"""Multiple choice: the matcher of MMAU and MMAR, and accuracy with an interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    """Accuracy with a percentile bootstrap interval over questions.

    The number of hits in a resample of n yes/no answers with share p is Binomial(n, p): drawn directly, which is the
    same bootstrap at a fraction of the cost. All right or all wrong gives an interval of width 0: it cannot know more.
    Raises ValueError without answers. Source: Efron and Tibshirani 1993, chapter 13.
    """
    n = len(correct)
    if n == 0:
        raise ValueError("accuracy needs at least one answer")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    value = sum(map(bool, correct)) / n
    shares = np.random.default_rng(seed).binomial(n, value, size=resamples) / n
    tail = (1 - confidence) / 2
    low, high = np.quantile(shares, [tail, 1 - tail])
    return Accuracy(value, n, float(low), float(high))

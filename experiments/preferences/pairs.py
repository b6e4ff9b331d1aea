"""Pairs of a right and a wrong answer, with a length bias that is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.data.preferences import Pair
from audiorl.types import Sample


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    text: str
    tokens: int
    right: bool
    well_formed: bool


def pairs_of_answers(
    answers: Sequence[tuple[Sample, Sequence[Answer]]], bias: float, most: int, rng: random.Random
) -> list[tuple[Pair, int]]:
    """One pair a question with how many tokens longer its chosen answer is; in a share `bias` of them it is longer.

    Questions take part that have pairs of both kinds, so that which kind a question gives is left to chance.
    """
    usable = []
    for sample, given in answers:
        right, wrong = ([a for a in given if a.well_formed and a.right is right] for right in (True, False))
        longer, shorter = (
            [(r, w) for r in right for w in wrong if sign * (r.tokens - w.tokens) > 0] for sign in (1, -1)
        )
        if longer and shorter:
            usable.append((sample, longer, shorter))
    rng.shuffle(usable)
    usable = usable[:most]
    pairs = []
    for k, (sample, longer, shorter) in enumerate(usable):
        candidates = longer if k < round(bias * len(usable)) else shorter
        most_tokens = max(abs(r.tokens - w.tokens) for r, w in candidates)
        chosen, rejected = rng.choice([(r, w) for r, w in candidates if abs(r.tokens - w.tokens) == most_tokens])
        pairs.append((Pair(sample, chosen.text, rejected.text), chosen.tokens - rejected.tokens))
    rng.shuffle(pairs)
    return pairs

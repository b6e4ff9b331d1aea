"""Is the response stuck in a loop? A penalty on repeated n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.eval.metrics.text import units
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class Repetition:
    """-(1 - unique n-grams / all n-grams), in (-1, 0]; 0 for a text shorter than n units.

    A unit is a word, or a single character where a script has no spaces ("auto"); "words" and "characters" force one
    reading. Case does not matter. Source: the n-gram penalty of Yeo et al. 2025, arXiv 2502.03373.

    `beyond_reference`: a text may repeat as much as the reference that repeats itself most, since people say things
    twice; only what goes beyond that is penalised.
    """

    n: int = 3
    unit: Literal["auto", "words", "characters"] = "auto"
    beyond_reference: bool = False

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Repetition: n must be at least 1, got {self.n}")
        if self.unit not in ("auto", "words", "characters"):
            raise ValueError(f"Repetition: unit {self.unit!r} is not one of 'auto', 'words', 'characters'")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(min(0.0, self.value(r.text) - self._spoken(r.sample))) for r in rollouts]

    def _spoken(self, sample: Sample) -> float:
        """The value of the reference that repeats itself most, where that is allowed for."""
        return min((self.value(text) for text in sample.references), default=0.0) if self.beyond_reference else 0.0

    def value(self, text: str) -> float:
        tokens = self._units(text.casefold())
        ngrams = [tuple(tokens[i : i + self.n]) for i in range(len(tokens) - self.n + 1)]
        return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0

    def _units(self, text: str) -> list[str]:
        if self.unit == "characters":
            return list("".join(text.split()))
        return text.split() if self.unit == "words" else units(text)

"""Is the response running into its limit? A penalty that grows before the cut, not at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.types import Rollout, Score


@dataclass(frozen=True)
class Overlong:
    """min(-(length - (max_tokens - buffer)) / buffer, 0), at least -1: 0 up to the buffer, -1 from `max_tokens` on.

    Lengths are sampled tokens of all segments. Source: soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13.
    """

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise ValueError(f"Overlong: buffer must lie in 1 … max_tokens {self.max_tokens}, got {self.buffer}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(self.value(r.num_sampled)) for r in rollouts]

    def value(self, length: int) -> float:
        over = length - (self.max_tokens - self.buffer)
        return max(-over / self.buffer, -1.0) if over > 0 else 0.0

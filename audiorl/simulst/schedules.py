"""Fixed schedules of reading and writing, the baselines of a learned policy.

They count words, or characters in languages without spaces, independently of the model. In the last turn the source has
ended, and the model writes without a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from audiorl.metrics.latency import latency_unit, separator, text_units
from audiorl.simulst.streams import Stream
from audiorl.types import Turn


@dataclass(frozen=True)
class Offline:
    """Read the whole source, then write."""

    language: str = ""

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return None if turn == turns - 1 else 0

    def count(self, text: str) -> int:
        return len(split_words(text, self.language))


@dataclass(frozen=True)
class WaitK:
    """Read k chunks, then write `rate` words a chunk (Ma et al. 2019, arXiv 1810.08398, with fixed pre-decision).

    After chunk t (from 1) ceil(rate·(t - k + 1)) words have been written, none before chunk k. `rate`: target words per
    chunk in the training streams, from `words_per_chunk`.
    """

    k: int
    rate: float = 1.0
    language: str = ""

    def __post_init__(self) -> None:
        if self.k < 1 or not self.rate > 0:
            raise ValueError(f"wait-k: k must be at least 1 and the rate above 0, got {self.k} and {self.rate}")

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return None if turn == turns - 1 else max(self.due(turn) - written, 0)

    def due(self, turn: int) -> int:
        """Words that should have been written by the end of `turn` (from 0)."""
        return max(ceil(self.rate * (turn + 2 - self.k) - 1e-9), 0)

    def count(self, text: str) -> int:
        return len(split_words(text, self.language))


def delay_references(turns: Sequence[Turn], schedule: WaitK) -> tuple[Turn, ...]:
    """The turns with their references moved to the turns in which the schedule writes them, to train a wait-k model."""
    language, written = schedule.language, 0
    words = split_words("".join(t.reference for t in turns), language)
    out = []
    for i, turn in enumerate(turns):
        end = len(words) if i == len(turns) - 1 else min(max(schedule.due(i), written), len(words))
        text = separator(language).join(words[written:end])
        lead = separator(language) if written and text else ""
        out.append(replace(turn, reference=lead + text, reference_seconds=None, source=""))
        written = end
    return tuple(out)


def words_per_chunk(streams: Sequence[Stream], chunk_seconds: float) -> float:
    """Mean target words, or characters, per chunk of source speech."""
    words = sum(len(split_words(s.reference, s.target_language)) for s in streams)
    return words * chunk_seconds / sum(s.seconds for s in streams)


def split_words(text: str, language: str) -> list[str]:
    return text_units(text, latency_unit(language))

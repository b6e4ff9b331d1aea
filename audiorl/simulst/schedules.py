"""Fixed schedules of listening and writing: the baselines that a learned policy is compared with.

They count words, or characters in languages without spaces, and know nothing of the model. In the last turn everything
has been heard, and the model writes what is left as it likes.
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
    """Listen to the end, then write."""

    language: str = ""

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return None if turn == turns - 1 else 0

    def count(self, text: str) -> int:
        return len(split_words(text, self.language))


@dataclass(frozen=True)
class WaitK:
    """Listen to k chunks, then write `rate` words a chunk (Ma et al. 2019, arXiv 1810.08398, with fixed pre-decision).

    After chunk t (from 1) there are ceil(rate·(t - k + 1)) words, none before chunk k. `rate` is the target words a
    chunk of the training streams: `words_per_chunk`.
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
    """The turns with their references moved to where the schedule writes them: what a wait-k model learns."""
    language, said = schedule.language, 0
    pieces = split_words("".join(t.reference for t in turns), language)
    out = []
    for i, turn in enumerate(turns):
        end = len(pieces) if i == len(turns) - 1 else min(max(schedule.due(i), said), len(pieces))
        text = separator(language).join(pieces[said:end])
        lead = separator(language) if said and text else ""
        out.append(replace(turn, reference=lead + text, reference_seconds=None, source=""))
        said = end
    return tuple(out)


def words_per_chunk(streams: Sequence[Stream], chunk_seconds: float) -> float:
    """Target words, or characters, a chunk of source speech."""
    words = sum(len(split_words(s.reference, s.target_language)) for s in streams)
    return words * chunk_seconds / sum(s.seconds for s in streams)


def split_words(text: str, language: str) -> list[str]:
    return text_units(text, latency_unit(language))

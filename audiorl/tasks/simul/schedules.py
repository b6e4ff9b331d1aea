"""Schedules of reading and writing, the baselines of a learned policy.

`WaitK` and `Offline` count words, or characters in languages without spaces, independently of the model. `Reviewed`
lets the model write after every chunk and keeps a part of that, in the turn in which it was written, which ends there:
the conversation is one of the kind that the model was trained on. What was cut off was never said: the model has to say
it in a later turn. A model that only ever said a unit at one time may not; train it on late references
(`delay_references`, or `lags` of `interpretation_sample`) before it is decoded by a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil
from typing import ClassVar

from audiorl.eval.metrics.latency import cut_text, split_words, tidy
from audiorl.protocols import Hypothesis, Review
from audiorl.tasks.simul.streams import Stream
from audiorl.types import Turn


class CountsWords:
    """A schedule that counts the words of its `language`."""

    language: str

    def count(self, text: str) -> int:
        return len(split_words(text, self.language))


@dataclass(frozen=True)
class Offline(CountsWords):
    """Read the whole source, then write."""

    language: str = ""
    review: ClassVar[None] = None

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return None if turn == turns - 1 else 0


@dataclass(frozen=True)
class WaitK(CountsWords):
    """Read k chunks, then write `rate` words a chunk (Ma et al. 2019, arXiv 1810.08398, with fixed pre-decision).

    After chunk t (from 1) ceil(rate·(t - k + 1)) words have been written, none before chunk k. `rate`: target words per
    chunk in the training streams, from `words_per_chunk`.
    """

    k: int
    rate: float = 1.0
    language: str = ""
    review: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.k < 1 or not self.rate > 0:
            raise ValueError(f"wait-k: k must be at least 1 and the rate above 0, got {self.k} and {self.rate}")

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return None if turn == turns - 1 else max(self.due(turn) - written, 0)

    def due(self, turn: int) -> int:
        """Return how many words should have been written by the end of `turn` (from 0)."""
        return max(ceil(self.rate * (turn + 2 - self.k) - 1e-9), 0)


@dataclass(frozen=True)
class Reviewed(CountsWords):
    """The model writes after every chunk, greedily, and `review` says how much of it is kept, in whole words.

    A turn of which everything is kept is the model's own, with the token by which it ended. So a review that never cuts
    is the policy itself.
    """

    review: Review
    language: str = ""

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return None


@dataclass(frozen=True)
class LocalAgreement:
    """Keep the longest common prefix of the last n hypotheses, nothing before chunk n.

    Sources: Liu et al. 2020, arXiv 2005.11185; Polák et al. 2022 (IWSLT).
    """

    n: int = 2
    layers: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"local agreement: n must be at least 2, got {self.n}")

    @property
    def earlier(self) -> int:
        return self.n - 1

    def keep(self, hypothesis: Hypothesis) -> int:
        if len(hypothesis.earlier) < self.n - 1:
            return 0
        columns = zip(hypothesis.ids, *hypothesis.earlier[1 - self.n :], strict=False)
        return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))


@dataclass(frozen=True)
class AlignAtt:
    """Stop before the first token whose attention peaks within the last `frames` audio tokens; with 0 never.

    Its attention is the mean over the heads of `layers` (from 0; () for all), where the token is predicted. Source:
    Papi et al. 2023, arXiv 2305.11408, which reads the cross-attention of one layer of an encoder-decoder, here that of
    a decoder to its audio tokens; the released code also drops the newest frame, which is not done here.
    """

    frames: int
    layers: tuple[int, ...] = ()
    earlier: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.frames < 0:
            raise ValueError(f"alignatt: frames must be at least 0, got {self.frames}")

    def keep(self, hypothesis: Hypothesis) -> int:
        attention_nA = hypothesis.attention
        assert attention_nA is not None
        recent_n = attention_nA.argmax(-1) >= attention_nA.shape[-1] - self.frames
        return _before_first(recent_n.tolist())


@dataclass(frozen=True)
class EDAtt:
    """Stop before the first token that gives the last `frames` audio tokens a share of at least `alpha` of its
    attention to audio.

    For attention see `AlignAtt`. Source: Papi et al. 2022, arXiv 2212.07850 (alpha, lambda = `frames` = 2).
    """

    alpha: float
    frames: int = 2
    layers: tuple[int, ...] = ()
    earlier: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1 or self.frames < 1:
            given = f"{self.alpha:g} and {self.frames}"
            raise ValueError(f"edatt: alpha must be in (0, 1] and frames at least 1, got {given}")

    def keep(self, hypothesis: Hypothesis) -> int:
        attention_nA = hypothesis.attention
        assert attention_nA is not None
        recent_n = attention_nA[:, -self.frames :].sum(-1) >= self.alpha
        return _before_first(recent_n.tolist())


def _before_first(stops: Sequence[bool]) -> int:
    """Return how many entries come before the first true one."""
    return stops.index(True) if True in stops else len(stops)


def delay_references(turns: Sequence[Turn], schedule: WaitK) -> tuple[Turn, ...]:
    """Return the turns with their references moved to where the schedule writes them, to train a wait-k model."""
    whole = tidy("".join(t.reference for t in turns), schedule.language)
    words, pieces, written = split_words(whole, schedule.language), list[list[str]](), 0
    for i in range(len(turns)):
        end = len(words) if i == len(turns) - 1 else min(max(schedule.due(i), written), len(words))
        pieces.append(words[written:end])
        written = end
    texts = cut_text(whole, pieces)
    return tuple(replace(t, reference=x, reference_seconds=None, source="") for t, x in zip(turns, texts, strict=True))


def words_per_chunk(streams: Sequence[Stream], chunk_seconds: float) -> float:
    """Return the mean target words, or characters, per chunk of source speech."""
    words = sum(len(split_words(s.reference, s.target_language)) for s in streams)
    return words * chunk_seconds / sum(s.seconds for s in streams)

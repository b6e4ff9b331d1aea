"""Protocols of what a run is made of: rewards, engines, schedules of streams, speech decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from audiorl.types import Rollout, Sample, Score

if TYPE_CHECKING:
    from torch import Tensor


class Reward(Protocol):
    """Scores all rollouts of a step at once, in order; one whose attribute `by_group` is true a group at a time.

    None in place of a Score skips the rollout: it takes no part in its group's baseline nor in the update. It may also
    have a method `check(sample)`, which raises ValueError for a sample that it cannot score: recipes ask before step 1.
    """

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[Score | None]: ...


class SpeechDecoder(Protocol):
    """Turns what a rollout sampled into sound, as its codec decodes it."""

    @property
    def sample_rate(self) -> int:
        """Hz of the waveforms."""
        ...

    def waveform(self, rollout: Rollout) -> np.ndarray | None:
        """Everything the rollout said, mono float32 [T]; None if it said nothing."""
        ...

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[np.ndarray | None]:
        """`waveform` of each; a decoder may be faster with several at a time."""
        return [self.waveform(r) for r in rollouts]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """What the model would write in a turn, n tokens, before a schedule shortens it; filled in by the engine."""

    ids: tuple[int, ...]
    """[n], without the token that ends the turn."""
    earlier: tuple[tuple[int, ...], ...] = ()
    """The hypotheses of earlier turns, newest last, without the tokens at their start that have been written since. One
    that does not begin with these is left out."""
    attention: Tensor | None = None
    """[n, A] float32: how the prediction of each token attends to all audio tokens so far; rows sum to 1. None unless
    the review names layers."""


class Review(Protocol):
    """Shortens what the model wrote in a turn, such as AlignAtt. Rollouts under it are greedy."""

    @property
    def earlier(self) -> int:
        """How many hypotheses of earlier turns it compares with."""
        ...

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The decoder layers whose attention it reads, from 0, () for all; None: it reads no attention."""
        ...

    def keep(self, hypothesis: Hypothesis) -> int:
        """Return how many tokens are written, 0 to n. The model does not see later what is cut off."""
        ...


class Schedule(Protocol):
    """Decides when to write, in place of the policy, as wait-k or AlignAtt do. In the last turn everything is kept."""

    def words(self, turn: int, turns: int, written: int) -> int | None:
        """Words to write in `turn` (from 0) of `turns` after `written`: 0 reads on, None leaves it to the model."""
        ...

    def count(self, text: str) -> int:
        """Words, or other units, that are written and cut as a whole."""
        ...

    @property
    def review(self) -> Review | None:
        """None keeps what the model writes."""
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """Ask an engine for rollouts of one sample."""

    sample: Sample
    """The prompt."""
    n: int = 1
    """Rollouts."""
    seed: int = 0
    """Makes each rollout reproducible, whatever else is in the batch."""
    group_id: str = ""
    """Given to the rollouts; "" takes the sample's id."""
    greedy: bool = False
    """Take the most probable token each time, whatever the engine's temperature."""
    schedule: Schedule | None = None
    """Of streams: takes the decisions to read or to write away from the policy."""
    token_limit: int | None = None
    """Tokens that each answer may sample now; one that has not ended by then comes back as "paused". None: no limit."""
    paused: tuple[Rollout, ...] = ()
    """Paused answers to go on with, `n` of them, in place of new ones. Their tokens and log-probs stay as they are."""

    def __post_init__(self) -> None:
        if self.paused and len(self.paused) != self.n:
            raise ValueError(f"sample {self.sample.id!r}: {len(self.paused)} paused answers, but n is {self.n}")


Ended = Callable[[Sequence[Rollout]], None]
"""Gets the rollouts of a request once all of them have ended."""


class RolloutEngine(Protocol):
    """Generates rollouts: `HFEngine` and `VLLMEngine` in one process, `GroupEngine` with all engines of a run."""

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Return all rollouts of all requests, request by request, index ascending.

        `ended` may be called with those of a request before the others have ended.
        """
        ...


@runtime_checkable
class Sleep(Protocol):
    """The capability of an engine to free its GPU memory. Asleep it neither generates nor takes weights."""

    @property
    def can_sleep(self) -> bool:
        """Whether this one was made so that it can."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

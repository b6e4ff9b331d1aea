"""Rewards that begin with a group as soon as all its answers have ended, while others are still being sampled.

    with EarlyScores(reward) as early:
        rollouts = engine.generate(requests, early.add)
        scores = early.reward(rollouts)          # what `reward(rollouts)` gives

It is for rewards that wait: for a server, or in an `async def`. Such a reward says so by a true `by_group`: the scores
of a group must depend on that group alone. Terms of a sum begin early one by one; all others see the whole step at the
end, as always. What `add` began runs in threads, with one event loop, so that `concurrency` counts all groups together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from audiorl.protocols import Reward
from audiorl.rewards.check import copied
from audiorl.rewards.combine import StandardisedSum, WeightedSum
from audiorl.rewards.concurrency import EventLoop, in_loop
from audiorl.types import Rollout, Score

MAX_THREADS = 64
"""Groups that are scored at the same time by each reward."""


def begins_early(reward: Reward) -> bool:
    """Whether the reward, or a term of it, is one for `EarlyScores`."""
    terms = reward.terms if isinstance(reward, WeightedSum | StandardisedSum) else ()
    return bool(getattr(reward, "by_group", False)) or any(begins_early(t.reward) for t in terms)


class EarlyScores:
    """See the module. Leaving the block waits for what has begun; of what has not begun nothing is called."""

    def __init__(self, reward: Reward):
        self._parts: list[_EarlyPart] = []
        self._loop = EventLoop()
        self._threads = ThreadPoolExecutor(MAX_THREADS, "reward")
        self.reward: Reward = self._replaced(reward)
        """The reward for the whole step, which takes the scores that were begun early."""

    def _replaced(self, reward: Reward) -> Reward:
        if getattr(reward, "by_group", False):
            self._parts.append(_EarlyPart(reward))
            return self._parts[-1]
        if isinstance(reward, WeightedSum | StandardisedSum):
            return replace(reward, terms=tuple(replace(t, reward=self._replaced(t.reward)) for t in reward.terms))
        return reward

    def add(self, group: Sequence[Rollout]) -> None:
        """Begin with a whole group. Raises what a reward has raised for an earlier one."""
        for part in self._parts:
            part.check()
            part.begin(group, self._threads, self._loop)

    def __enter__(self) -> EarlyScores:
        self._loop.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._loop.stop()


@dataclass
class _EarlyPart:
    """A reward, and what it gave for groups that ended early."""

    reward: Reward
    _begun: dict[str, tuple[list[Rollout], Future[list[Any]]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, group: Sequence[Rollout], threads: ThreadPoolExecutor, loop: EventLoop) -> None:
        name, members = group[0].group_id, [copied(r) for r in group]
        with self._lock:
            self._begun[name] = list(group), threads.submit(in_loop, loop, self._values, members)

    def check(self) -> None:
        for _, future in list(self._begun.values()):
            if future.done() and (error := future.exception()) is not None:
                raise error

    def _values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """One value for each rollout: its score, or what `finish` makes a score of."""
        begin = getattr(self.reward, "begin", self.reward)
        return list(begin(rollouts))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        begun: dict[int, Any] = {}
        for group, future in self._begun.values():
            places = {r.index: i for i, r in enumerate(rollouts) if r.group_id == group[0].group_id}
            if len(places) == len(group) and all(_same(rollouts[places[r.index]], r) for r in group):
                begun |= zip((places[r.index] for r in group), future.result(), strict=True)
        missing = [i for i in range(len(rollouts)) if i not in begun]
        if missing:
            begun |= zip(missing, self._values([rollouts[i] for i in missing]), strict=True)
        values = [begun[i] for i in range(len(rollouts))]
        finish = getattr(self.reward, "finish", None)
        return values if finish is None else finish(rollouts, values)


def _same(one: Rollout, other: Rollout) -> bool:
    """Whether both have the same answer; an engine that died may have sampled another one."""
    a, b = ([s.ids.tolist() for s in r.segments] for r in (one, other))
    return a == b

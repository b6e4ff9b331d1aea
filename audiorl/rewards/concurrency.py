"""Rewards that wait: coroutines from synchronous code, and groups that are scored while others are sampled.

    with EarlyScores(reward) as early:
        rollouts = engine.generate(requests, early.add)
        scores = early.reward(rollouts)          # equals `reward(rollouts)`

A reward that waits for a server, or in an `async def`, says so by a true `by_group`: the scores of a group must depend
on that group alone. Terms of a sum begin early one by one; all others see the whole step at the end.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from audiorl.protocols import Reward
from audiorl.rewards.combine import StandardisedSum, WeightedSum, copied
from audiorl.types import Rollout, Score

T = TypeVar("T")
MAX_THREADS = 64
"""Groups that are scored at the same time."""
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, int], asyncio.Semaphore]]
_semaphores = WeakKeyDictionary()


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result. All threads share one event loop, so that `semaphore_for` counts them together."""
    with _lock:
        loop = _loops.get(os.getpid())  # a fork has no thread that runs the loop of its parent
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    if asyncio._get_running_loop() is loop:  # a coroutine that calls a reward as a function
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, coroutine).result()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:  # such as an interrupt, of which the loop's thread knows nothing
        future.cancel()
        raise


def semaphore_for(owner: object, concurrency: int) -> asyncio.Semaphore:
    """Return the owner's semaphore in this event loop, which lets `concurrency` coroutines pass at a time."""
    of_loop = _semaphores.setdefault(asyncio.get_running_loop(), {})
    return of_loop.setdefault((id(owner), concurrency), asyncio.Semaphore(concurrency))


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; after the first error the others are cancelled, and the error is raised."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def begins_early(reward: Reward) -> bool:
    """Return whether the reward, or a term of it, is one for `EarlyScores`."""
    terms = reward.terms if isinstance(reward, WeightedSum | StandardisedSum) else ()
    return bool(getattr(reward, "by_group", False)) or any(begins_early(t.reward) for t in terms)


class EarlyScores:
    """See the module. Leaving the block waits for what has begun, but for an interrupt; what has not is not called."""

    def __init__(self, reward: Reward):
        self._parts: list[_EarlyPart] = []
        self._free = threading.Semaphore(MAX_THREADS)
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
            for _, values in list(part.begun.values()):
                if values.done():
                    values.result()
            members = tuple(copied(r) for r in group)
            scored: Future[list[Any]] = Future()
            part.begun[group[0].group_id] = list(group), scored
            # Not an executor: Python waits for its threads at exit, so that a reward that hangs could not be stopped.
            threading.Thread(target=self._score, args=(part, members, scored), name="reward", daemon=True).start()

    def _score(self, part: _EarlyPart, members: Sequence[Rollout], values: Future[list[Any]]) -> None:
        with self._free:
            if values.set_running_or_notify_cancel():
                try:
                    values.set_result(part.values(members))
                except BaseException as error:
                    values.set_exception(error)

    def __enter__(self) -> EarlyScores:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        begun = [values for part in self._parts for _, values in part.begun.values() if not values.cancel()]
        if kind is None or issubclass(kind, Exception):  # an interrupt waits for nothing
            wait(begun)


class _EarlyPart:
    """A reward, and what it gave for groups that ended early."""

    def __init__(self, reward: Reward):
        self.begun: dict[str, tuple[list[Rollout], Future[list[Any]]]] = {}
        self._begin: Callable[..., Any] = getattr(reward, "begin", reward)
        self._finish: Callable[..., Any] = getattr(reward, "finish", lambda rollouts, values: values)

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return a value for each rollout: its score, or what `finish` makes a score of."""
        return list(self._begin(rollouts))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        found: dict[int, Any] = {}
        for group, values in self.begun.values():
            places = {r.index: i for i, r in enumerate(rollouts) if r.group_id == group[0].group_id}
            # An engine that died may have sampled another answer since.
            if len(places) == len(group) and all(_ids(rollouts[places[r.index]]) == _ids(r) for r in group):
                found |= zip((places[r.index] for r in group), values.result(), strict=True)
        missing = [i for i in range(len(rollouts)) if i not in found]
        if missing:
            found |= zip(missing, self.values(tuple(rollouts[i] for i in missing)), strict=True)
        return self._finish(rollouts, [found[i] for i in range(len(rollouts))])


def _ids(rollout: Rollout) -> list[list[int]]:
    return [segment.ids.tolist() for segment in rollout.segments]

"""Rewards that wait: coroutines from synchronous code, and groups that are scored while others are sampled.

    with EarlyScores(reward) as early:
        rollouts = engine.generate(requests, early.add)
        scores = early.reward(rollouts)          # equals `reward(rollouts)`

A reward that waits for a server, or in an `async def`, says so by a true `by_group`: the scores of a group must depend
on that group alone. Terms of a sum begin early one by one; all others see the whole step at the end. What `add` began
runs in threads, with one event loop: `concurrency` counts all groups together.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from audiorl.protocols import Reward
from audiorl.rewards.combine import StandardisedSum, WeightedSum, copied
from audiorl.types import Rollout, Score

T = TypeVar("T")

_thread = threading.local()
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


class EventLoop:
    """An event loop in a thread, for coroutines of several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._runner = threading.Thread(target=self._loop.run_forever, name="reward loop", daemon=True)

    def start(self) -> None:
        self._runner.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._runner.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def in_loop(loop: EventLoop, function: Callable[..., T], *args: Any) -> T:
    """Call a function whose `run_async` use this loop."""
    _thread.loop = loop
    try:
        return function(*args)
    finally:
        _thread.loop = None


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result. Where a loop runs already, as in notebooks, it runs in another thread."""
    shared: EventLoop | None = getattr(_thread, "loop", None)
    if shared is not None:
        return shared.run(coroutine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def semaphore_for(owner: object, concurrency: int) -> asyncio.Semaphore:
    """Return the owner's semaphore in this event loop, which lets `concurrency` coroutines pass at a time."""
    of_loop = _semaphores.setdefault(asyncio.get_running_loop(), {})
    return of_loop.setdefault(id(owner), asyncio.Semaphore(concurrency))


class FailedTry(Exception):
    """A failed try of a request. `wait`: seconds from the server's Retry-After; `again`: another try may help."""

    def __init__(self, kind: str, message: str, wait: float = 0.0, again: bool = True):
        super().__init__(message)
        self.kind, self.wait, self.again = kind, wait, again


def retry_after(header: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 for a date, or anything else."""
    return float(header) if header and header.isascii() and header.isdigit() and len(header) < 10 else 0.0


def is_loopback(host: str) -> bool:
    """Return whether only this machine can be meant by the host of an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_token(token: str, where: str) -> str:
    """Return the token, if it fits into an HTTP header; errors never show it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: not a token; give printable ASCII characters without spaces")
    return token


def printable(message: object, most: int) -> str:
    """Return a server's message on one line, without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(message)[:most])


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; after the first error the others are cancelled, and the error is raised."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MAX_THREADS = 64
"""Groups that are scored at the same time by each reward."""


def begins_early(reward: Reward) -> bool:
    """Return whether the reward, or a term of it, is one for `EarlyScores`."""
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
    """Return whether both have the same answer; an engine that died may have sampled another one."""
    a, b = ([s.ids.tolist() for s in r.segments] for r in (one, other))
    return a == b

"""Coroutines from code that is not asynchronous, as rewards are called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_thread = threading.local()
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


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
    """The coroutine's result. Where a loop runs already (notebook, asynchronous worker) it runs in another thread."""
    shared: EventLoop | None = getattr(_thread, "loop", None)
    if shared is not None:
        return shared.run(coroutine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def gate(owner: object, concurrency: int) -> asyncio.Semaphore:
    """Lets `concurrency` coroutines of this loop pass at a time; the same one for every call of one owner."""
    of_loop = _gates.setdefault(asyncio.get_running_loop(), {})
    return of_loop.setdefault(id(owner), asyncio.Semaphore(concurrency))


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; after the first error the others are cancelled, and the error is raised."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a signal asked to stop while `awaited` was entered. In the main thread only."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM is only remembered; the second one raises KeyboardInterrupt."""

        def handler(signum: int, frame: FrameType | None) -> None:
            if self.received:
                raise KeyboardInterrupt
            self.received = True

        before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, previous in before.items():
                signal.signal(s, previous)

"""The CPU time of a run's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from audiorl.distributed.local import Group


def cpu_seconds() -> float | None:
    """CPU seconds (user and system) of all threads of this process, and of its children that have ended.

    None where the process uses a GPU, whose work they do not show.
    """
    if torch.cuda.is_initialized():
        return None
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


class CPUClock:
    """Measures the CPU seconds of this process and of the groups' processes, from when it is made."""

    def __init__(self, *groups: Group):
        self._groups = groups
        self._start = self._read()

    def _read(self) -> list[float | None]:
        return [cpu_seconds(), *(seconds for group in self._groups for seconds in group.cpu_seconds())]

    def seconds(self) -> float | None:
        """CPU seconds since the start; None where a process uses a GPU. A process that was replaced counts 0."""
        return _difference(self._start, self._read())


def _difference(start: Sequence[float | None], end: Sequence[float | None]) -> float | None:
    total = 0.0
    for before, after in zip(start, end, strict=True):
        if before is None or after is None:
            return None
        total += max(after - before, 0.0)
    return total

"""Workers for Ray groups."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from audiorl.distributed.local import World, changes_worker, replaces_worker


class Counter:
    """Keeps a sum that calls change."""

    def __init__(self, start: float):
        self.total = start

    @changes_worker
    def train(self, x: float) -> float:
        self.total += x
        return float(World.of_process_group().sum(torch.tensor(self.total)))

    def compute(self, seconds: float) -> None:
        """Use so many CPU seconds."""
        began = time.process_time()
        while time.process_time() - began < seconds:
            pass

    def generate(self, seconds: float) -> tuple[float, int]:
        time.sleep(seconds)
        return self.total, os.getpid()

    @replaces_worker
    def update_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.total = float(weights["total"]) + version

    def weights(self) -> dict[str, torch.Tensor]:
        return {"total": torch.tensor(self.total)}

    @replaces_worker
    def resume(self, where: str) -> None:
        self.total = float(Path(where).read_text())

    def fail_on(self, rank: int, where: str) -> float:
        if World.of_process_group().rank == rank:
            raise ValueError(f"row 7 of {where} is empty")
        return self.train(0)

    def end_on(self, rank: int, once: str) -> float:
        """Rank `rank` dies in the middle of a collective operation, the first time."""
        if World.of_process_group().rank == rank and not Path(once).exists():
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.train(0)

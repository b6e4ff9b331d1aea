"""How long training stands still for a checkpoint: written at once, and in the background (`--runtime.async-save`).

    OMP_NUM_THREADS=1 python bench/checkpoint.py [--rounds 5] [--folder DIR]

A tiny decoder and one of about 100 M parameters, float32 with two moments, one process. In each round a number of
updates without a checkpoint, with one that training waits for, and with one that is written meanwhile, in turns. The
disk is that of --folder. Medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from audiorl.algos.experience import PackedBatch
from audiorl.algos.packing import pack_experiences
from audiorl.config import ModelConfig, OptimConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.gpu_check.setup import PRETEND_SCALE, Scale, Setup, experiences, full_width_policy
from audiorl.models import AudioPolicy
from audiorl.run.saving import CheckpointWriter
from audiorl.train.optim.adamw import Optimizer

How = Literal["none", "waiting", "background"]
SCALES = {
    "tiny": Scale(64, 192, 4, 2, PRETEND_SCALE.vocabulary, 2, 2, 4, 64, 16, 1, 1),
    "100 M": Scale(768, 3072, 12, 12, 16_000, 8, 2, 4, 64, 16, 1, 1),
}
UPDATES = {"tiny": 40, "100 M": 8}


@dataclass
class Training:
    policy: AudioPolicy
    optimizer: Optimizer
    batch: PackedBatch

    def update(self) -> None:
        self.optimizer.zero_grad()
        (-self.policy.forward(self.batch).logprobs.mean()).backward()
        self.optimizer.step()
        self.policy.weights_changed()


def seconds(training: Training, updates: int, how: How, folder: Path) -> tuple[float, float]:
    """Of the updates with a checkpoint after the first of them; and from its begin to when training went on."""
    set_current(replace(RuntimeConfig(), async_save="on" if how == "background" else "off"))
    writer = CheckpointWriter(training.policy)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    training.update()
    began, stood = time.perf_counter(), 0.0
    if how != "none":
        writer.begin(str(folder), {"optimizer": training.optimizer.state()})
        stood = time.perf_counter() - began
    for _ in range(updates):
        training.update()
    if how != "none":
        writer.files(wait=True)
    return time.perf_counter() - began, stood


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written; default: temporary")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "parameters, M", "update, s", "waiting: stands still, s", "background, s", "×", "all, ×")
    with tempfile.TemporaryDirectory(dir=args.folder) as where:
        for name, scale in SCALES.items():
            policy = full_width_policy(Setup(torch.device("cpu"), scale), ModelConfig())
            batch = pack_experiences(experiences(scale))
            training = Training(policy, Optimizer(policy.trainable(), OptimConfig(lr=1e-5), 10**6), batch)
            training.update()
            rows: dict[How, list[Any]] = {"none": [], "waiting": [], "background": []}
            for _ in range(args.rounds):
                for how, measured in rows.items():
                    measured.append(seconds(training, UPDATES[name], how, Path(where) / "checkpoint"))
            total = {how: statistics.median(t for t, _ in measured) for how, measured in rows.items()}
            stood = {how: statistics.median(s for _, s in measured) for how, measured in rows.items()}
            parameters = sum(p.numel() for p in policy.model.parameters()) / 1e6
            extra = {how: total[how] - total["none"] for how in ("waiting", "background")}
            table.add_row(
                name, f"{parameters:.1f}", f"{total['none'] / UPDATES[name]:.3f}", f"{stood['waiting']:.3f}",
                f"{stood['background']:.3f}", f"{stood['background'] / stood['waiting']:.2f}",
                f"{extra['background'] / extra['waiting']:.2f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()

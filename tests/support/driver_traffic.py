"""A short run on two ranks of torchrun that reports the largest thing that its first rank sent or received.

`python driver_traffic.py FOLDER` under torchrun: two updates, a checkpoint, and a resume from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from audiorl.config import ModelConfig, SFTConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.torchrun import follow, process_group, rank
from audiorl.run.folder import Run
from audiorl.run.saving import checkpoint, restore
from audiorl.train.fit import Learner, learners
from audiorl.train.sft import sft_loss
from tests.support.zero_ranks import OPTIM, examples, policy

SFT = SFTConfig(steps=2, micro_batch_tokens=60)
LARGEST = [0]
"""Bytes of the largest object or tensor that went through a collective."""


def spy() -> None:
    original = distributed_c10d._object_to_tensor

    def recorded(obj: Any, device: Any, group: Any) -> Any:
        tensors = original(obj, device, group)
        LARGEST[0] = max(LARGEST[0], tensors[0].numel())
        return tensors

    distributed_c10d._object_to_tensor = recorded
    for name in ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor"):
        setattr(dist, name, measured(getattr(dist, name)))


def measured(collective: Any) -> Any:
    def call(*args: Any, **kw: Any) -> Any:
        LARGEST[0] = max([LARGEST[0], *(a.nbytes for a in args if isinstance(a, torch.Tensor))])
        return collective(*args, **kw)

    return call


def main(folder: Path) -> None:
    run = Run.create(folder, "sft", [], {})
    model = policy(ModelConfig(audio="full"))
    group = learners(run, "sft", sft_loss, model, SFT, OPTIM)
    spoken = examples()
    for _ in range(2):
        group.each(Learner.train, [spoken[:5], spoken[5:]])
    print("in updates:", LARGEST[0])
    LARGEST[0] = 0
    checkpoint(run, "sft", 2, 2, 1, group)
    assert restore(run, "sft", group) == 2
    saved = sorted(run.checkpoint("sft").glob("*.safetensors"))
    print("in save and resume:", LARGEST[0])
    print("files:", {f.name: f.stat().st_size - 8 - int.from_bytes(f.read_bytes()[:8], "little") for f in saved})


if __name__ == "__main__":
    torch.set_num_threads(1)
    set_current(RuntimeConfig(kind="torchrun", ranks=2, fsdp=True))
    with process_group():
        spy()
        if rank():
            follow()
        else:
            main(Path(sys.argv[1]))
    assert not dist.is_initialized()

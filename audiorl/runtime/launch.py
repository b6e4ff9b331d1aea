"""Where a run's processes are: this one, or several of this machine that torchrun starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import tyro


@dataclass(frozen=True)
class RuntimeConfig:
    """The options `--runtime.…` of `audiorl train` and `audiorl resume`; they are no part of a recipe."""

    kind: Literal["local", "torchrun"] = "local"
    ranks: int = 1
    """Processes of this machine, a GPU each where there are GPUs. Several machines: start torchrun yourself."""

    def check(self) -> None:
        """Raises ValueError for what this machine cannot do."""
        if self.ranks < 1:
            raise ValueError(f"runtime.ranks is {self.ranks}; it must be at least 1")
        if self.kind == "local" and self.ranks > 1:
            raise ValueError(f"runtime.ranks {self.ranks}: several processes need --runtime.kind torchrun")
        gpus = torch.cuda.device_count()
        if gpus and self.ranks > gpus:
            raise ValueError(f"runtime.ranks is {self.ranks}, but this machine has {gpus} GPUs, one for each process")


def take_runtime(args: list[str]) -> RuntimeConfig:
    """Remove the options `--runtime.…` from `args` and read them."""
    own: list[str] = []
    i = 0
    while i < len(args):
        if args[i].startswith("--runtime."):
            taken = 1 if "=" in args[i] else 2
            own += args[i : i + taken]
            del args[i : i + taken]
        else:
            i += 1
    options = [arg.replace("--runtime.", "--", 1) for arg in own]
    runtime = tyro.cli(RuntimeConfig, args=options, prog="audiorl", description="Where a run's processes are.")
    runtime.check()
    return runtime


def relaunch(runtime: RuntimeConfig, command: Sequence[str]) -> None:
    """Become torchrun with `audiorl COMMAND` in every process. Returns when this process is one of them already, or
    when no other is wanted."""
    if runtime.kind == "local" or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(runtime.ranks)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "audiorl.cli", *command])

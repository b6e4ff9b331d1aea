"""Where a run's processes are: this one, several of this machine that torchrun starts, or those of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import tyro

from audiorl.runtime.config import RuntimeConfig, set_current


def take_runtime(args: list[str]) -> RuntimeConfig:
    """Remove the options `--runtime.…` from `args`, read them and make them this process's."""
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
    gpus = torch.cuda.device_count()
    if runtime.kind == "torchrun" and gpus and runtime.ranks > gpus:
        raise ValueError(f"runtime.ranks is {runtime.ranks}, but this machine has {gpus} GPUs, one for each process")
    set_current(runtime)
    return runtime


def relaunch(runtime: RuntimeConfig, command: Sequence[str]) -> None:
    """Become torchrun with `audiorl COMMAND` in every process. Returns when this process is one of them already, or
    when no other is wanted."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if runtime.kind == "ray" and under_torchrun:
        raise ValueError("runtime.kind ray: start it in one process, without torchrun; Ray starts the others")
    if runtime.kind != "torchrun" or under_torchrun:
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(runtime.ranks)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "audiorl.cli", *command])

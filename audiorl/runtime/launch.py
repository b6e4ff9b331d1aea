"""Reads the options `--runtime.…` of a command and starts the processes that torchrun needs."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

import torch
import tyro

from audiorl.runtime.config import RuntimeConfig, set_current

RENAMED_PLACEMENTS = {"apart": "dedicated", "together": "colocated"}


def parse_runtime_options(args: list[str]) -> RuntimeConfig:
    """Remove the options `--runtime.…` from `args`, check them and set them for this process."""
    runtime = runtime_config([arg.replace("--runtime.", "--", 1) for arg in _pop_options(args, "--runtime.")])
    runtime.check()
    gpus = torch.cuda.device_count()
    if runtime.kind == "torchrun" and gpus and runtime.ranks > gpus:
        raise ValueError(f"runtime.ranks is {runtime.ranks}, but this machine has {gpus} GPUs, one for each process")
    set_current(runtime)
    return runtime


def runtime_config(options: Sequence[str]) -> RuntimeConfig:
    """`RuntimeConfig` from its options without the prefix `runtime.`, for example `["--ranks", "2"]`."""
    check_renamed(options, "--placement")
    return tyro.cli(RuntimeConfig, args=options, prog="audiorl", description="The processes of a run.")


def check_renamed(args: Sequence[str], option: str) -> None:
    """Raise ValueError that names the new value where `option` has a value of version 0.1."""
    words = " ".join(args).replace("=", " ").split()
    for name, value in itertools.pairwise(words):
        if name == option and value in RENAMED_PLACEMENTS:
            raise ValueError(f"runtime.placement {value} is now called {RENAMED_PLACEMENTS[value]}")


def relaunch(runtime: RuntimeConfig, command: Sequence[str]) -> None:
    """Replace this process by torchrun, which runs `audiorl COMMAND` in every rank.

    Returns when no torchrun is wanted, or when this process is already one of its ranks.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if runtime.kind == "ray" and under_torchrun:
        raise ValueError("runtime.kind ray: start it in one process, without torchrun; Ray starts the others")
    if runtime.kind != "torchrun" or under_torchrun:
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(runtime.ranks)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "audiorl.cli", *command])


def _pop_options(args: list[str], prefix: str) -> list[str]:
    """Remove the options that begin with `prefix` from `args`, with their values, and return them."""
    options: list[str] = []
    i = 0
    while i < len(args):
        if args[i].startswith(prefix):
            words = 1 if "=" in args[i] else 2
            options += args[i : i + words]
            del args[i : i + words]
        else:
            i += 1
    return options

"""Applies the options `--runtime.…` of a command and starts the processes that torchrun needs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

import torch

from audiorl.config.distributed import RuntimeConfig, set_current


def use_runtime(runtime: RuntimeConfig) -> None:
    """Check the options `--runtime.…` against each other and this machine, and make them this process's.

    Raises ValueError for options that contradict each other and for more processes than GPUs.
    """
    runtime.check()
    gpus = torch.cuda.device_count()
    if runtime.kind == "torchrun" and gpus and runtime.ranks > gpus:
        raise ValueError(f"runtime.ranks is {runtime.ranks}, but this machine has {gpus} GPUs, one for each process")
    set_current(runtime)


def relaunch(runtime: RuntimeConfig, command: Sequence[str]) -> None:
    """Replace this process by torchrun, which runs `audiorl COMMAND` in every rank.

    Returns when no torchrun is wanted, or when this process is already one of its ranks. The ranks connect over the
    loopback address; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name another interface.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if runtime.kind == "ray" and under_torchrun:
        raise ValueError("runtime.kind ray: start it in one process, without torchrun; Ray starts the others")
    if runtime.kind != "torchrun" or under_torchrun:
        return
    # A rendezvous in a file and the loopback address: torchrun's own store listens on every address.
    handle, store = tempfile.mkstemp(prefix="audiorl-rendezvous-")
    os.close(handle)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", store]
    rendezvous += ["--local-addr", "127.0.0.1"]
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(runtime.ranks), *rendezvous]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "audiorl.cli", *command])

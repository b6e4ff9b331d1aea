"""The code of one process of a Ray cluster: it holds one worker and calls its methods for the driver."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.cpu_time import cpu_seconds
from audiorl.distributed.local import MakeWorker, StateEffect, call_method, state_effects
from audiorl.distributed.torchrun import OWN_GPU, PROCESS_GROUP_TIMEOUT, backend, listening_store


@dataclass(frozen=True)
class WorkerFailure:
    """An exception that a worker raised; `WorkerProcess` fills it in."""

    kind: str
    """Name of the exception's class."""
    message: str
    maybe_secondary: bool
    """Whether the end of another rank may have caused it: a broken collective raises RuntimeError."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class WorkerProcess:
    """An actor of Ray that holds one worker. It ignores SIGINT, which the driver handles.

    `paths`: the driver's `sys.path`, so that this process can import what the driver can. `address`: this node's.
    """

    def __init__(self, paths: Sequence[str], address: str, gpu: bool):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.path += [path for path in paths if path not in sys.path]
        self._address = address
        self._worker: Any = None
        self._store: dist.TCPStore | None = None
        if gpu:
            os.environ[OWN_GPU] = "1"
            os.environ.setdefault("LOCAL_RANK", "0")  # Ray shows a process only the GPU that it was given
        if address.startswith("127."):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")

    def pid(self) -> int:
        """This process's id on its node."""
        return os.getpid()

    def cpu_seconds(self) -> float | None:
        """See `audiorl.distributed.cpu_time`."""
        return cpu_seconds()

    def started(self) -> None:
        """Returns once the process has started."""

    def open_store(self) -> tuple[None, tuple[str, int]]:
        """Open the store of a new process group. Returns None (no failure) and the store's host and port."""
        self._store = listening_store(self._address)
        return None, (self._address, self._store.port)

    def join(self, rank: int, size: int, host: str, port: int) -> None:
        """Join a process group of `size` trainers as `rank`; the process leaves its earlier group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank > 0 or self._store is None:
            self._store = dist.TCPStore(host, port, is_master=False)
        dist.init_process_group(backend(), store=self._store, rank=rank, world_size=size, timeout=PROCESS_GROUP_TIMEOUT)

    def make(
        self, runtime: RuntimeConfig, threads: int, make: MakeWorker, *args: Any
    ) -> tuple[WorkerFailure | None, dict[str, StateEffect]]:
        """Make the worker, after the earlier one is freed. Returns its marked methods (`state_effects`)."""
        self._worker = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        set_current(runtime)
        torch.set_num_threads(threads)
        failure, self._worker = _attempt(make, *args)
        return failure, state_effects(self._worker)

    def call(self, method: str, *args: Any) -> tuple[WorkerFailure | None, Any]:
        """Call a method of the worker. Returns what it raised, and its result with tensors on the CPU."""
        failure, result = _attempt(call_method, self._worker, method, *args)
        return failure, _on_cpu(result)


def _attempt(function: Any, *args: Any) -> tuple[WorkerFailure | None, Any]:
    try:
        return None, function(*args)
    except Exception as error:
        return WorkerFailure(type(error).__name__, str(error), isinstance(error, RuntimeError)), None


def _on_cpu(value: Any) -> Any:
    """Tensors, also in dicts, moved to the CPU, so that a process without a GPU can unpickle them."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value

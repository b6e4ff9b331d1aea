"""A process of a Ray cluster, as it sees itself: it holds one worker and does what the driver asks of it."""

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

from audiorl.runtime.config import RuntimeConfig, set_current
from audiorl.runtime.local import Make
from audiorl.runtime.torchrun import LONG, OWN_GPU, backend, listening_store


@dataclass(frozen=True)
class Failed:
    """What a worker raised. `echo`: it may only be the noise of another rank's end."""

    kind: str
    message: str
    echo: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Host:
    """`paths` are the driver's, so that what it imports can be imported here. Ctrl-C is for the driver alone."""

    def __init__(self, paths: Sequence[str], address: str, gpu: bool):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.path += [path for path in paths if path not in sys.path]
        self._address = address
        self._worker: Any = None
        self._store: dist.TCPStore | None = None
        if gpu:
            os.environ[OWN_GPU] = "1"
            os.environ.setdefault("LOCAL_RANK", "0")  # Ray shows a process no other GPU than its own
        if address.startswith("127."):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")

    def pid(self) -> int:
        return os.getpid()

    def started(self) -> None:
        """Answers once the process can do what it is asked."""

    def open_store(self) -> tuple[None, tuple[str, int]]:
        """Where the ranks of a new group meet: this node's address and a free port of it."""
        self._store = listening_store(self._address)
        return None, (self._address, self._store.port)

    def join(self, rank: int, size: int, host: str, port: int) -> None:
        """Be one of the ranks that train together; the group before is left."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank > 0 or self._store is None:
            self._store = dist.TCPStore(host, port, is_master=False)
        dist.init_process_group(backend(), store=self._store, rank=rank, world_size=size, timeout=LONG)

    def make(self, runtime: RuntimeConfig, threads: int, make: Make, *args: Any) -> tuple[Failed | None, None]:
        """Make the worker; the one before is gone first."""
        self._worker = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        set_current(runtime)
        torch.set_num_threads(threads)
        failed, self._worker = _attempt(make, *args)
        return failed, None

    def call(self, method: str, *args: Any) -> tuple[Failed | None, Any]:
        failed, found = _attempt(getattr(self._worker, method), *args)
        return failed, _on_cpu(found)


def _attempt(function: Any, *args: Any) -> tuple[Failed | None, Any]:
    try:
        return None, function(*args)
    except Exception as error:
        return Failed(type(error).__name__, str(error), isinstance(error, RuntimeError)), None


def _on_cpu(value: Any) -> Any:
    """Weights and states as every process can receive them."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(part) for key, part in value.items()}
    return value

"""Several processes of torchrun as one worker: rank 0 drives, the others follow.

Rank 0 runs the recipe as always and wraps its worker in `Ranks`; every other rank makes an equal worker and calls
`follow`. Rank 0 then says what to do next, and all do it at the same time, each with its own part of the batch, so that
their collective operations line up. Only rank 0 has a run folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from audiorl.train.run import Interrupted

State = dict[str, dict[str, Tensor]]


class RankWorker(Protocol):
    """`resume` brings a follower where `load` brought rank 0, from the checkpoint folder itself."""

    def train(self, items: Sequence[Any]) -> dict[str, float]: ...

    def state(self) -> State: ...

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None: ...

    def resume(self, where: str) -> None: ...


def rank() -> int:
    """This process's number among those that torchrun started; 0 for a process on its own."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: str) -> str:
    """`cuda` as this process's own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and ranks() > 1 else device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Connect the processes that torchrun started, if it did. Followers may wait for days: rank 0 also evaluates."""
    if ranks() == 1 or dist.is_initialized():
        yield
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(days=7))
    try:
        yield
    finally:
        dist.destroy_process_group()


class Ranks:
    """A worker on rank 0 that all ranks work for. A batch is dealt out evenly; metrics are those of rank 0's part.

    As a context manager it lets the followers end with the block. An error may come in the middle of a step, where they
    listen for something else; then the lost connection ends them.
    """

    def __init__(self, own: RankWorker):
        self.own = own

    def train(self, items: Sequence[Any]) -> dict[str, float]:
        if len(items) % ranks():
            raise ValueError(f"a batch of {len(items)} cannot be dealt out evenly to {ranks()} processes")
        shards = [list(items[r :: ranks()]) for r in range(ranks())]
        _tell("train", shards)
        return self.own.train(shards[0])

    def state(self) -> State:
        return self.own.state()

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        _tell("resume", [where] * ranks())
        self.own.load(state, where)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Interrupted):
            _tell("stop", [None] * ranks())


def share(value: Any = None) -> Any:
    """Rank 0's value, on every rank of a process group."""
    found = [value]
    dist.broadcast_object_list(found, 0, device=torch.device("cpu"))
    return found[0]


def follow(worker: RankWorker) -> None:
    """Do what rank 0 says until it says stop. Ctrl-C is for rank 0, which saves first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        what, arguments = share()
        if what == "stop":
            return
        (worker.train if what == "train" else worker.resume)(arguments[dist.get_rank()])


def _tell(what: str, arguments: list[Any]) -> None:
    share((what, arguments))

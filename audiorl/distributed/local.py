"""Groups of workers: the protocol, the group in this process, the marks on methods that change a worker, and `World`.

A training loop calls its workers through `Group` and cannot tell whether they are in its own process (`LocalGroup`),
on the ranks of torchrun (`torchrun.RanksGroup`) or in processes of a Ray cluster (`ray_group.RayGroup`). `World` is
what a worker sees of the ranks that train one model with it.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Method = TypeVar("Method", bound=Callable[..., Any])
Shard = TypeVar("Shard")
R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")
BUCKET = 64 * 2**20
"""Bytes of gradients that are summed in one message."""
StateEffect = Literal["changes", "replaces"]
_MARK = "_audiorl_state_effect"


def changes_worker(method: Method) -> Method:
    """Mark a method that changes its worker's state. A group repeats its calls on a worker that replaces a dead one."""
    setattr(method, _MARK, "changes")
    return method


def replaces_worker(method: Method) -> Method:
    """Mark a method after which a worker's state depends on no earlier call: a group forgets those."""
    setattr(method, _MARK, "replaces")
    return method


def state_effects(worker: Any) -> dict[str, StateEffect]:
    """Return the marked methods of a worker by name. A method that overrides a marked one is marked too."""
    classes = reversed(type(worker).__mro__)
    return {name: getattr(f, _MARK) for cls in classes for name, f in vars(cls).items() if hasattr(f, _MARK)}


class Group:
    """Workers whose methods are called together, in whichever processes they are.

    A method is named by the function of a class, such as `Trainer.step`; a worker that overrides it runs its own. Its
    arguments are positional, and results come in the order of the workers.
    """

    shared: bool
    """Whether the first worker trains the driver's own model object."""
    answers_after_error: bool = True
    """Whether the workers can still be called after the driver's loop has raised an error."""
    size: int

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], answer: bool = True) -> list[Any]:
        """Call `method` of worker k with `arguments[k]`. Without `answer` the first worker's result will do."""
        raise NotImplementedError

    def each(self, method: Callable[[Any, Shard], R], shards: Sequence[Shard]) -> list[R]:
        """Call `method` of worker k with `shards[k]`."""
        assert len(shards) == self.size, f"{len(shards)} shards for {self.size} workers"
        return self._call(method.__name__, [(shard,) for shard in shards])

    def all(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` of every worker with the same arguments."""
        assert not kwargs
        return self._call(method.__name__, [args] * self.size)

    def first(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call as `all` does, but return the first worker's result only; the others' are not sent to the driver."""
        assert not kwargs
        result: R = self._call(method.__name__, [args] * self.size, False)[0]
        return result

    def cpu_seconds(self) -> list[float | None]:
        """Return the CPU seconds of each process but the driver's, since it started; None where it uses a GPU."""
        return []

    def saving(self) -> None:
        """Note that a checkpoint of the workers' state as it is now is being written."""
        return

    def saved(self, where: str) -> None:
        """Note that this checkpoint is complete in the folder `where`, which the workers' method `resume` loads."""
        return


class LocalGroup(Group):
    """Workers that share this process and its models."""

    shared = True

    def __init__(self, workers: Sequence[Any]):
        self.workers, self.size = list(workers), len(workers)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], answer: bool = True) -> list[Any]:
        return [call_method(w, method, *args) for w, args in zip(self.workers, arguments, strict=True)]


class Groups:
    """Groups whose workers write and read the same checkpoints: trainers, and critics in processes of their own."""

    def __init__(self, *groups: Group):
        self._groups = groups

    @property
    def answers_after_error(self) -> bool:
        return all(group.answers_after_error for group in self._groups)

    def all(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [result for group in self._groups for result in group.all(method, *args, **kwargs)]

    def saving(self) -> None:
        for group in self._groups:
            group.saving()

    def saved(self, where: str) -> None:
        for group in self._groups:
            group.saved(where)


def call_method(worker: Any, name: str, *args: Any) -> Any:
    """Call the worker's own method of that name: what arrives over a wire, or overrides the function that was named."""
    method = getattr(worker, name)
    return method(*args)


MakeWorker = Callable[..., Any]
"""Makes a worker. Groups in other processes pickle it with its arguments, so it is a module-level function."""


def cpu_seconds() -> float | None:
    """Return the CPU seconds (user and system) of this process's threads, and of its children that have ended.

    None where the process uses a GPU, whose work they do not show.
    """
    if torch.cuda.is_initialized():
        return None
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def free_bytes(device: torch.device) -> float:
    """Return how much memory could be allocated on a device; infinity where nobody knows."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


_gpu_work: deque[tuple[Any, Any]] = deque(maxlen=2**16)
_in_gpu_work = False


@contextmanager
def gpu_work() -> Iterator[None]:
    """Count the time of the block's kernels, from the first to the last, for `gpu_seconds`; nothing on a CPU."""
    global _in_gpu_work
    if _in_gpu_work or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        yield
        return
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    _in_gpu_work = True
    try:
        yield
    finally:
        _in_gpu_work = False
    last.record()
    _gpu_work.append((first, last))


def gpu_seconds() -> float | None:
    """Return the seconds that this process's blocks of `gpu_work` took on its GPU since the last call; None without
    one. Gaps between the kernels of one block count, those between blocks do not."""
    if not _gpu_work:
        return None
    _gpu_work[-1][1].synchronize()
    seconds = sum(first.elapsed_time(last) for first, last in _gpu_work) / 1000  # of milliseconds
    _gpu_work.clear()
    return seconds


@dataclass(frozen=True)
class World:
    """`size` ranks, each with its own part of every batch. What is here are collective calls: all ranks make them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_process_group(cls) -> World:
        """Return the ranks of torch's default process group; this process alone where there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum every rank's tensor."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def gather_list(self, values: Sequence[T]) -> tuple[list[T], slice]:
        """Return all ranks' values in one list, and where this rank's own are in it."""
        lists = self.gather(list(values))
        start = sum(len(part) for part in lists[: self.rank])
        return [x for part in lists for x in part], slice(start, start + len(values))

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add up sums by name over all ranks; a name that a rank does not know counts 0 there."""
        total: dict[str, float] = {}
        for part in self.gather(dict(sums)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set every gradient to the sum over ranks. One that no rank has stays None."""
        if self.size == 1:
            return
        names = sorted(set().union(*self.gather({n for n, p in parameters.items() if p.grad is not None})))
        for bucket in gradient_buckets(names, parameters):
            weights = [parameters[name] for name in bucket]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat)
            for p, total in zip(weights, flat.split([g.numel() for g in grads]), strict=True):
                p.grad = total.view_as(p)


def gradient_buckets(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Divide names of parameters, in order, into lists of one dtype and about BUCKET bytes."""
    out: list[list[str]] = []
    room = 0
    for name in names:
        p = parameters[name]
        if not out or p.dtype != parameters[out[-1][-1]].dtype or room < p.nbytes:
            out.append([])
            room = BUCKET
        out[-1].append(name)
        room -= p.nbytes
    return out

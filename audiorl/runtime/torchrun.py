"""The processes that torchrun started as one group of workers: rank 0 drives, the others follow.

Rank 0 runs the recipe as always. Every other rank waits in `follow` for what rank 0 wants: a worker made from a
function and its arguments, a method called, the end. All ranks do it at the same time, so that the collective
operations of their workers line up. Only rank 0 has a run folder.

What goes wrong on one rank ends all of them: it leaves the reason in torch's key-value store, and the others, whose
connection to it breaks in the middle of an operation, find it there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from audiorl.runtime.local import Make, check_shards
from audiorl.runtime.world import World

LONG = timedelta(days=7)
"""Followers may wait for days: rank 0 also generates, scores and evaluates."""
FAILED = "audiorl/failed"
OWN_GPU = "AUDIORL_OWN_GPU"
"""Set in a process that was given a GPU: its models are held there, whatever the driver has."""


class RankError(RuntimeError):
    """Another rank could not go on."""


def rank() -> int:
    """This process's number among those that torchrun started; 0 for a process on its own."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: str) -> str:
    """`cuda` as this process's own GPU. A process of a Ray cluster takes the one that it was given."""
    if OWN_GPU in os.environ:
        return "cuda"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and ranks() > 1 else device


def backend() -> str:
    """Of the process groups that train: tensors of either kind of device can be summed."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def listening_store(host: str, port: int = 0, timeout: timedelta = dist.default_pg_timeout) -> dist.TCPStore:
    """Where processes meet, at an address of this machine and no other; any free port for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),  # the store's own socket would listen on every address
    )


_store: dist.Store | None = None


@contextmanager
def process_group() -> Iterator[World]:
    """Connect the processes that torchrun started, if it did, for the length of the block.

    On rank 0 the others' work ends with the block, also with an error: then they end with one, too.
    """
    from audiorl.errors import Interrupted  # with all of transformers, which not every process needs

    global _store
    if ranks() == 1:
        yield World()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, own, size = next(dist.rendezvous("env://", timeout=LONG))
    dist.init_process_group(backend(), store=store, rank=own, world_size=size, timeout=LONG)
    _store = store
    world = World.of_process_group()
    try:
        yield world
    except Interrupted:
        _end(world)
        raise
    except BaseException as error:
        if world.rank == 0 and not isinstance(error, RankError):
            _left_behind(f"rank 0: {type(error).__name__}: {error}")
        raise
    else:
        _end(world)
    finally:
        _store = None
        dist.destroy_process_group()


class RanksGroup:
    """A worker on every rank, made by `make(*args)`; rank 0's by `own`, which may share the driver's objects."""

    shared = True

    def __init__(self, own: Make, make: Make, *args: Any):
        self._number = RanksGroup._made = RanksGroup._made + 1
        self.size = ranks()
        others = {group._number for group in RanksGroup._in_use}
        self._send([("make", others, self._number, torch.get_num_threads(), make, args)] * self.size)
        RanksGroup._in_use.add(self)
        self._own = own()

    _made = 0
    _in_use: ClassVar[WeakSet[RanksGroup]] = WeakSet()
    """Followers keep the workers of these alone."""

    def each(self, method: str, shards: Sequence[Any]) -> list[Any]:
        check_shards(shards, self.size)
        return self._call(method, [(shard,) for shard in shards], True)

    def all(self, method: str, *args: Any) -> list[Any]:
        return self._call(method, [args] * self.size, True)

    def first(self, method: str, *args: Any) -> Any:
        return self._call(method, [args] * self.size, False)[0]

    def saved(self, where: str) -> None:
        pass

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], answer: bool) -> list[Any]:
        self._send([("call", self._number, method, args, answer) for args in arguments])
        with _naming_the_failed():
            own = getattr(self._own, method)(*arguments[0])
            if not answer:
                return [own]
            found: list[Any] = [None] * self.size
            dist.gather_object(None, found)
        return [own, *found[1:]]

    def _send(self, messages: Sequence[tuple[Any, ...]]) -> None:
        with _naming_the_failed():
            _send(messages)


def follow() -> None:
    """Do what rank 0 wants until it has nothing more. Ctrl-C is for rank 0, which saves first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    workers: dict[int, Any] = {}
    while True:
        try:
            what, *rest = _receive()
        except RuntimeError:
            raise SystemExit(1) from None  # rank 0 has ended, and says why itself
        if what == "end":
            return
        try:
            if what == "make":
                in_use, number, threads, make, args = rest
                workers = {n: worker for n, worker in workers.items() if n in in_use}
                torch.set_num_threads(threads)
                workers[number] = make(*args)
            else:
                number, method, args, answer = rest
                found = getattr(workers[number], method)(*args)
                if answer:
                    dist.gather_object(found)
        except Exception as error:
            if _reason() is None:
                _left_behind(f"rank {rank()}: {type(error).__name__}: {error}")
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # at once: the others wait for this process in an operation that it will not join


def _end(world: World) -> None:
    if world.rank == 0:
        _send([("end",)] * world.size)


def _send(messages: Sequence[Any]) -> None:
    """Give every rank its message."""
    dist.scatter_object_list([None], list(messages))


def _receive() -> Any:
    found: list[Any] = [None]
    dist.scatter_object_list(found, None)
    return found[0]


def _left_behind(reason: str) -> None:
    if _store is not None and _reason() is None:
        _store.set(FAILED, reason)


def _reason() -> str | None:
    """Why the first rank failed, if one did."""
    if _store is None or not _store.check([FAILED]):
        return None
    return bytes(_store.get(FAILED)).decode(errors="replace")


@contextmanager
def _naming_the_failed() -> Iterator[None]:
    """A broken connection as a RankError that says what happened where."""
    try:
        yield
    except RuntimeError as error:
        reason = _reason()
        if reason is None:
            raise
        raise RankError(f"{reason}; the run stopped, resume it from the last checkpoint") from error

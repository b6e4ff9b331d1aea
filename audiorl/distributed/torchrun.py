"""Groups of workers under torchrun: rank 0 runs the recipe and sends commands, the other ranks execute them.

Every other rank waits in `follow` for commands of rank 0: make a worker from a function and its arguments, call a
method of it, end. All execute a command at the same time: the workers' collective operations must match. An error on
one rank ends all. That rank writes the reason to torch's key-value store; the others, whose collective operation fails,
read it there and report it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from audiorl.config import torch_device
from audiorl.config.distributed import RuntimeConfig
from audiorl.distributed.local import Group, MakeWorker, World, call_method, cpu_seconds
from audiorl.errors import Interrupted, RankError

PROCESS_GROUP_TIMEOUT = timedelta(days=7)
"""How long a rank waits in a collective operation: rank 0 may score and evaluate for days."""
FAILURE_KEY = "audiorl/failed"
"""Key of torch's store under which the first rank that fails writes the reason."""
OWN_GPU = "AUDIORL_OWN_GPU"
"""Environment variable, set in a process of Ray that was given a GPU: its models use it whatever the recipe names."""


def rank() -> int:
    """Return this process's number among those that torchrun started; 0 for a process on its own."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """Return how many processes torchrun started; 1 for a process on its own."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: str) -> str:
    """Name this process's own GPU for `cuda`, or `auto` with a GPU. A Ray worker takes the GPU that Ray gave it."""
    if OWN_GPU in os.environ:
        return "cuda"
    device = torch_device(device)
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and ranks() > 1 else device


def backend() -> str:
    """Name the backend of the trainers' process group: it sums CPU tensors and, where there are GPUs, CUDA tensors."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def listening_store(host: str, port: int = 0, timeout: timedelta = dist.default_pg_timeout) -> dist.TCPStore:
    """Open a key-value store that listens on `host` only, not on every address. Port 0: any free one."""
    server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return dist.TCPStore(
        host,
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=server.detach(),  # the store's own socket would listen on every address
    )


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


_store: dist.Store | None = None


@contextmanager
def process_group() -> Iterator[World]:
    """Connect the processes of torchrun, if there are any, for the length of the block.

    When rank 0 leaves the block the other ranks end; when it leaves with an error they end with an error too.
    """
    global _store
    if ranks() == 1:
        yield World()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself listens
    if rank() == 0 and host.startswith("127.") and not shared:  # at a loopback address, rank 0 listens there only
        store: dist.Store = listening_store(host, port, PROCESS_GROUP_TIMEOUT)
    else:
        store = next(dist.rendezvous("env://", timeout=PROCESS_GROUP_TIMEOUT))[0]
    dist.init_process_group(backend(), store=store, rank=rank(), world_size=ranks(), timeout=PROCESS_GROUP_TIMEOUT)
    _store = store
    world = World.of_process_group()
    try:
        yield world
    except Interrupted:
        _end(world)
        raise
    except BaseException as error:
        if world.rank == 0 and not isinstance(error, RankError):
            _report_failure(f"rank 0: {type(error).__name__}: {error}")
        raise
    else:
        _end(world)
    finally:
        _store = None
        dist.destroy_process_group()


class RanksGroup(Group):
    """A worker on every rank, made by `make(*args)`; rank 0's by `make_local`, which may share the driver's objects."""

    shared = True
    answers_after_error = False  # a rank may wait for the driver's worker in a collective
    _made = 0
    _in_use: ClassVar[WeakSet[RanksGroup]] = WeakSet()
    """Groups that still exist. The other ranks free the workers of all other groups."""

    def __init__(self, make_local: MakeWorker, make: MakeWorker, *args: Any):
        self.size = ranks()
        self._number = RanksGroup._made = RanksGroup._made + 1
        others = {group._number for group in RanksGroup._in_use}
        self._send([("make", others, self._number, torch.get_num_threads(), make, args)] * self.size)
        RanksGroup._in_use.add(self)
        self._local = make_local()

    def cpu_seconds(self) -> list[float | None]:
        self._send([("cpu",)] * self.size)
        return self._gather(None)[1:]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], answer: bool = True) -> list[Any]:
        self._send([("call", self._number, method, args, answer) for args in arguments])
        with _explaining_failures():
            result = call_method(self._local, method, *arguments[0])
        return [result, *self._gather(None)[1:]] if answer else [result]

    def _send(self, messages: Sequence[tuple[Any, ...]]) -> None:
        with _explaining_failures():
            dist.scatter_object_list([None], list(messages))  # one for each rank

    def _gather(self, own: Any) -> list[Any]:
        results: list[Any] = [None] * self.size
        with _explaining_failures():
            dist.gather_object(own, results)
        return results


def follow() -> None:
    """Execute the commands of rank 0 until it ends. Ignores SIGINT and SIGTERM: rank 0 handles them and saves first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    workers: dict[int, Any] = {}
    while True:
        try:
            message: list[Any] = [None]
            dist.scatter_object_list(message, None)
        except RuntimeError:
            raise SystemExit(1) from None  # rank 0 ended and printed the reason
        command, *rest = message[0]
        if command == "end":
            return
        try:
            if command == "make":
                in_use, number, threads, make, args = rest
                workers = {n: worker for n, worker in workers.items() if n in in_use}
                torch.set_num_threads(threads)
                workers[number] = make(*args)
            elif command == "cpu":
                dist.gather_object(cpu_seconds())
            else:
                number, method, args, answer = rest
                result = call_method(workers[number], method, *args)
                if answer:
                    dist.gather_object(result)
        except Exception as error:
            if _reason() is None:
                _report_failure(f"rank {rank()}: {type(error).__name__}: {error}")
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # without cleanup, which would wait for ranks that wait for this one


def _end(world: World) -> None:
    if world.rank == 0:
        dist.scatter_object_list([None], [("end",)] * world.size)


def _report_failure(reason: str) -> None:
    if _store is not None and _reason() is None:
        _store.set(FAILURE_KEY, reason)


def _reason() -> str | None:
    """Why the first rank failed; None if none did."""
    if _store is None or not _store.check([FAILURE_KEY]):
        return None
    return bytes(_store.get(FAILURE_KEY)).decode(errors="replace")


@contextmanager
def _explaining_failures() -> Iterator[None]:
    """Turn the error of a broken collective into a RankError that names the failed rank and its reason."""
    try:
        yield
    except RuntimeError as error:
        reason = _reason()
        if reason is None:
            raise
        raise RankError(f"{reason}; the run stopped, resume it from the last checkpoint") from error

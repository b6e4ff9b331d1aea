"""A Ray cluster: connecting to it or starting one, placing a run's processes, and workers in them.

The driver is no worker here. Trainers form one process group of torch; all others are on their own. A process that
dies is replaced: its worker is made again and brought to where it was by the calls that changed it, which the group
keeps from the last checkpoint on. All trainers are replaced together, because a process group does not outlive one of
its ranks. A step is a function of (seed, step) and the weights, so what is done again comes out the same.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from audiorl.runtime.config import RuntimeConfig, current
from audiorl.runtime.local import Make, check_shards
from audiorl.runtime.torchrun import RankError
from audiorl.runtime.worker_process import Failed, Host

Role = Literal["trainer", "engine", "reference"]

ROLES: tuple[Role, ...] = ("trainer", "engine", "reference")
"""In the order of their places."""

CONNECTING = 5.0
"""Seconds that a cluster has for its first answer."""
PLACING = 60.0
"""Seconds that others have to free what a run needs."""
STARTING = 600.0
"""Seconds until a process must have started: it imports torch and transformers, maybe from a slow disk."""
NOTICING = 10.0
"""Seconds after which a death is known that a rank's broken connection may come from."""

REPLACING = frozenset({"resume", "update_weights"})
"""Methods after which a worker's state depends on no call before them."""
CHANGING = frozenset({"train", "keep"})
"""Methods after which a worker is another than before. All others can be called again."""


class _Died(Exception):
    """Processes of a group have ended."""

    def __init__(self, ranks: Sequence[int], reason: str):
        super().__init__(reason)
        self.ranks = tuple(ranks)


class Cluster:
    """The places of a run's processes on a cluster, and the processes: trainers, then engines, then references."""

    def __init__(self, runtime: RuntimeConfig):
        ray = import_ray()
        self.runtime = runtime
        self.restarts = runtime.restarts
        self._hosts: dict[int, Any] = {}
        self._counting = threading.Lock()  # trainers and engines may each be called by a thread of their own
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._seats = seats(runtime, self._gpus)
        self._bundles = bundles(runtime, self._gpus)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_fits(self._bundles, nodes, runtime)
        self._placement = ray.util.placement_group(self._bundles, strategy="PACK")
        if not self._placement.wait(PLACING):
            free = ray.available_resources()
            ray.util.remove_placement_group(self._placement)
            raise ValueError(
                f"the cluster is in use: {_need(self._bundles, runtime)}, but of its {_amounts(nodes)} only "
                f"{_amounts([free])} are free; wait for the others, or ask for less"
            )

    def places(self, role: Role) -> range:
        """Of the run's processes of a kind: a smaller run may be inside of a larger one's places."""
        first = 0
        for each, count, wanted in zip(ROLES, _counts(self.runtime), _counts(current()), strict=True):
            if each == role:
                if wanted > count:
                    raise ValueError(f"{wanted} {role}s are wanted, but the cluster was made for fewer")
                return range(first, first + wanted)
            first += count
        raise AssertionError(role)

    def host(self, place: int) -> Any:
        """The process at a place, started if there is none."""
        if place not in self._hosts:
            ray = import_ray()
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            seat = self._seats[place]
            self._hosts[place] = (
                ray.remote(_OnNode)
                .options(
                    num_cpus=seat.takes["CPU"],
                    num_gpus=seat.takes.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, seat.bundle),
                )
                .remote(list(sys.path), self._gpus)
            )
        return self._hosts[place]

    def drop(self, place: int) -> None:
        """End the process at a place."""
        host = self._hosts.pop(place, None)
        if host is not None:
            import_ray().kill(host)

    def count_restart(self, who: str, reason: str) -> None:
        """Raises RankError when there have been enough."""
        with self._counting:
            if self.restarts == 0:
                raise RankError(
                    f"{who} died ({reason}), after as many restarts as runtime.restarts allows "
                    f"({current().restarts}); the run stopped, resume it from the last checkpoint"
                )
            self.restarts -= 1
        print(f"audiorl: {who} died ({reason}) and is replaced; {self.restarts} restarts left", file=sys.stderr)

    def close(self) -> None:
        for place in list(self._hosts):
            self.drop(place)
        import_ray().util.remove_placement_group(self._placement)


class _OnNode(Host):
    """A host that knows its node's address from Ray."""

    def __init__(self, paths: Sequence[str], gpu: bool):
        super().__init__(paths, import_ray().util.get_node_ip_address(), gpu)


_cluster: Cluster | None = None


@contextmanager
def connected(runtime: RuntimeConfig) -> Iterator[Cluster]:
    """Connect to the cluster that `runtime` names, or start one here, and keep the run's places for the block.

    A block inside of another one, and a Ray that this process has started itself, are used as they are. Raises
    ValueError when the cluster does not answer, is of other versions, or is too small.
    """
    global _cluster
    if _cluster is not None:
        _cluster.restarts = runtime.restarts
        _send_recipes_whole()
        yield _cluster
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a warning about what Ray will do one day
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = runtime.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # Read when Ray is imported: a cluster of one machine listens on loopback only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: behind everything else here
    ray = import_ray()
    found = ray.is_initialized()
    if not found:
        _connect(address, runtime)
    _send_recipes_whole()
    try:
        _cluster = Cluster(runtime)
        yield _cluster
    finally:
        if _cluster is not None:
            _cluster.close()
            _cluster = None
        if not found:
            ray.shutdown()


def _connect(address: str | None, runtime: RuntimeConfig) -> None:
    ray = import_ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        wanted = sum(_counts(runtime))
        processors = os.cpu_count() or 1
        # Without GPUs processes may share processors, as everywhere on one machine.
        count = processors if torch.cuda.is_available() else max(processors, wanted)
        ray.init(address="local", num_cpus=count, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return
    if address != "auto":
        check_answers(address)
    try:
        ray.init(address=address, **quiet)
    except (RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        raise ValueError(f"runtime.address {address}: {' '.join(str(error).split())}") from error


def check_answers(address: str) -> None:
    """Raise ValueError unless something like a Ray cluster listens at HOST:PORT. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ValueError(f"runtime.address {address!r}: give HOST:PORT of the cluster's head, as 'ray start' says it")
    # What every HTTP/2 connection begins with, and so gRPC's: a preface, and an empty frame of settings (RFC 9113).
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTING) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            answer = connection.recv(len(settings))
    except OSError as error:
        raise ValueError(
            f"runtime.address {address}: no Ray cluster answers there ({error}); start one with 'ray start --head', or "
            "leave the option out to start one on this machine"
        ) from error
    if answer[3:4] != settings[3:4]:
        raise ValueError(f"runtime.address {address}: what answers there is no Ray cluster")


def _send_recipes_whole() -> None:
    """A recipe is a file, no module that others could import: what it defines travels by value."""
    from ray import cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith("audiorl_recipe_"):
            cloudpickle.register_pickle_by_value(module)


@dataclass(frozen=True)
class Seat:
    """Where a process is: a bundle of the placement group, and what it takes of it."""

    bundle: int
    takes: dict[str, float]


def _counts(runtime: RuntimeConfig) -> tuple[int, ...]:
    """Processes by role."""
    return runtime.ranks, runtime.engines, runtime.references


def seats(runtime: RuntimeConfig, gpus: bool) -> list[Seat]:
    """Of each process, by place. An engine together with a trainer is in its bundle: half of a GPU each."""
    shared = runtime.engines if runtime.placement == "together" else 0

    def seat(bundle: int, share: float) -> Seat:
        return Seat(bundle, {"CPU": 1.0, "GPU": share} if gpus else {"CPU": 1.0})

    found = [seat(k, 0.5 if k < shared else 1.0) for k in range(runtime.ranks)]
    if shared:
        found += [seat(k, 0.5) for k in range(runtime.engines)]
    else:
        found += [seat(runtime.ranks + k, float(runtime.engine_gpus)) for k in range(runtime.engines)]
    behind = 1 + max(each.bundle for each in found)
    return found + [seat(behind + k, 1.0) for k in range(runtime.references)]


def bundles(runtime: RuntimeConfig, gpus: bool) -> list[dict[str, float]]:
    """What the placement group keeps for the run: in each bundle, which lies on one node, what its processes take."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seat in seats(runtime, gpus):
        for name, count in seat.takes.items():
            totals[seat.bundle][name] += count
    return [dict(totals[bundle]) for bundle in sorted(totals)]


def check_fits(
    wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], runtime: RuntimeConfig
) -> None:
    """Raise ValueError with the numbers when the bundles do not fit on the nodes, largest first."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(wanted, key=lambda b: -b.get("GPU", 0)):
        place = next((n for n in free if all(n.get(name, 0) >= count for name, count in bundle.items())), None)
        if place is None:
            raise ValueError(f"{_need(wanted, runtime)}, but the cluster has {_amounts(nodes)} on {len(nodes)} node(s)")
        for name, count in bundle.items():
            place[name] -= count


def _need(wanted: Sequence[Mapping[str, float]], runtime: RuntimeConfig) -> str:
    engines = f" and runtime.engines {runtime.engines}" if runtime.engines else ""
    if runtime.engines and runtime.engine_gpus > 1:
        engines += f" of {runtime.engine_gpus} GPUs on one node each"
    if runtime.engines and runtime.placement == "together":
        engines += " on their GPUs"
    references = f" and runtime.references {runtime.references}" if runtime.references else ""
    return f"runtime.ranks {runtime.ranks}{engines}{references} need {_amounts(wanted)}"


def _amounts(found: Sequence[Mapping[str, float]]) -> str:
    cpus, gpus = (int(sum(each.get(name, 0) for each in found)) for name in ("CPU", "GPU"))
    return f"{gpus} GPUs and {cpus} CPUs"


class RayGroup:
    """A worker in each of the run's processes of a kind, made by `make(*args)`. The group before it ends."""

    shared = False

    def __init__(self, role: Role, make: Make, *args: Any):
        if _cluster is None:
            raise ValueError("no Ray cluster is connected: 'audiorl train' does it, or runtime.cluster.connected")
        self._cluster = _cluster
        self._role: Role = role
        self._places = _cluster.places(role)
        self._make = (current(), torch.get_num_threads(), make, *args)
        self._ready: set[int] = set()
        self._changes: list[tuple[str, Sequence[tuple[Any, ...]]]] = []

    @property
    def size(self) -> int:
        return len(self._places)

    def each(self, method: str, shards: Sequence[Any]) -> list[Any]:
        check_shards(shards, self.size)
        return self._call(method, [(shard,) for shard in shards], import_ray().get)

    def all(self, method: str, *args: Any) -> list[Any]:
        return self._call(method, [args] * self.size, import_ray().get)

    def first(self, method: str, *args: Any) -> Any:
        return import_ray().get(self.refer(method, *args))

    def refer(self, method: str, *args: Any) -> Any:
        """`first`, but the answer stays where it is: for `all` of another group."""
        return self._call(method, [args] * self.size, lambda reference: reference)[0]

    def saved(self, where: str) -> None:
        self._changes = [("resume", [(where,)] * self.size)]

    def pids(self) -> list[int]:
        """The processes' numbers on their nodes."""
        return import_ray().get([self._cluster.host(place).pid.remote() for place in self._places])

    # -- calls, and what becomes of them ---------------------------------------------------------------------------

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], take: Callable[[Any], Any]) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < self.size:
            try:
                self._prepare()
                self._ask(method, {r: a for r, a in enumerate(arguments) if r not in found}, take, found)
            except _Died as death:
                self._lose(death)
                if self._role == "trainer":
                    found.clear()
        if method in REPLACING:
            self._changes.clear()
        if method in REPLACING | CHANGING:
            self._changes.append((method, list(arguments)))
        return [found[rank] for rank in range(self.size)]

    def _prepare(self) -> None:
        """Have a worker everywhere, in the state of the last call that changed it."""
        missing = [rank for rank in range(self.size) if rank not in self._ready]
        if not missing:
            return
        if self._role == "trainer":
            missing = list(range(self.size))
        self._start(missing)
        self._wait({self._host(r).make.options(num_returns=2).remote(*self._make)[0]: r for r in missing})
        for method, arguments in self._changes:
            self._ask(method, {r: arguments[r] for r in missing}, lambda reference: None, {})
        self._ready.update(missing)

    def _start(self, ranks: Sequence[int]) -> None:
        """Have a process in each place and, of trainers, a process group. One may die in here too."""
        self._wait({self._host(rank).started.remote(): rank for rank in ranks}, within=STARTING)
        if self._role == "trainer":
            store = self._host(0).open_store.options(num_returns=2).remote()
            self._wait({store[0]: 0})
            address = import_ray().get(store[1])
            self._wait({self._host(r).join.remote(r, self.size, *address): r for r in ranks})

    def _ask(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        take: Callable[[Any], Any],
        found: dict[int, Any],
    ) -> None:
        """Call a method of some ranks; `found` gets their answers as they come."""
        answers = {r: self._host(r).call.options(num_returns=2).remote(method, *a) for r, a in arguments.items()}

        def arrived(rank: int) -> None:
            found[rank] = take(answers[rank][1])

        self._wait({failed: rank for rank, (failed, _) in answers.items()}, arrived)

    def _wait(
        self,
        pending: dict[Any, int],
        arrived: Callable[[int], None] = lambda rank: None,
        within: float | None = None,
    ) -> None:
        """Until every rank has answered or died. Raises RankError for what a worker raised and for an answer that does
        not come `within` seconds after the one before, _Died for the dead.
        """
        ray = import_ray()
        dead: dict[int, str] = {}
        while pending:
            answered, _ = ray.wait(list(pending), num_returns=1, timeout=within)
            if not answered:
                self._end()
                raise RankError(f"{self._name(list(pending.values()))} did not start within {within:g} s")
            reference = answered[0]
            rank = pending.pop(reference)
            try:
                failed = ray.get(reference)
                if failed is None:
                    arrived(rank)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                failed = Failed(type(cause or error).__name__, _reason(error), isinstance(cause, RuntimeError))
            except ray.exceptions.RayError as error:
                dead[rank] = _reason(error)
                failed = None
            if failed is not None:
                self._fail(rank, failed)
            if dead and self._role == "trainer":
                break  # the others wait for it in vain
        if dead:
            raise _Died(list(dead), next(iter(dead.values())))

    def _fail(self, rank: int, failed: Failed) -> None:
        """Stop for what a rank's worker raised, unless it only met another's death."""
        ray = import_ray()
        if failed.echo and self._role == "trainer":
            beats = {self._host(r).pid.remote(): r for r in range(self.size) if r != rank}
            for beat in ray.wait(list(beats), num_returns=len(beats), timeout=NOTICING)[0] if beats else []:
                try:
                    ray.get(beat)
                except ray.exceptions.RayError as error:
                    raise _Died([beats[beat]], _reason(error)) from error
        self._end()  # the other ranks wait for this one in an operation that it will not join
        raise RankError(f"{self._name([rank])}: {failed}; the run stopped, resume it from the last checkpoint")

    def _lose(self, death: _Died) -> None:
        if self._role == "trainer":
            self._end()
        for rank in death.ranks:
            self._cluster.drop(self._places[rank])
            self._ready.discard(rank)
        self._cluster.count_restart(self._name(death.ranks), str(death))

    def _end(self) -> None:
        for place in self._places:
            self._cluster.drop(place)
        self._ready.clear()

    def _host(self, rank: int) -> Any:
        return self._cluster.host(self._places[rank])

    def _name(self, ranks: Sequence[int]) -> str:
        kind = "rank" if self._role == "trainer" else self._role
        return f"{kind} {', '.join(map(str, ranks))}"


def _reason(error: Exception) -> str:
    """What Ray says of a death or of a task that could not begin, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = (lines or [type(error).__name__])[-1]
    return last.partition(" Some common causes")[0].rpartition("exit detail: ")[2].rstrip(".")


def import_ray() -> Any:
    """Raises ValueError that says how to install it."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise ValueError("runtime.kind ray: Ray is not installed: pip install 'audiorl[scale]'") from error
    return ray

"""Workers in a Ray cluster: connects to a cluster or starts one, places the run's processes, and replaces dead ones.

The driver holds no worker. The trainers form one torch process group, and critics another; engines and references
belong to none. When a process dies, a new one makes the worker again, and the group repeats the calls that changed it
since the last checkpoint (`changes_worker`, `replaces_worker`). All trainers, or all critics, are replaced together,
because a process group does not survive the death of a rank. A step depends on (seed, step) and the weights only, so
the repeated steps are the same.
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
from audiorl.runtime.local import MakeWorker, StateEffect, check_shards
from audiorl.runtime.torchrun import RankError
from audiorl.runtime.worker_process import WorkerFailure, WorkerProcess

Role = Literal["trainer", "engine", "reference", "critic"]

ROLES: tuple[Role, ...] = ("trainer", "engine", "reference", "critic")
"""In the order of their process indices."""
COLLECTIVE_ROLES: tuple[Role, ...] = ("trainer", "critic")
"""Whose processes form a process group: they are started and replaced together."""

CONNECT_TIMEOUT_SECONDS = 5.0
"""For the first answer of a cluster's head."""
PLACEMENT_TIMEOUT_SECONDS = 60.0
"""For other jobs to free the resources that the run needs."""
START_TIMEOUT_SECONDS = 600.0
"""For a process to start: it imports torch and transformers, perhaps from a slow disk."""
DEATH_NOTICE_SECONDS = 10.0
"""After a rank's collective failed: how long to look for the death of another rank that caused it."""


class _Died(Exception):
    """Processes of a group died."""

    def __init__(self, ranks: Sequence[int], reason: str):
        super().__init__(reason)
        self.ranks = tuple(ranks)


class Cluster:
    """A run's resources on a cluster and its processes, indexed in the order of `ROLES`."""

    def __init__(self, runtime: RuntimeConfig):
        ray = import_ray()
        self.runtime = runtime
        self.restarts = runtime.restarts
        self._processes: dict[int, Any] = {}
        self._restart_lock = threading.Lock()  # two threads may call trainers and engines at the same time
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._placements = placements(runtime, self._gpus)
        self._bundles = bundles(runtime, self._gpus)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_fits(self._bundles, nodes, runtime)
        self._placement_group = ray.util.placement_group(self._bundles, strategy="PACK")
        if not self._placement_group.wait(PLACEMENT_TIMEOUT_SECONDS):
            free = ray.available_resources()
            ray.util.remove_placement_group(self._placement_group)
            raise ValueError(
                f"the cluster is in use: {_need(self._bundles, runtime)}, but of its {_amounts(nodes)} only "
                f"{_amounts([free])} are free; wait for the others, or ask for less"
            )

    def indices(self, role: Role) -> range:
        """Indices of the processes of a role. The current run may use fewer than the cluster was made for."""
        first = 0
        for each, available, wanted in zip(ROLES, _counts(self.runtime), _counts(current()), strict=True):
            if each == role:
                if wanted > available:
                    raise ValueError(f"{wanted} {role}s are wanted, but the cluster was made for {available}")
                return range(first, first + wanted)
            first += available
        raise AssertionError(role)

    def process(self, index: int) -> Any:
        """The process at `index` (a Ray actor), started if it is not running."""
        if index not in self._processes:
            ray = import_ray()
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            placement = self._placements[index]
            self._processes[index] = (
                ray.remote(_NodeProcess)
                .options(
                    num_cpus=placement.resources["CPU"],
                    num_gpus=placement.resources.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement_group, placement.bundle),
                )
                .remote(list(sys.path), self._gpus)
            )
        return self._processes[index]

    def cpu_seconds(self, indices: Sequence[int]) -> list[float | None]:
        """CPU seconds of the processes at `indices`, see `audiorl.runtime.cpu_time`; 0 of one that is not running."""
        ray = import_ray()
        answers = {i: self._processes[i].cpu_seconds.remote() for i in indices if i in self._processes}
        seconds: dict[int, float | None] = {}
        for i, reference in answers.items():
            try:
                seconds[i] = ray.get(reference)
            except ray.exceptions.RayError:
                seconds[i] = 0.0  # it has died; the next call of its group replaces it
        return [seconds.get(i, 0.0) for i in indices]

    def kill(self, index: int) -> None:
        """End the process at `index`, if it is running."""
        process = self._processes.pop(index, None)
        if process is not None:
            import_ray().kill(process)

    def count_restart(self, who: str, reason: str) -> None:
        """Count one restart. Raises RankError when `restarts` are used up."""
        with self._restart_lock:
            if self.restarts == 0:
                raise RankError(
                    f"{who} died ({reason}), after as many restarts as runtime.restarts allows "
                    f"({current().restarts}); the run stopped, resume it from the last checkpoint"
                )
            self.restarts -= 1
        print(f"audiorl: {who} died ({reason}) and is replaced; {self.restarts} restarts left", file=sys.stderr)

    def close(self) -> None:
        """End all processes and free their resources."""
        for index in list(self._processes):
            self.kill(index)
        import_ray().util.remove_placement_group(self._placement_group)


class _NodeProcess(WorkerProcess):
    """A `WorkerProcess` that asks Ray for its node's address."""

    def __init__(self, paths: Sequence[str], gpu: bool):
        super().__init__(paths, import_ray().util.get_node_ip_address(), gpu)


_cluster: Cluster | None = None


@contextmanager
def connected(runtime: RuntimeConfig) -> Iterator[Cluster]:
    """Connect to the cluster that `runtime` names, or start one on this machine, and reserve the run's resources.

    Nested blocks share the outer block's cluster; a Ray that this process already initialised is used as it is. Raises
    ValueError when the cluster does not answer, runs other versions, or is too small.
    """
    global _cluster
    if _cluster is not None:
        _cluster.restarts = runtime.restarts
        _pickle_recipes_by_value()
        yield _cluster
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a warning about a future default
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = runtime.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # Read when Ray is imported: a cluster of one machine listens on loopback only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 gives workers the lowest priority
    ray = import_ray()
    already_initialized = ray.is_initialized()
    if not already_initialized:
        _connect(address, runtime)
    _pickle_recipes_by_value()
    try:
        _cluster = Cluster(runtime)
        yield _cluster
    finally:
        if _cluster is not None:
            _cluster.close()
            _cluster = None
        if not already_initialized:
            ray.shutdown()


def _connect(address: str | None, runtime: RuntimeConfig) -> None:
    ray = import_ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        processors = os.cpu_count() or 1
        # Without GPUs there may be more processes than processors: Ray must not refuse to place them.
        cpus = processors if torch.cuda.is_available() else max(processors, sum(_counts(runtime)))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return
    if address != "auto":
        check_answers(address)
    try:
        ray.init(address=address, **quiet)
    except (RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        raise ValueError(f"runtime.address {address}: {' '.join(str(error).split())}") from error


def check_answers(address: str) -> None:
    """Raise ValueError unless a gRPC server, as Ray's head is, listens at HOST:PORT. Ray itself retries for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ValueError(f"runtime.address {address!r}: give HOST:PORT of the cluster's head, as 'ray start' prints it")
    # An HTTP/2 connection, and so gRPC, begins with a preface and a SETTINGS frame, empty here (RFC 9113).
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            answer = connection.recv(len(settings))
    except OSError as error:
        raise ValueError(
            f"runtime.address {address}: no Ray cluster answers there ({error}); start one with 'ray start --head', or "
            "leave the option out to start one on this machine"
        ) from error
    if answer[3:4] != settings[3:4]:
        raise ValueError(f"runtime.address {address}: the server there is not a Ray cluster")


def _pickle_recipes_by_value() -> None:
    """Pickle the functions and classes of recipes by value: a recipe is a file that other processes cannot import."""
    from ray import cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith("audiorl_recipe_"):
            cloudpickle.register_pickle_by_value(module)


@dataclass(frozen=True)
class Placement:
    """Where one process goes: the index of a bundle in Ray's placement group, and what it uses of the bundle."""

    bundle: int
    resources: dict[str, float]
    """Counts of "CPU" and "GPU"."""


def _counts(runtime: RuntimeConfig) -> tuple[int, ...]:
    """Number of processes of each of `ROLES`."""
    return runtime.ranks, runtime.engines, runtime.references, runtime.critics


def placements(runtime: RuntimeConfig, gpus: bool) -> list[Placement]:
    """The placement of each process by index. A colocated engine shares a trainer's bundle: half of the GPU each."""
    colocated = runtime.engines if runtime.placement == "colocated" else 0

    def place(bundle: int, gpu: float) -> Placement:
        return Placement(bundle, {"CPU": 1.0, "GPU": gpu} if gpus else {"CPU": 1.0})

    trainers = [place(k, 0.5 if k < colocated else 1.0) for k in range(runtime.ranks)]
    if colocated:
        engines = [place(k, 0.5) for k in range(runtime.engines)]
    else:
        engines = [place(runtime.ranks + k, float(runtime.engine_gpus)) for k in range(runtime.engines)]
    first = 1 + max(each.bundle for each in [*trainers, *engines])
    return [*trainers, *engines, *(place(first + k, 1.0) for k in range(runtime.references + runtime.critics))]


def bundles(runtime: RuntimeConfig, gpus: bool) -> list[dict[str, float]]:
    """The bundles of Ray's placement group: the sum of what the processes of each use. A bundle lies on one node."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for placement in placements(runtime, gpus):
        for name, count in placement.resources.items():
            totals[placement.bundle][name] += count
    return [dict(totals[bundle]) for bundle in sorted(totals)]


def check_fits(
    wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], runtime: RuntimeConfig
) -> None:
    """Raise ValueError with the numbers when the bundles, placed largest first, do not fit on the nodes."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(wanted, key=lambda b: -b.get("GPU", 0)):
        node = next((n for n in free if all(n.get(name, 0) >= count for name, count in bundle.items())), None)
        if node is None:
            raise ValueError(f"{_need(wanted, runtime)}, but the cluster has {_amounts(nodes)} on {len(nodes)} node(s)")
        for name, count in bundle.items():
            node[name] -= count


def _need(wanted: Sequence[Mapping[str, float]], runtime: RuntimeConfig) -> str:
    engines = f" and runtime.engines {runtime.engines}" if runtime.engines else ""
    if runtime.engines and runtime.engine_gpus > 1:
        engines += f" of {runtime.engine_gpus} GPUs on one node each"
    if runtime.engines and runtime.placement == "colocated":
        engines += " on their GPUs"
    references = f" and runtime.references {runtime.references}" if runtime.references else ""
    critics = f" and runtime.critics {runtime.critics}" if runtime.critics else ""
    return f"runtime.ranks {runtime.ranks}{engines}{references}{critics} need {_amounts(wanted)}"


def _amounts(resources: Sequence[Mapping[str, float]]) -> str:
    cpus, gpus = (int(sum(each.get(name, 0) for each in resources)) for name in ("CPU", "GPU"))
    return f"{gpus} GPUs and {cpus} CPUs"


class RayGroup:
    """A worker in each of the run's processes of one role, made by `make(*args)`; the role's earlier group ends."""

    shared = False

    def __init__(self, role: Role, make: MakeWorker, *args: Any):
        if _cluster is None:
            raise ValueError("no Ray cluster is connected: use 'audiorl train' or runtime.ray_cluster.connected")
        self._cluster = _cluster
        self._role: Role = role
        self._collective = role in COLLECTIVE_ROLES
        self._indices = _cluster.indices(role)
        self._make_args = (current(), torch.get_num_threads(), make, *args)
        self._ready: set[int] = set()
        self._effects: dict[str, StateEffect] = {}
        self._replay: list[tuple[str, Sequence[tuple[Any, ...]]]] = []  # calls that a new worker must repeat
        self._replay_after_save = 0  # from here on also when the checkpoint that is being written is complete

    @property
    def size(self) -> int:
        return len(self._indices)

    def each(self, method: str, shards: Sequence[Any], arrived: Callable[[Any], None] | None = None) -> list[Any]:
        """See `Group`. `arrived` is called with each worker's result when it is there, again when it is repeated."""

        def receive(reference: Any) -> Any:
            result = import_ray().get(reference)
            if arrived is not None:
                arrived(result)
            return result

        check_shards(shards, self.size)
        return self._call(method, [(shard,) for shard in shards], receive)

    def all(self, method: str, *args: Any) -> list[Any]:
        return self._call(method, [args] * self.size, import_ray().get)

    def first(self, method: str, *args: Any) -> Any:
        return import_ray().get(self.first_ref(method, *args))

    def first_ref(self, method: str, *args: Any) -> Any:
        """Like `first`, but returns a Ray reference, which `all` of another group takes without a copy here."""
        return self._call(method, [args] * self.size, lambda reference: reference)[0]

    def cpu_seconds(self) -> list[float | None]:
        return self._cluster.cpu_seconds(self._indices)

    def saving(self) -> None:
        self._replay_after_save = len(self._replay)

    def saved(self, where: str) -> None:
        self._replay = [("resume", [(where,)] * self.size), *self._replay[self._replay_after_save :]]

    def pids(self) -> list[int]:
        """The processes' ids on their nodes."""
        return import_ray().get([self._cluster.process(index).pid.remote() for index in self._indices])

    # -- calls and failures ----------------------------------------------------------------------------------------

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], receive: Callable[[Any], Any]) -> list[Any]:
        """Call `method` of every rank until all have answered, replacing the processes that die."""
        results: dict[int, Any] = {}
        while len(results) < self.size:
            try:
                self._prepare()
                self._ask(method, {r: a for r, a in enumerate(arguments) if r not in results}, receive, results)
            except _Died as death:
                self._lose(death)
                if self._collective:
                    results.clear()
        effect = self._effects.get(method)
        if effect == "replaces":
            self._replay.clear()
        if effect:
            self._replay.append((method, list(arguments)))
        return [results[rank] for rank in range(self.size)]

    def _prepare(self) -> None:
        """Make the missing workers and repeat the calls that changed their predecessors."""
        missing = [rank for rank in range(self.size) if rank not in self._ready]
        if not missing:
            return
        if self._collective:
            missing = list(range(self.size))
        self._start(missing)
        made = {r: self._process(r).make.options(num_returns=2).remote(*self._make_args) for r in missing}
        self._wait({failure: rank for rank, (failure, _) in made.items()})
        self._effects = import_ray().get(made[missing[0]][1])
        for method, arguments in self._replay:
            self._ask(method, {r: arguments[r] for r in missing}, lambda reference: None, {})
        self._ready.update(missing)

    def _start(self, ranks: Sequence[int]) -> None:
        """Start the processes of `ranks`; those of trainers and critics then join one process group.

        Raises _Died if one dies meanwhile.
        """
        self._wait({self._process(rank).started.remote(): rank for rank in ranks}, within=START_TIMEOUT_SECONDS)
        if self._collective:
            store = self._process(0).open_store.options(num_returns=2).remote()
            self._wait({store[0]: 0})
            address = import_ray().get(store[1])
            self._wait({self._process(r).join.remote(r, self.size, *address): r for r in ranks})

    def _ask(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        receive: Callable[[Any], Any],
        results: dict[int, Any],
    ) -> None:
        """Call a method of the ranks in `arguments`; fills `results` by rank as the answers arrive."""
        answers = {r: self._process(r).call.options(num_returns=2).remote(method, *a) for r, a in arguments.items()}

        def arrived(rank: int) -> None:
            results[rank] = receive(answers[rank][1])

        self._wait({failure: rank for rank, (failure, _) in answers.items()}, arrived)

    def _wait(
        self,
        pending: dict[Any, int],
        arrived: Callable[[int], None] = lambda rank: None,
        within: float | None = None,
    ) -> None:
        """Wait until every rank of `pending` (Ray reference to rank) has answered.

        Raises RankError for what a worker raised, or when no answer comes for `within` seconds; _Died when processes
        died.
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
                failure = ray.get(reference)
                if failure is None:
                    arrived(rank)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                failure = WorkerFailure(type(cause or error).__name__, _reason(error), isinstance(cause, RuntimeError))
            except ray.exceptions.RayError as error:
                dead[rank] = _reason(error)
                failure = None
            if failure is not None:
                self._fail(rank, failure)
            if dead and self._collective:
                break  # the other ranks never answer: they wait for the dead one in a collective
        if dead:
            raise _Died(list(dead), next(iter(dead.values())))

    def _fail(self, rank: int, failure: WorkerFailure) -> None:
        """Stop the run for what a worker raised. Raises _Died instead if another rank's death was the cause."""
        ray = import_ray()
        if failure.maybe_secondary and self._collective:
            pids = {self._process(r).pid.remote(): r for r in range(self.size) if r != rank}
            for pid in ray.wait(list(pids), num_returns=len(pids), timeout=DEATH_NOTICE_SECONDS)[0] if pids else []:
                try:
                    ray.get(pid)
                except ray.exceptions.RayError as error:
                    raise _Died([pids[pid]], _reason(error)) from error
        self._end()  # the other ranks wait for this one in a collective that it will not join
        raise RankError(f"{self._name([rank])}: {failure}; the run stopped, resume it from the last checkpoint")

    def _lose(self, death: _Died) -> None:
        if self._collective:
            self._end()
        for rank in death.ranks:
            self._cluster.kill(self._indices[rank])
            self._ready.discard(rank)
        self._cluster.count_restart(self._name(death.ranks), str(death))

    def _end(self) -> None:
        for index in self._indices:
            self._cluster.kill(index)
        self._ready.clear()

    def _process(self, rank: int) -> Any:
        return self._cluster.process(self._indices[rank])

    def _name(self, ranks: Sequence[int]) -> str:
        role = "rank" if self._role == "trainer" else self._role
        return f"{role} {', '.join(map(str, ranks))}"


def _reason(error: Exception) -> str:
    """Ray's explanation of a death, or of a task that could not start, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = (lines or [type(error).__name__])[-1]
    return last.partition(" Some common causes")[0].rpartition("exit detail: ")[2].rstrip(".")


def import_ray() -> Any:
    """The module ray. Raises ValueError that says how to install it where it is missing."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise ValueError("runtime.kind ray: Ray is not installed: pip install 'audiorl[scale]'") from error
    return ray

"""The cluster of a run: connects to one or starts one on this machine, and starts the run's processes there.

From top to bottom: which resources each process needs and whether a cluster has them; the cluster and its processes,
which the driver starts without holding a worker itself; `WorkerProcess`, the code of one such process.
`audiorl.distributed.ray_group` makes workers in the processes and calls them.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from audiorl.config.distributed import RuntimeConfig, current, set_current
from audiorl.distributed.local import MakeWorker, StateEffect, call_method, cpu_seconds, state_effects
from audiorl.distributed.torchrun import OWN_GPU, PROCESS_GROUP_TIMEOUT, RankError, backend, listening_store
from audiorl.errors import install

CONNECT_TIMEOUT_SECONDS = 5.0
"""For the first answer of a cluster's head."""
PLACEMENT_TIMEOUT_SECONDS = 60.0
"""For other jobs to free the resources that the run needs."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Options of `ray.init`."""
Role = Literal["trainer", "engine", "reference", "critic"]
ROLES: tuple[Role, ...] = ("trainer", "engine", "reference", "critic")
"""In the order of their process indices."""
Resources = dict[str, float]
"""Counts of "CPU" and "GPU"."""


def counts(runtime: RuntimeConfig) -> tuple[int, ...]:
    """Return the number of processes of each of `ROLES`."""
    return runtime.ranks, runtime.engines, runtime.references, runtime.critics


def placements(runtime: RuntimeConfig, gpus: bool) -> list[tuple[int, Resources]]:
    """Place each process, by index: a bundle of Ray's placement group, and what the process uses of it.

    A colocated engine shares a trainer's bundle: half of the GPU each.
    """
    ranks, engines, *others = counts(runtime)
    if runtime.placement == "colocated":
        shares = [(k, 0.5 if k < engines else 1.0) for k in range(ranks)] + [(k, 0.5) for k in range(engines)]
        first = ranks
    else:
        shares = [(k, 1.0) for k in range(ranks)]
        shares += [(ranks + k, float(runtime.engine_gpus)) for k in range(engines)]
        first = ranks + engines
    shares += [(first + k, 1.0) for k in range(sum(others))]
    return [(bundle, {"CPU": 1.0, "GPU": gpu} if gpus else {"CPU": 1.0}) for bundle, gpu in shares]


def bundles(runtime: RuntimeConfig, gpus: bool) -> list[Resources]:
    """Return the bundles of Ray's placement group: what the processes of each use together, on one node."""
    totals: dict[int, Resources] = {}
    for bundle, resources in placements(runtime, gpus):
        total = totals.setdefault(bundle, dict.fromkeys(resources, 0.0))
        for name, count in resources.items():
            total[name] += count
    return [totals[bundle] for bundle in sorted(totals)]


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
    """Say which options need the bundles `wanted`, and how many GPUs and CPUs that is."""
    asked = [f"runtime.{name}s {n}" for name, n in zip(("rank", *ROLES[1:]), counts(runtime), strict=True) if n]
    if runtime.engines and runtime.engine_gpus > 1:
        asked[1] += f" of {runtime.engine_gpus} GPUs on one node each"
    if runtime.engines and runtime.placement == "colocated":
        asked[1] += " on their GPUs"
    return f"{' and '.join(asked)} need {_amounts(wanted)}"


def _amounts(resources: Sequence[Mapping[str, float]]) -> str:
    cpus, gpus = (int(sum(each.get(name, 0) for each in resources)) for name in ("CPU", "GPU"))
    return f"{gpus} GPUs and {cpus} CPUs"


class Cluster:
    """A run's resources on a cluster and its processes, indexed in the order of `ROLES`."""

    def __init__(self, runtime: RuntimeConfig):
        ray = import_ray()
        self.runtime = runtime
        self.restarts = runtime.restarts
        self._processes: dict[int, Any] = {}
        self._restart_lock = threading.Lock()  # two threads may call trainers and engines at the same time
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        wanted = bundles(runtime, self._gpus)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_fits(wanted, nodes, runtime)
        self._placement_group = ray.util.placement_group(wanted, strategy="PACK")
        if not self._placement_group.wait(PLACEMENT_TIMEOUT_SECONDS):
            free = _amounts([ray.available_resources()])
            ray.util.remove_placement_group(self._placement_group)
            raise ValueError(
                f"the cluster is in use: {_need(wanted, runtime)}, but of its {_amounts(nodes)} only {free} are free; "
                "wait for the others, or ask for less"
            )

    def indices(self, role: Role) -> range:
        """Index the processes of a role. The current run may use fewer than the cluster was made for."""
        k = ROLES.index(role)
        available, wanted = counts(self.runtime), counts(current())[k]
        if wanted > available[k]:
            raise ValueError(f"{wanted} {role}s are wanted, but the cluster was made for {available[k]}")
        first = sum(available[:k])
        return range(first, first + wanted)

    def process(self, index: int) -> Any:
        """Return the process at `index` (a Ray actor), started if it is not running."""
        if index not in self._processes:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            bundle, resources = placements(self.runtime, self._gpus)[index]
            actor = import_ray().remote(WorkerProcess)
            actor = actor.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement_group, bundle),
            )
            self._processes[index] = actor.remote(list(sys.path), self._gpus)
        return self._processes[index]

    def cpu_seconds(self, indices: Sequence[int]) -> list[float | None]:
        """Return `local.cpu_seconds` of the processes at `indices`; 0 of one that is not running."""
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
        if index in self._processes:
            import_ray().kill(self._processes.pop(index))

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
    if already_initialized:
        pass
    elif address is None:
        processors = os.cpu_count() or 1
        # Without GPUs there may be more processes than processors: Ray must not refuse to place them.
        cpus = processors if torch.cuda.is_available() else max(processors, sum(counts(runtime)))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **QUIET)
    else:
        if address != "auto":
            check_answers(address)
        try:
            ray.init(address=address, **QUIET)
        except (RuntimeError, ConnectionError, ValueError) as error:
            ray.shutdown()
            raise ValueError(f"runtime.address {address}: {' '.join(str(error).split())}") from error
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


def connected_cluster() -> Cluster:
    """Return the cluster of the `connected` block that runs."""
    assert _cluster is not None, "inside of a `connected` block only"
    return _cluster


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


def import_ray() -> Any:
    """Return the module ray. Raises a ValueError that says how to install it where it is missing."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise ValueError(f"runtime.kind ray: Ray is not installed: {install('scale')}") from error
    return ray


# -- in a process of the cluster --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerFailure:
    """An exception that a worker raised; `WorkerProcess` fills it in."""

    message: str
    """With the name of the exception's class."""
    maybe_secondary: bool
    """Whether the end of another rank may have caused it: a broken collective raises RuntimeError."""


class WorkerProcess:
    """An actor of Ray that holds one worker. It ignores SIGINT, which the driver handles.

    paths: the driver's `sys.path`, for this process to import what the driver can. gpu: whether it was given one.
    """

    def __init__(self, paths: Sequence[str], gpu: bool):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.path += [path for path in paths if path not in sys.path]
        self._address: str = import_ray().util.get_node_ip_address()
        self._worker: Any = None
        self._store: dist.TCPStore | None = None
        if gpu:
            os.environ[OWN_GPU] = "1"
            os.environ.setdefault("LOCAL_RANK", "0")  # Ray shows a process only the GPU that it was given
        if self._address.startswith("127."):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")

    def pid(self) -> int:
        """Return this process's id on its node."""
        return os.getpid()

    def cpu_seconds(self) -> float | None:
        """Return `local.cpu_seconds` of this process."""
        return cpu_seconds()

    def started(self) -> None:
        """Return once the process has started."""

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
        return WorkerFailure(f"{type(error).__name__}: {error}", isinstance(error, RuntimeError)), None


def _on_cpu(value: Any) -> Any:
    """Move tensors, also in dicts, to the CPU: a process without a GPU must be able to unpickle them."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value

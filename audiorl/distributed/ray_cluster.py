"""The cluster that a run uses: connects to one or starts one on this machine, and starts the run's processes there.

The driver holds no worker. `audiorl.distributed.ray_bundles` says what each process needs;
`audiorl.distributed.ray_group`
makes workers in the processes and calls them.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from audiorl.config.distributed import RuntimeConfig, current
from audiorl.distributed.ray_bundles import ROLES, Role, amounts, bundles, check_fits, counts, need, placements
from audiorl.distributed.torchrun import RankError
from audiorl.distributed.worker_process import WorkerProcess

CONNECT_TIMEOUT_SECONDS = 5.0
"""For the first answer of a cluster's head."""
PLACEMENT_TIMEOUT_SECONDS = 60.0
"""For other jobs to free the resources that the run needs."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Options of `ray.init`."""


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
                f"the cluster is in use: {need(self._bundles, runtime)}, but of its {amounts(nodes)} only "
                f"{amounts([free])} are free; wait for the others, or ask for less"
            )

    def indices(self, role: Role) -> range:
        """Indices of the processes of a role. The current run may use fewer than the cluster was made for."""
        first = 0
        for each, available, wanted in zip(ROLES, counts(self.runtime), counts(current()), strict=True):
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
        """CPU seconds of the processes at `indices`, see `audiorl.distributed.cpu_time`; 0 of one that is not
        running."""
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


def connected_cluster() -> Cluster:
    """The cluster of the `connected` block that runs. Raises ValueError outside of one."""
    if _cluster is None:
        raise ValueError("no Ray cluster is connected: use 'audiorl train' or runtime.ray_cluster.connected")
    return _cluster


def _connect(address: str | None, runtime: RuntimeConfig) -> None:
    ray = import_ray()
    if address is None:
        processors = os.cpu_count() or 1
        # Without GPUs there may be more processes than processors: Ray must not refuse to place them.
        cpus = processors if torch.cuda.is_available() else max(processors, sum(counts(runtime)))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **QUIET)
        return
    if address != "auto":
        check_answers(address)
    try:
        ray.init(address=address, **QUIET)
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


def import_ray() -> Any:
    """The module ray. Raises ValueError that says how to install it where it is missing."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise ValueError("runtime.kind ray: Ray is not installed: pip install 'audiorl[scale]'") from error
    return ray

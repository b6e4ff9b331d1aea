"""The processes of a run: one, several under torchrun, or those of a Ray cluster, behind one protocol.

`local` has the protocol, `Group`, and the group in this process; `torchrun` and `ray_group` the others, `ray_cluster`
Ray's processes. Here the groups are made that the options `--runtime.…` ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from audiorl.config.distributed import VLLM_COLOCATED_ERROR, RuntimeConfig, current, set_current
from audiorl.distributed.local import Group, LocalGroup, World
from audiorl.distributed.torchrun import RanksGroup, process_group, ranks

WorkerSpec = Callable[[], tuple[Any, ...]]
"""Returns a module-level function and its arguments, from which another process makes its worker."""


def use_runtime(runtime: RuntimeConfig) -> None:
    """Check the options `--runtime.…` against each other and this machine, and make them this process's.

    Raises ValueError for options that contradict each other and for more processes than GPUs.
    """
    runtime.check()
    gpus = torch.cuda.device_count()
    if runtime.kind == "torchrun" and gpus and runtime.ranks > gpus:
        raise ValueError(f"runtime.ranks is {runtime.ranks}, but this machine has {gpus} GPUs, one for each process")
    set_current(runtime)


@contextmanager
def processes() -> Iterator[None]:
    """Connect the run's processes (torchrun's process group or the Ray cluster) for the length of the block."""
    if current().kind == "ray":
        from audiorl.distributed.ray_cluster import connected

        with connected(current()):
            yield
    else:
        with process_group():
            yield


def trainer_group(make_local: Callable[[World], Any], spec: WorkerSpec) -> Group:
    """Make the trainers of a phase.

    `make_local` makes the driver's own worker, which may share the driver's objects; Ray's driver has none. `spec`
    describes the workers of all other processes.
    """
    if current().kind == "ray":
        from audiorl.distributed.ray_group import RayGroup

        return RayGroup("trainer", *spec())
    if ranks() == 1:
        return LocalGroup([make_local(World())])
    return RanksGroup(lambda: make_local(World.of_process_group()), *spec())


def num_trainers() -> int:
    """Return how many trainers a phase has."""
    return current().ranks if current().kind == "ray" else ranks()


def separate_group(role: Literal["engine", "reference", "critic"], spec: WorkerSpec) -> Group | None:
    """Make engines, references or critics in processes of their own; None when the trainers hold them."""
    counts = {"engine": current().engines, "reference": current().references, "critic": current().critics}
    if not counts[role]:
        return None
    from audiorl.distributed.ray_group import RayGroup

    return RayGroup(role, *spec())


def check_engine() -> None:
    """Raise ValueError when vLLM would run in a process that trains together with others."""
    if current().engine == "vllm" and not current().engines and (num_trainers() > 1 or current().kind != "local"):
        raise ValueError(VLLM_COLOCATED_ERROR)

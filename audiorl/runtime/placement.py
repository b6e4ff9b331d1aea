"""Which group a run's workers form: in this process, in those of torchrun, or in those of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from audiorl.runtime.config import VLLM_BESIDE, current
from audiorl.runtime.local import Group, LocalGroup
from audiorl.runtime.torchrun import RanksGroup, process_group, ranks
from audiorl.runtime.world import World

Elsewhere = Callable[[], tuple[Any, ...]]
"""Gives a function of a module and its arguments, from which any process makes its own worker."""


@contextmanager
def processes() -> Iterator[None]:
    """Everything that a run's groups need, for the length of the block."""
    if current().kind == "ray":
        from audiorl.runtime.ray_cluster import connected

        with connected(current()):
            yield
    else:
        with process_group():
            yield


def team(own: Callable[[World], Any], elsewhere: Elsewhere) -> Group:
    """The trainers of a phase. `own` makes one that shares the driver's objects, where the driver is one of them."""
    if current().kind == "ray":
        from audiorl.runtime.ray_cluster import RayGroup

        return RayGroup("trainer", *elsewhere())
    if ranks() == 1:
        return LocalGroup([own(World())])
    return RanksGroup(lambda: own(World.of_process_group()), *elsewhere())


def team_size() -> int:
    """How many trainers a phase has."""
    return current().ranks if current().kind == "ray" else ranks()


def apart(role: Literal["engine", "reference"], elsewhere: Elsewhere) -> Group | None:
    """Engines or references in processes of their own; None where each trainer has one."""
    if not (current().engines if role == "engine" else current().references):
        return None
    from audiorl.runtime.ray_cluster import RayGroup

    return RayGroup(role, *elsewhere())


def check_engine() -> None:
    """Raise ValueError where vLLM would be in a process that trains together with others."""
    if current().engine == "vllm" and not current().engines and (team_size() > 1 or current().kind != "local"):
        raise ValueError(VLLM_BESIDE)

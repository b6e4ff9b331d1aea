"""Which resources of a Ray cluster each process of a run uses, and whether a cluster has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.config.distributed import RuntimeConfig

Role = Literal["trainer", "engine", "reference", "critic"]

ROLES: tuple[Role, ...] = ("trainer", "engine", "reference", "critic")
"""In the order of their process indices."""


@dataclass(frozen=True)
class Placement:
    """Where one process goes: the index of a bundle in Ray's placement group, and what it uses of the bundle."""

    bundle: int
    resources: dict[str, float]
    """Counts of "CPU" and "GPU"."""


def counts(runtime: RuntimeConfig) -> tuple[int, ...]:
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
            raise ValueError(f"{need(wanted, runtime)}, but the cluster has {amounts(nodes)} on {len(nodes)} node(s)")
        for name, count in bundle.items():
            node[name] -= count


def need(wanted: Sequence[Mapping[str, float]], runtime: RuntimeConfig) -> str:
    """For errors: the options that need the bundles `wanted`, and how many GPUs and CPUs that is."""
    engines = f" and runtime.engines {runtime.engines}" if runtime.engines else ""
    if runtime.engines and runtime.engine_gpus > 1:
        engines += f" of {runtime.engine_gpus} GPUs on one node each"
    if runtime.engines and runtime.placement == "colocated":
        engines += " on their GPUs"
    references = f" and runtime.references {runtime.references}" if runtime.references else ""
    critics = f" and runtime.critics {runtime.critics}" if runtime.critics else ""
    return f"runtime.ranks {runtime.ranks}{engines}{references}{critics} need {amounts(wanted)}"


def amounts(resources: Sequence[Mapping[str, float]]) -> str:
    """For errors: the GPUs and CPUs of several bundles or nodes together."""
    cpus, gpus = (int(sum(each.get(name, 0) for each in resources)) for name in ("CPU", "GPU"))
    return f"{gpus} GPUs and {cpus} CPUs"

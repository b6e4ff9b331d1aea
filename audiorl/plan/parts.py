"""The parts of a GPU's memory by phase, and the plan that they add up to."""

from __future__ import annotations

from dataclasses import dataclass

from audiorl.plan.layout import GIB, PHASES, Layout
from audiorl.plan.sizes import Size


@dataclass(frozen=True)
class Part:
    """Bytes of one thing in each of `PHASES`, and how they come about."""

    name: str
    how: str
    bytes: tuple[float, ...]


@dataclass(frozen=True)
class Cache:
    """An engine's key-value cache, of one GPU: bytes of a token there, tokens of a whole engine, and what they hold.

    `sequences` of prompt and response each; `shared` where the group's prompt is stored once (prefix caching).
    """

    token_bytes: int
    tokens: int
    sequences: int
    shared: int


@dataclass(frozen=True)
class GPU:
    """What lies on every GPU of one kind."""

    name: str
    count: int
    size: float
    """Bytes that there are."""
    parts: tuple[Part, ...]
    cache: Cache | None

    @property
    def totals(self) -> tuple[float, ...]:
        return tuple(sum(column) for column in zip(*(p.bytes for p in self.parts), strict=True))

    @property
    def peak(self) -> float:
        return max(self.totals)

    @property
    def fits(self) -> bool:
        return self.peak <= self.size and (self.cache is None or self.cache.sequences >= 1)


@dataclass(frozen=True)
class Plan:
    size: Size
    layout: Layout
    gpus: tuple[GPU, ...]
    host: float
    """Bytes of CPU memory that a node needs."""

    @property
    def fits(self) -> bool:
        return all(gpu.fits for gpu in self.gpus)


def part(name: str, how: str, size: float, phases: str = " ".join(PHASES)) -> Part:
    return Part(name, how, tuple(size * (x in phases.split()) for x in PHASES))


def only(part: Part, *phases: str) -> Part:
    return Part(part.name, part.how, tuple(b * (x in phases) for b, x in zip(part.bytes, PHASES, strict=True)))


def with_overhead(parts: list[Part], layout: Layout, kind: str, processes: int, ranks: int) -> list[Part]:
    a = layout.assume
    fixed = GIB * (processes * a.context_gib + (a.nccl_gib if ranks > 1 else 0))
    out = [*parts, part("CUDA and NCCL", f"{processes} process{'es' * (processes > 1)}, assumed", fixed)]
    if kind in ("trainer", "critic"):
        lost = tuple(a.fragmentation * sum(column) for column in zip(*(p.bytes for p in parts), strict=True))
        out.append(Part("fragmentation", f"{a.fragmentation:.0%} of the {kind}'s, assumed", lost))
    return out


def gpu_of(name: str, count: int, layout: Layout, parts: list[Part], cache: Cache | None = None) -> GPU:
    return GPU(name, count, layout.gpu_gib * GIB, tuple(p for p in parts if any(p.bytes)), cache)


def count_text(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"

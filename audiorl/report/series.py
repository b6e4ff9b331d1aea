"""Metrics as lines to draw: one line per name and phase, phases laid one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

_NOT_VALUES = ("seq", "step", "phase", "time")


@dataclass(frozen=True)
class Series:
    """The values of one metric in one phase; `x` are steps on the common axis of all phases."""

    name: str
    phase: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def end(self) -> float:
        """Where the curve ended: the mean of its last values, so that one lucky step does not count."""
        last = self.y[-window(len(self.y)) :]
        return sum(last) / len(last)


def is_control(phase: str) -> bool:
    return phase.startswith("control")


def offsets(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What to add to a phase's steps so that phases follow one another.

    A phase that counts on from the one before needs nothing added. A control phase starts where the phase it is
    compared with, the last other phase, starts: they branch from the same point.
    """
    spans: dict[str, tuple[float, float]] = {}
    for row in metrics:
        if _number(row.get("step")):
            phase, step = str(row.get("phase", "")), float(row["step"])
            low, high = spans.get(phase, (step, step))
            spans[phase] = (min(low, step), max(high, step))
    result: dict[str, float] = {}
    end = compared = 0.0
    for phase, (low, high) in spans.items():
        if not is_control(phase):
            compared = end if low <= end else 0.0
            result[phase] = compared
            end = compared + high
    for phase in spans:
        if is_control(phase):
            result[phase] = compared
    return result


def names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every metric that is a number somewhere, in order of appearance."""
    return list(dict.fromkeys(k for row in metrics for k, v in row.items() if k not in _NOT_VALUES and _number(v)))


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Series]:
    """One Series per phase that holds finite values of `name`. Of a step that was recorded twice the last counts."""
    shift = offsets(metrics)
    points: dict[str, dict[float, float]] = {}
    for row in metrics:
        value, step = row.get(name), row.get("step")
        if _number(value) and _number(step) and math.isfinite(value):
            phase = str(row.get("phase", ""))
            points.setdefault(phase, {})[float(step) + shift[phase]] = float(value)
    result = []
    for phase, pairs in points.items():
        xs = sorted(pairs)
        result.append(Series(name, phase, tuple(xs), tuple(pairs[x] for x in xs)))
    return result


def window(count: int) -> int:
    """How many neighbouring values are averaged in a curve of `count`; a curve of few values is shown as it is."""
    return 1 if count < 12 else max(3, count // 10)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average. At the ends only the neighbours that exist are averaged."""
    half = window(len(values)) // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def own_steps(lines: Sequence[Sequence[Series]], shift: Mapping[str, float]) -> tuple[list[list[Series]], str]:
    """Lines that all belong to one phase (and its control) counted in that phase's steps; and the axis label."""
    phases = {one.phase for same in lines for one in same if not is_control(one.phase)}
    if len(phases) != 1:
        return [list(same) for same in lines], "step"
    (phase,) = phases
    moved = [[replace(one, x=tuple(x - shift[phase] for x in one.x)) for one in same] for same in lines]
    return moved, f"{phase} step".strip()


def _number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)

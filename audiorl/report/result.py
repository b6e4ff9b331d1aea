"""What the run achieved, in numbers and in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audiorl.report.run import Row, Run


@dataclass(frozen=True)
class Measure:
    """One evaluation's value of the headline metric, with its 95% interval when there is one."""

    entry: str
    value: float
    n: int | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Changes:
    """Held-out examples whose answer changed, as (before row, after row), and how likely that is by chance."""

    fixed: tuple[tuple[Row, Row], ...]
    broken: tuple[tuple[Row, Row], ...]
    compared: int

    @property
    def p_value(self) -> float:
        return sign_test(len(self.fixed), len(self.broken))


@dataclass(frozen=True)
class Point:
    """How late and how well one evaluation interpreted: LAAL in seconds, chrF of 100."""

    entry: str
    latency: float
    quality: float


def headline(evals: Mapping[str, Row]) -> str | None:
    """The metric that the page is about: accuracy, chrF, or else the first number that the entries share."""
    entries = [e for e in evals.values() if isinstance(e, Mapping)]
    shared = [k for k in _numbers(entries[0]) if all(k in _numbers(e) for e in entries)] if entries else []
    shared = [k for k in shared if k not in ("n", "low", "high")]
    return next((k for k in ("accuracy", "chrf") if k in shared), next(iter(shared), None))


def called(metric: str) -> str:
    """What people call a metric."""
    return {
        "chrf": "chrF",
        "bleu": "BLEU",
        "mel_distance": "mel distance",
        "laal": "LAAL (s)",
        "stream_laal": "StreamLAAL (s)",
    }.get(metric, metric)


def points(evals: Mapping[str, Row]) -> list[Point]:
    """Every entry that has both a finite `laal` and a finite `chrf`."""
    found = [(name, _numbers(e)) for name, e in evals.items() if isinstance(e, Mapping)]
    both = [Point(name, n["laal"], n["chrf"]) for name, n in found if "laal" in n and "chrf" in n]
    return [p for p in both if math.isfinite(p.latency) and math.isfinite(p.quality)]


def measures(evals: Mapping[str, Row]) -> list[Measure]:
    """The headline metric of every entry. An accuracy with its n but no interval gets Wilson's."""
    metric = headline(evals)
    result = []
    for name, entry in evals.items():
        if metric is None or not isinstance(entry, Mapping):
            continue
        n = entry.get("n")
        low, high = entry.get("low"), entry.get("high")
        if (low is None or high is None) and metric == "accuracy" and n:
            low, high = wilson(entry[metric], n)
        result.append(Measure(name, float(entry[metric]), n, low, high))
    return result


def sentence(run: Run) -> str:
    """``Held-out accuracy rose from 41.0% (34.4–47.9%) to 63.5% (56.6–69.9%) on n = 200; …``"""
    found = {m.entry: m for m in measures(run.evals)}
    metric = headline(run.evals)
    if not found or metric is None:
        return "No held-out evaluation has been recorded yet."
    before, after = found.get("before"), found.get("after")
    if before and after:
        if metric == "accuracy":
            verb = "stayed at" if before.value == after.value else "rose" if after.value > before.value else "fell"
        else:
            verb = "went"
        way = (
            f"{_said(after, metric)}"
            if verb == "stayed at"
            else f"from {_said(before, metric)} to {_said(after, metric)}"
        )
        text = f"Held-out {called(metric)} {verb} {way}"
        if metric == "chrf":
            text += _later(points(run.evals))
    else:
        only = after or before or next(iter(found.values()))
        text = f"Held-out {called(metric)}, {only.entry}: {_said(only, metric)}"
    sizes = {m.n for m in found.values() if m.n is not None}
    if len(sizes) == 1:
        text += f" on n = {sizes.pop()}"
    elif sizes:
        text += " on " + ", ".join(f"n = {m.n} ({m.entry})" for m in found.values() if m.n is not None)
    if control := found.get("control"):
        text += f"; the control reached {_said(control, metric)}"
    return text + "."


def changes(before: Sequence[Row], after: Sequence[Row]) -> Changes:
    """Pair the answers by sample id and keep the pairs whose correctness differs."""
    later = {row.get("id"): row for row in after}
    pairs = [(row, later[row.get("id")]) for row in before if row.get("id") in later]
    return Changes(
        fixed=tuple((b, a) for b, a in pairs if not b.get("correct") and a.get("correct")),
        broken=tuple((b, a) for b, a in pairs if b.get("correct") and not a.get("correct")),
        compared=len(pairs),
    )


def sign_test(gained: int, lost: int) -> float:
    """Two-sided p-value of gained versus lost under a fair coin (the exact form of McNemar's test)."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def wilson(p: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927)."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def show(value: Any, metric: str = "") -> str:
    """A number as people read it: accuracies in percent, the rest with three digits that count."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if metric.rpartition("/")[2] in ("accuracy", "low", "high"):
        return f"{value:.1%}"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    value += 0.0  # no "-0"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _later(found: Sequence[Point]) -> str:
    """What became of the latency."""
    latency = {p.entry: p.latency for p in found}
    if not {"before", "after"} <= latency.keys():
        return ""
    return f", and LAAL from {latency['before']:.2f} s to {latency['after']:.2f} s,"


def _said(m: Measure, metric: str) -> str:
    text = show(m.value, metric)
    if m.low is None or m.high is None:
        return text
    if metric == "accuracy":
        return f"{text} ({m.low * 100:.1f}–{m.high * 100:.1f}%)"
    return f"{text} ({show(m.low)}–{show(m.high)})"


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}

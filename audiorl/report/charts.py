"""Drawing with matplotlib: metrics over steps, bars with intervals, quality against latency, pass@k.

In an SVG stand-in colours become CSS variables after drawing, so that one picture serves light and dark schemes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import Bbox, BboxBase
from numpy.typing import NDArray

from audiorl.report.kit import asset
from audiorl.report.summary import UNSEEN, Evals, Measure, Point, Row, headline, read_json_object, show

LineStyle = Literal["average", "points", "exact"]
"""How a line is drawn: every step faint under a moving average, marked points, or as recorded."""
SCORES = "scores.json"


@dataclass(frozen=True)
class Theme:
    """Colours of text, faint lines, what a result is compared with, and lines."""

    ink: str
    muted: str
    grid: str
    before: str
    control: str
    lines: tuple[str, ...]


_NAMES = ("ink", "muted", "grid", "before", "control", *(f"line{i}" for i in range(8)))
_STAND_INS = {name: f"#0a0b{i:02x}" for i, name in enumerate(_NAMES, 1)}  # matplotlib accepts only real colours
_COLOURS = dict(re.findall(r"--(\w+): (#\w+)", asset("report.css").split("@media")[0]))


def _theme(colours: Mapping[str, str]) -> Theme:
    ink, muted, grid, before, control, *lines = (colours[name] for name in _NAMES)
    return Theme(ink, muted, grid, before, control, tuple(lines))


PAGE, LIGHT = _theme(_STAND_INS), _theme(_COLOURS)
"""For pictures inside a page, see `svg`; for PNG files: the light colours of the style sheet."""


# -- metrics as lines --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Values of one metric in one phase; `x` are steps on the common axis of all phases."""

    name: str
    phase: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[tuple[float, ...], ...] = ()
    """Of a mean over several runs: the lowest and the highest."""

    @property
    def end(self) -> float:
        """Where the curve ended: the mean of its last values, so that one lucky step does not count."""
        last = self.y[-_window(len(self.y)) :]
        return sum(last) / len(last)


def is_control(phase: str) -> bool:
    return phase.startswith("control")


def offsets(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what to add to a phase's steps so that phases follow one another.

    A phase that counts on from the one before needs nothing added. A control phase starts where the phase it is
    compared with, the last other phase, starts: they branch from the same point.
    """
    spans: dict[str, tuple[float, float]] = {}
    for row in metrics:
        if _is_number(row.get("step")) and "entry" not in row:
            phase, step = str(row.get("phase", "")), float(row["step"])
            low, high = spans.get(phase, (step, step))
            spans[phase] = (min(low, step), max(high, step))
    result: dict[str, float] = {}
    end = compared = 0.0
    for phase, (low, high) in spans.items():
        if not is_control(phase):
            result[phase] = compared = end if low <= end else 0.0
            end = compared + high
    return result | {phase: compared for phase in spans if is_control(phase)}


def metric_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every metric that is a number somewhere, in order of appearance."""
    named = dict.fromkeys(name for row in metrics for name, value in row.items() if _is_number(value))
    return [name for name in named if name not in ("seq", "step", "phase", "time")]


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Series]:
    """Return one Series per phase that holds finite values of `name`. Of a step recorded twice the last counts."""
    shift = offsets(metrics)
    found: dict[str, dict[float, float]] = {}
    for row in metrics:
        value, step = row.get(name), row.get("step")
        if _is_number(value) and _is_number(step) and math.isfinite(value):
            phase = str(row.get("phase", ""))
            found.setdefault(phase, {})[float(step) + shift[phase]] = float(value)
    return [
        Series(name, phase, *map(tuple, zip(*sorted(pairs.items()), strict=True))) for phase, pairs in found.items()
    ]


def mean_series(runs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> list[Series]:
    """Return the `series` of one run, or of several the mean at the steps that all of them have, with its spread."""
    of_runs = [{one.phase: one for one in series(metrics, name)} for metrics in runs]
    if len(of_runs) == 1:
        return list(of_runs[0].values())
    means = []
    for phase in of_runs[0]:
        values = [dict(zip(held[phase].x, held[phase].y, strict=True)) for held in of_runs if phase in held]
        if shared := [x for x in of_runs[0][phase].x if len(values) == len(runs) and all(x in each for each in values)]:
            columns = [[each[x] for each in values] for x in shared]
            spread = (tuple(map(min, columns)), tuple(map(max, columns)))
            means.append(Series(name, phase, tuple(shared), tuple(sum(c) / len(c) for c in columns), spread))
    return means


def with_evaluations(metrics: Sequence[Row], evals: Evals) -> list[Row]:
    """Return `metrics` with lines for what eval.json holds of the headline and of each metric that was probed.

    `before` stands before the first step of the phases with probes (without any, of the last phase), `after` at their
    last step, where it takes the place of a probe, `control` at the last step of the control. Field `entry` names it.
    """
    ends: dict[str, list[Row]] = {}
    for row in metrics:
        if _is_number(row.get("step")):
            ends.setdefault(str(row.get("phase", "")), []).append(row)
    controls = [phase for phase in ends if is_control(phase)]
    trained = [phase for phase in ends if phase not in controls]
    added: list[Row] = []
    probed = [name for name in metric_names(metrics) if name.startswith("eval/")]
    for name in dict.fromkeys([*probed, f"eval/{headline(evals)}"]):
        phases = [p for p in trained if any(name in row for row in ends[p])] or trained[-1:]
        for entry, where, at in (("before", phases[:1], 0), ("after", phases[-1:], -1), ("control", controls[:1], -1)):
            value = (evals.get(entry) or {}).get(name.removeprefix("eval/"))
            for row in [ends[phase][at] for phase in where if _is_number(value)]:
                place = {"phase": row.get("phase", ""), "step": row["step"] - (at == 0), "time": row.get("time", 0.0)}
                added.append({"entry": entry, **place, name: value})
    return [*metrics, *added]


def _window(count: int) -> int:
    """Return how many neighbours are averaged in a curve of `count` values; few values are shown as they are."""
    return 1 if count < 12 else max(3, count // 10)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average. At the ends only the neighbours that exist are averaged."""
    half = _window(len(values)) // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def own_steps(lines: Sequence[Sequence[Series]], shift: Mapping[str, float]) -> tuple[list[list[Series]], str]:
    """Count lines that all belong to one phase (and its control) in that phase's steps; return the axis label too."""
    phases = {one.phase for same in lines for one in same if not is_control(one.phase)}
    back, label = 0.0, "step"
    if len(phases) == 1:
        (phase,) = phases
        back, label = shift[phase], f"{phase} step".strip()
    return [[replace(one, x=tuple(x - back for x in one.x)) for one in same] for same in lines], label


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- drawing -----------------------------------------------------------------------------------------------------------


def literal(text: str) -> str:
    """Make text from data safe for matplotlib: a dollar sign starts no formula, half a character is a question mark."""
    return text.encode("utf-8", "replace").decode().replace("$", r"\$")


def svg(figure: Figure) -> Markup:
    """Return the figure as an `<svg>` element for a page: transparent, colours and font from the page's CSS, no ids."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(len(figure.axes)), "path.simplify": True}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"([^>]*?) (?:height|width)="[^"]*"', r"\1\2", text, count=1)
    text = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    for name, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name})")
    return Markup(text.strip())


def _save(figure: Figure, png: str | Path) -> Path:
    path = Path(png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def draw_lines(
    ax: Axes, lines: Sequence[Sequence[Series]], shift: Mapping[str, float], theme: Theme, style: LineStyle = "average"
) -> None:
    """Draw one colour per metric: raw values faint, their moving average strong; the control dashed in its own colour.

    `lines` holds, per metric, its series in each phase; `shift` is where each phase starts (see `offsets`). Where a
    picture spans several phases their borders are marked.
    """
    shown, label = own_steps(lines, shift)
    for place, phases in enumerate(shown):
        for one in phases:
            tint, dash = theme.lines[place % len(theme.lines)], "-"
            if is_control(one.phase):
                tint, dash = theme.control, (0, (4, 2))  # type: ignore[assignment]
            if one.spread:
                low, high = one.spread
                ax.fill_between(one.x, low, high, color=tint, alpha=0.18, lw=0)
            if style == "exact":
                ax.plot(one.x, one.y, color=tint, lw=2.0, ls=dash)
            elif style == "points" or _window(len(one.y)) == 1:
                ax.plot(one.x, one.y, color=tint, lw=1.6, ls=dash, marker="o", ms=4.2, mew=0)
            else:
                if not one.spread:
                    ax.plot(one.x, one.y, color=tint, lw=0.8, alpha=0.28)
                ax.plot(one.x, smooth(one.y), color=tint, lw=2.0, ls=dash)
    _plain_axes(ax, theme, literal(label))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")  # an offset would cover the phases' names
    drawn = [one for phases in shown for one in phases]
    if all(one.name.endswith(("accuracy", "/wer", "/cer")) for one in drawn):
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if label != "step":
        return
    # A dotted line where a phase starts, and its name above the curve.
    left, right = ax.get_xlim()
    style_of_names: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "size": 9}
    for phase in dict.fromkeys(one.phase for one in drawn if not is_control(one.phase)):
        border = shift.get(phase, 0.0)
        if left < border < right:
            ax.axvline(border, color=theme.muted, lw=0.8, ls=(0, (1, 2)))
        ax.annotate(literal(phase), (max(border, left), 1), (3, 2), color=theme.muted, **style_of_names)
    ax.set_xlim(left, right)


def _plain_axes(ax: Axes, theme: Theme, x: str = "", y: str = "") -> None:
    """Horizontal grid lines only; whole steps; small grey numbers."""
    ax.grid(axis="y", color=theme.grid, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(theme.grid)
    ax.tick_params(colors=theme.muted, labelsize=9, length=0, pad=4)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.margins(x=0.02)
    low, high = ax.get_ylim()
    if 0 <= low < 0.25 * high:
        ax.set_ylim(0, high)
    ax.set_xlabel(x, color=theme.muted, size=9, loc="right", labelpad=1)
    ax.set_ylabel(y, color=theme.muted, size=9, loc="top", labelpad=2)


def draw_bars(ax: Axes, bars: Sequence[Measure], metric: str, theme: Theme) -> None:
    """Draw a horizontal bar per evaluation with its 95% interval and its value in words; bars of a set side by side."""
    bars = sorted(bars, key=lambda m: _split_entry(m.entry)[0])
    places = range(len(bars))
    ax.barh(places, [m.value for m in bars], color=[_entry_colour(m.entry, theme) for m in bars], height=0.56)
    ends = [0.0, *(x for m in bars for x in (m.value, m.low, m.high) if x is not None)]
    left, right = min(ends), max(ends)
    width = right - left or 1.0
    for place, m in zip(places, bars, strict=True):
        end = max(m.value, 0.0)  # in words to the right of the bar, also of one that goes from 0 to the left
        if m.low is not None and m.high is not None:
            ax.plot([m.low, m.high], [place, place], color=theme.ink, lw=1.4, solid_capstyle="butt")
            for x in (m.low, m.high):
                ax.plot([x, x], [place - 0.11, place + 0.11], color=theme.ink, lw=1.4)
            end = max(end, m.high)
        ax.text(end + 0.025 * width, place, show(m.value, metric), va="center", color=theme.ink, weight="bold", size=11)
    ax.set_yticks(list(places), [literal(_label(m.entry)) for m in bars], color=theme.ink, size=10.5)
    ax.set_ylim(len(bars) - 0.45, -0.55)
    ax.set_xlim(left, right + 0.22 * width)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.axvline(0, color=theme.muted, lw=0.8, clip_on=False)


def draw_histogram(ax: Axes, values: NDArray[np.float64], theme: Theme, bins: int = 20) -> None:
    """Draw how often each of at most `bins` values occurs, or of as many ranges of them."""
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) > bins:
        counts, edges = np.histogram(values, bins)
        distinct = (edges[1:] + edges[:-1]) / 2
    ax.bar(distinct, counts, width=0.9 * (float(np.ptp(values)) or 1.0) / bins, color=theme.lines[0])
    _plain_axes(ax, theme)
    ax.xaxis.set_major_locator(MaxNLocator(6))


def draw_tradeoff(ax: Axes, points: Sequence[Point], theme: Theme, quality: str = "chrF") -> None:
    """Draw latency to the right, quality upwards, every point labelled; joined are wait-k's, and those of the trained
    policy before and after, for unseen speakers too."""
    ks = {p: re.fullmatch(r"wait-?(?:k\D*)?(\d+)", p.entry) for p in points}
    waits = sorted(((int(match[1]), p) for p, match in ks.items() if match), key=lambda pair: pair[0])
    trained = [p for p in points if p.entry.startswith(("before", "stage", "after"))]
    unseen = [p for p in points if p.entry.startswith(f"{UNSEEN}_")]
    dotted, first, second = (0, (1, 2)), theme.lines[0], theme.lines[1]
    lines: list[tuple[list[Point], str, Any]] = [([p for _, p in waits], theme.muted, "-"), (trained, first, dotted)]
    for line, tint, dash in [*lines, (unseen, second, dotted)] if unseen else lines:
        ax.plot([p.latency for p in line], [p.quality for p in line], color=tint, lw=1.2, ls=dash, zorder=1)
    for p in points:
        strong = p.entry in ("before", "after")
        tint = _entry_colour(p.entry, theme) if p in trained else second if p in unseen else theme.muted
        ax.plot([p.latency], [p.quality], "o", color=tint, ms=9 if strong else 6, mew=0, zorder=2)
    _plain_axes(ax, theme, "LAAL (s)", quality)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.margins(x=0.08, y=0.12)
    _label_points(ax, points, theme)


_PLACES = ((8, 0), (-8, 0), (8, 10), (8, -10), (-8, 10), (-8, -10), (8, -20), (8, 20))
"""Where a label may stand: points to the right and up."""


def _label_points(ax: Axes, points: Sequence[Point], theme: Theme) -> None:
    """Put each label where it covers no other label, is not cut off, and hides the fewest points."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # now the axes have their size
    centres = [ax.transData.transform((p.latency, p.quality)) for p in points]
    marks = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    labels: list[BboxBase] = []
    inside = ax.get_window_extent()
    for p in points:
        weight = "bold" if p.entry in ("before", "after") else "normal"
        style: dict[str, Any] = {"va": "center", "color": theme.ink, "size": 10, "weight": weight}
        at, words = (p.latency, p.quality), literal(_label(p.entry))
        label = ax.annotate(words, at, _PLACES[0], textcoords="offset points", **style)

        def cost(place: tuple[int, int], label: Annotation = label) -> float:
            label.set(position=place, horizontalalignment="left" if place[0] > 0 else "right")
            box = label.get_window_extent()
            cut_off = box.x0 < inside.x0 or box.x1 > inside.x1
            return box.count_overlaps(marks) + 5 * box.count_overlaps(labels) + 20 * cut_off

        cost(min(_PLACES, key=cost))  # moves it there
        labels.append(label.get_window_extent())


def _entry_colour(entry: str, theme: Theme) -> str:
    """After stands out; what it is measured against stays back."""
    tints = {"after": theme.lines[0], "before": theme.before, "control": theme.control}
    return tints.get(_split_entry(entry)[1], theme.lines[2])


def _split_entry(entry: str) -> tuple[str, str]:
    """(set, moment) of an evaluation such as `unseen_after`; the set of held-out samples is ""."""
    name, _, moment = entry.rpartition("_")
    return (name, moment) if moment in ("before", "after", "control") or moment.startswith("after ") else ("", entry)


def _label(entry: str) -> str:
    return ": ".join(filter(None, _split_entry(entry)))


# -- pictures of benchmarks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassCurve:
    """pass@k of a model at some k, with 95 % intervals; made by `audiorl eval passk`."""

    name: str
    ks: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def draw_passk(ax: Axes, curves: Sequence[PassCurve], theme: Theme) -> None:
    """Draw k to the right on a logarithmic axis, pass@k upwards, its interval as a band; the first curve is grey."""
    colours = (theme.before, *theme.lines)
    for place, curve in enumerate(curves):
        colour = colours[place % len(colours)] if len(curves) > 1 else theme.lines[0]
        ax.fill_between(curve.ks, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
        ax.plot(curve.ks, curve.mean, color=colour, lw=2, marker="o", ms=5, mew=0, label=literal(curve.name))
    limits = ax.get_ylim()
    _plain_axes(ax, theme, "k", "pass@k")
    ax.set_ylim(limits)
    ax.set_xscale("log", base=2)
    ax.set_xticks(curves[0].ks, [str(k) for k in curves[0].ks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.legend(frameon=False, fontsize=9.5, loc="best", labelcolor=theme.ink)


def plot_passk(curves: Sequence[PassCurve], png: str | Path) -> Path:
    """Write pass@k of several models over k as a PNG for a README."""
    figure = Figure(figsize=(6.4, 4.0), dpi=200, facecolor="white", layout="constrained")
    draw_passk(figure.subplots(), curves, LIGHT)
    return _save(figure, png)


def read_tradeoff(folder: str | Path, quality: str, latency: str) -> list[tuple[float, float]]:
    """Return (latency in seconds, quality) of a folder with scores.json, or of its subfolders that have one, sorted.

    `quality` and `latency` are keys of scores.json; latencies are ms there. Raises ValueError naming file and field.
    """
    points = []
    for path in _score_files(folder):
        scores = read_json_object(path) or {}
        if scores.get("source_type") == "text":
            raise ValueError(f"{path}: source_type: text; its latencies are words, not seconds; plot speech sources")
        for key in (latency, quality):
            if not _is_number(scores.get(key)) or not math.isfinite(scores[key]):
                raise ValueError(
                    f"{path}: {key}: {scores.get(key)!r}; score the folder with it, or plot another metric"
                )
        points.append((scores[latency] / 1000, float(scores[quality])))
    return sorted(points)


def _score_files(folder: str | Path) -> list[Path]:
    found = [*Path(folder).glob(SCORES), *sorted(Path(folder).glob(f"*/{SCORES}"))]
    if not found:
        raise ValueError(f"{folder}: no {SCORES} there or one folder below; score it first (--score {folder})")
    return found[:1] if found[0].parent == Path(folder) else found


def plot_tradeoff(folders: Sequence[str | Path], png: str | Path) -> Path:
    """Write a PNG: latency in seconds to the right, chrF upwards, a labelled point or line per folder.

    Latency is StreamLAAL where every scored folder has it, else LAAL. Written sources have no seconds: their scores are
    refused. Raises ValueError naming file and field.
    """
    if not folders:
        raise ValueError("give the folders to plot: --plot OUT.png DIR DIR …")
    scored = [read_json_object(path) or {} for folder in folders for path in _score_files(folder)]
    latency = "StreamLAAL" if all("StreamLAAL" in scores for scores in scored) else "LAAL"
    figure = Figure(figsize=(6.4, 4.2), dpi=200, facecolor="white", layout="constrained")
    ax = figure.subplots()
    for place, folder in enumerate(folders):
        curve, colour = read_tradeoff(folder, "chrF", latency), LIGHT.lines[place % len(LIGHT.lines)]
        ax.plot(*zip(*curve, strict=True), color=colour, lw=1.8, marker="o", ms=6, mew=0)
        style: dict[str, Any] = {"color": colour, "size": 9.5, "weight": "bold"}
        ax.annotate(literal(Path(folder).resolve().name), curve[-1], (7, 3), textcoords="offset points", **style)
    limits = ax.get_ylim()
    _plain_axes(ax, LIGHT, f"{latency} (s)", "chrF")
    ax.set_ylim(limits)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.margins(x=0.16, y=0.16)
    return _save(figure, png)

"""Drawing with matplotlib: lines over steps, bars with intervals, and a figure as inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox, BboxBase

from audiorl.report.series import Series, is_control, own_steps, smooth, window
from audiorl.report.summary import Measure, Point, show
from audiorl.report.theme import VARIABLES, Theme
from audiorl.run.records import UNSEEN

# How a line is drawn: every step faint under a moving average, marked points, or as recorded.
Style = Literal["average", "points", "exact"]


def draw_lines(
    ax: Axes, lines: Sequence[Sequence[Series]], shift: Mapping[str, float], theme: Theme, *, style: Style = "average"
) -> None:
    """One colour per metric: raw values faint, their moving average strong; the control dashed in its own colour.

    `lines` holds, per metric, its series in each phase; `shift` is where each phase starts (see `series.offsets`).
    Where a picture spans several phases their borders are marked.
    """
    shown, label = own_steps(lines, shift)
    for place, phases in enumerate(shown):
        colour = theme.lines[place % len(theme.lines)]
        for one in phases:
            control = is_control(one.phase)
            tint, dash = (theme.control, (0, (4, 2))) if control else (colour, "-")
            if style == "exact":
                ax.plot(one.x, one.y, color=tint, lw=2.0, ls=dash)
            elif style == "points" or window(len(one.y)) == 1:
                ax.plot(one.x, one.y, color=tint, lw=1.6, ls=dash, marker="o", ms=4.2, mew=0)
            else:
                ax.plot(one.x, one.y, color=tint, lw=0.8, alpha=0.28)
                ax.plot(one.x, smooth(one.y), color=tint, lw=2.0, ls=dash)
    _plain_axes(ax, theme)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")  # an offset would cover the phases' names
    if all(one.name.endswith("accuracy") for phases in shown for one in phases):
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if label == "step":
        _mark_phases(ax, [one for phases in shown for one in phases], shift, theme)
    ax.set_xlabel(literal(label), color=theme.muted, size=9, loc="right", labelpad=1)


def draw_bars(ax: Axes, bars: Sequence[Measure], metric: str, theme: Theme) -> None:
    """One horizontal bar per evaluation with its 95% interval and its value in words; bars of a set side by side."""
    bars = sorted(bars, key=lambda m: split_entry(m.entry)[0])
    places = range(len(bars))
    tints = [bar_colour(m.entry, theme) for m in bars]
    ax.barh(places, [m.value for m in bars], color=tints, height=0.56)
    edge = max([m.value for m in bars] + [m.high for m in bars if m.high is not None], default=1.0) or 1.0
    for place, m in zip(places, bars, strict=True):
        end = m.value
        if m.low is not None and m.high is not None:
            ax.plot([m.low, m.high], [place, place], color=theme.ink, lw=1.4, solid_capstyle="butt")
            for x in (m.low, m.high):
                ax.plot([x, x], [place - 0.11, place + 0.11], color=theme.ink, lw=1.4)
            end = max(end, m.high)
        ax.text(end + 0.025 * edge, place, show(m.value, metric), va="center", color=theme.ink, weight="bold", size=11)
    ax.set_yticks(list(places), [literal(_label(m.entry)) for m in bars], color=theme.ink, size=10.5)
    ax.set_ylim(len(bars) - 0.45, -0.55)
    ax.set_xlim(0, edge * 1.22)
    ax.set_xticks([])
    ax.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)
    ax.spines["left"].set_color(theme.muted)


def draw_tradeoff(ax: Axes, points: Sequence[Point], theme: Theme, quality: str = "chrF") -> None:
    """Latency to the right, quality upwards, every point labelled; joined are wait-k's, and those of the trained policy
    before and after, for unseen speakers too."""
    waits = sorted((p for p in points if _wait(p.entry) is not None), key=lambda p: _wait(p.entry) or 0)
    trained = [p for p in points if p.entry.startswith(("before", "stage", "after"))]
    unseen = [p for p in points if p.entry.startswith(f"{UNSEEN}_")]
    dotted = (0, (1, 2))
    lines = [(waits, theme.muted, "-"), (trained, theme.lines[0], dotted)]
    for line, tint, dash in [*lines, (unseen, theme.lines[1], dotted)] if unseen else lines:
        ax.plot([p.latency for p in line], [p.quality for p in line], color=tint, lw=1.2, ls=dash, zorder=1)
    for p in points:
        strong = p.entry in ("before", "after")
        tint = bar_colour(p.entry, theme) if p in trained else theme.lines[1] if p in unseen else theme.muted
        ax.plot([p.latency], [p.quality], "o", color=tint, ms=9 if strong else 6, mew=0, zorder=2)
    _plain_axes(ax, theme)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.margins(x=0.08, y=0.12)
    ax.set_xlabel("LAAL (s)", color=theme.muted, size=9, loc="right", labelpad=1)
    ax.set_ylabel(quality, color=theme.muted, size=9, loc="top", labelpad=2)
    _label_points(ax, points, theme)


_PLACES: list[tuple[int, int, Literal["left", "right"]]] = [
    (8, 0, "left"),
    (-8, 0, "right"),
    (8, 10, "left"),
    (8, -10, "left"),
    (-8, 10, "right"),
    (-8, -10, "right"),
    (8, -20, "left"),
    (8, 20, "left"),
]
"""Where a label may stand: points to the right and up, and which end of it is there."""


def _label_points(ax: Axes, points: Sequence[Point], theme: Theme) -> None:
    """Each label where it covers no other label, is not cut off, and hides the fewest points."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # now the axes have their size
    centres = [ax.transData.transform((p.latency, p.quality)) for p in points]
    marks = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    labels: list[BboxBase] = []
    inside = ax.get_window_extent()
    for p in points:
        label = ax.annotate(
            literal(_label(p.entry)),
            (p.latency, p.quality),
            _PLACES[0][:2],
            textcoords="offset points",
            va="center",
            color=theme.ink,
            size=10,
            weight="bold" if p.entry in ("before", "after") else "normal",
        )
        boxes = []
        for x, y, end in _PLACES:
            label.set_position((x, y))
            label.set_horizontalalignment(end)
            box = label.get_window_extent()
            cut_off = box.x0 < inside.x0 or box.x1 > inside.x1
            boxes.append((box.count_overlaps(marks) + 5 * box.count_overlaps(labels) + 20 * cut_off, box))
        best = min(range(len(_PLACES)), key=lambda k: boxes[k][0])
        label.set_position(_PLACES[best][:2])
        label.set_horizontalalignment(_PLACES[best][2])
        labels.append(boxes[best][1])


def _wait(entry: str) -> int | None:
    """The k of wait-k."""
    match = re.fullmatch(r"wait-?(?:k\D*)?(\d+)", entry)
    return int(match[1]) if match else None


def bar_colour(entry: str, theme: Theme) -> str:
    """After stands out; what it is measured against stays back."""
    return {"after": theme.lines[0], "before": theme.before, "control": theme.control}.get(
        split_entry(entry)[1], theme.lines[2]
    )


def split_entry(entry: str) -> tuple[str, str]:
    """(set, moment) of an evaluation such as `unseen_after`; the set of held-out rows is ""."""
    name, _, moment = entry.rpartition("_")
    return (name, moment) if moment in ("before", "after", "control") or moment.startswith("after ") else ("", entry)


def _label(entry: str) -> str:
    name, moment = split_entry(entry)
    return f"{name}: {moment}" if name else moment


def literal(text: str) -> str:
    """Text from data, for matplotlib: a dollar sign starts no formula, and half a character is a question mark."""
    return text.encode("utf-8", "replace").decode().replace("$", r"\$")


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page: transparent, colours and font from the page's CSS, no ids shared."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(len(figure.axes)), "path.simplify": True}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"([^>]*?) (?:height|width)="[^"]*"', r"\1\2", text, count=1)
    text = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, variable)
    return text.strip()


def _mark_phases(ax: Axes, lines: Sequence[Series], shift: Mapping[str, float], theme: Theme) -> None:
    """A dotted line where a phase starts, and its name above the curve."""
    left, right = ax.get_xlim()
    for phase in dict.fromkeys(one.phase for one in lines if not is_control(one.phase)):
        border = shift.get(phase, 0.0)
        if left < border < right:
            ax.axvline(border, color=theme.muted, lw=0.8, ls=(0, (1, 2)))
        place = (max(border, left), 1)
        ax.annotate(
            literal(phase), place, (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points", size=9
        )
        ax.texts[-1].set_color(theme.muted)
    ax.set_xlim(left, right)


def _plain_axes(ax: Axes, theme: Theme) -> None:
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

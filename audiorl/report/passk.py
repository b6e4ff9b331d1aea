"""pass@k of several models over k, as a figure for a page and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from audiorl.report.figures import literal
from audiorl.report.theme import LIGHT, Theme


@dataclass(frozen=True)
class PassCurve:
    """pass@k of a model at some k, with 95 % intervals; made by `audiorl eval passk`."""

    name: str
    ks: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def draw_passk(ax: Axes, curves: Sequence[PassCurve], theme: Theme) -> None:
    """k to the right on a logarithmic axis, pass@k upwards with its interval as a band; the first curve is grey."""
    colours = (theme.before, *theme.lines)
    for place, curve in enumerate(curves):
        colour = colours[place % len(colours)] if len(curves) > 1 else theme.lines[0]
        ax.fill_between(curve.ks, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
        ax.plot(curve.ks, curve.mean, color=colour, lw=2, marker="o", ms=5, mew=0, label=literal(curve.name))
    ks = curves[0].ks
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks, [str(k) for k in ks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("k", color=theme.muted, size=9, loc="right", labelpad=1)
    ax.set_ylabel("pass@k", color=theme.muted, size=9, loc="top", labelpad=2)
    ax.grid(axis="y", color=theme.grid, lw=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=theme.muted, labelsize=9, length=0, pad=4)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(theme.grid)
    legend = ax.legend(frameon=False, fontsize=9.5, loc="best")
    for text in legend.get_texts():
        text.set_color(theme.ink)


def plot_passk(curves: Sequence[PassCurve], png: str | Path) -> Path:
    """Write a PNG for a README."""
    figure = Figure(figsize=(6.4, 4.0), dpi=200, facecolor="white", layout="constrained")
    draw_passk(figure.subplots(), curves, LIGHT)
    path = Path(png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path

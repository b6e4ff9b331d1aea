"""One picture of a run, for a README: what it reached, and how it got there."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from audiorl.report.figures import draw_bars, draw_lines, draw_tradeoff, literal
from audiorl.report.run import Run, load_run
from audiorl.report.series import offsets, series
from audiorl.report.summary import headline, measures, metric_name, points
from audiorl.report.theme import LIGHT


def plot(run_dir: str | Path, png_path: str | Path) -> Path:
    """See `audiorl.report.plot_result`. The evaluations of an interpreter are points of quality against latency."""
    run = load_run(run_dir)
    bars, places = measures(run.evals), points(run.evals)
    curves = [(title, name) for title, name in _CURVES if series(run.metrics, name)]
    columns = [2.3] * bool(bars) + [2.0] * len(curves)
    if not columns:
        raise ValueError(f"{run.path}: neither eval.json nor a reward curve to draw")

    figure = Figure(
        figsize=(1.9 * sum(columns), 3.1),
        dpi=200,
        facecolor="white",
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.06),
    )
    axes = list(figure.subplots(1, len(columns), width_ratios=columns, squeeze=False)[0])
    if bars:
        ax = axes.pop(0)
        metric = headline(run.evals) or ""
        sizes = {m.n for m in bars if m.n is not None}
        n = f", n = {sizes.pop()}" if len(sizes) == 1 else ""
        if len(places) > 1:
            draw_tradeoff(ax, places, LIGHT)
            _title(ax, f"Held-out quality against latency{n}")
        else:
            draw_bars(ax, bars, metric, LIGHT)
            _title(ax, f"Held-out {metric_name(metric)}{n}")
    for ax, (title, name) in zip(axes, curves, strict=True):
        _curve(ax, run, title, name)
    path = Path(png_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


_CURVES = (("Reward", "reward/mean"), ("Held-out accuracy", "eval/accuracy"), ("Held-out chrF", "eval/chrf"))


def _curve(ax: Axes, run: Run, title: str, name: str) -> None:
    draw_lines(
        ax,
        [series(run.metrics, name)],
        offsets(run.metrics),
        LIGHT,
        style="points" if name.startswith("eval/") else "average",
    )
    _title(ax, title)


def _title(ax: Axes, text: str) -> None:
    ax.set_title(literal(text), loc="left", color=LIGHT.ink, size=11, weight="bold", pad=14)

"""Quality against latency: one picture of several scored translators."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from audiorl.report.figures import literal
from audiorl.report.theme import LIGHT

PlotQuality = Literal["BLEU", "chrF", "Semantic", "COMET", "BLEURT"]

SCORES = "scores.json"


@dataclass(frozen=True)
class Curve:
    """A translator at one or several latencies, seconds against quality, fastest first."""

    name: str
    seconds: tuple[float, ...]
    quality: tuple[float, ...]


def read_curve(folder: str | Path, quality: str, latency: str) -> Curve:
    """The point of a folder with scores.json, or the line through its subfolders that have one.

    `quality` and `latency` are keys of scores.json; latencies are ms there. Raises ValueError naming file and field.
    """
    folder = Path(folder)
    files = [folder / SCORES] if (folder / SCORES).is_file() else sorted(folder.glob(f"*/{SCORES}"))
    if not files:
        raise ValueError(f"{folder}: no {SCORES} there or one folder below; score it first (--score {folder})")
    points = sorted((_value(path, latency) / 1000, _value(path, quality)) for path in files)
    seconds, values = zip(*points, strict=True)
    return Curve(folder.resolve().name, seconds, values)


def common_latency(folders: Sequence[str | Path]) -> str:
    """ "StreamLAAL" where every scored folder has it, else "LAAL"."""
    files = [p for folder in folders for p in (Path(folder) / SCORES, *Path(folder).glob(f"*/{SCORES}")) if p.is_file()]
    return "StreamLAAL" if files and all("StreamLAAL" in _scores(path) for path in files) else "LAAL"


def plot_tradeoff(
    folders: Sequence[str | Path],
    png: str | Path,
    *,
    quality: PlotQuality = "chrF",
    latency: str | None = None,
) -> Path:
    """Write a PNG: `latency` in seconds to the right, quality upwards, a labelled point or line per folder.

    Up and left is better. `latency` is `common_latency` unless given. Written sources have no seconds: their scores are
    refused. Raises ValueError naming file and field.
    """
    if not folders:
        raise ValueError("give the folders to plot: --plot OUT.png DIR DIR …")
    latency = latency or common_latency(folders)
    curves = [read_curve(folder, quality, latency) for folder in folders]
    figure = Figure(figsize=(6.4, 4.2), dpi=200, facecolor="white", layout="constrained")
    ax = figure.subplots()
    for place, curve in enumerate(curves):
        colour = LIGHT.lines[place % len(LIGHT.lines)]
        ax.plot(curve.seconds, curve.quality, color=colour, lw=1.8, marker="o", ms=6, mew=0)
        ax.annotate(
            literal(curve.name),
            (curve.seconds[-1], curve.quality[-1]),
            (7, 3),
            textcoords="offset points",
            color=colour,
            size=9.5,
            weight="bold",
        )
    ax.set_xlabel(f"{latency} (s)", color=LIGHT.muted)
    ax.set_ylabel(quality, color=LIGHT.muted)
    ax.grid(color=LIGHT.grid, lw=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=LIGHT.muted, labelsize=9, length=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(LIGHT.grid)
    ax.margins(x=0.16, y=0.16)
    path = Path(png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _scores(path: Path) -> dict[str, Any]:
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); score the folder again") from error
    if not isinstance(scores, dict):
        raise ValueError(f"{path}: expected a JSON object; score the folder again")
    return scores


def _value(path: Path, key: str) -> float:
    scores = _scores(path)
    if scores.get("source_type") == "text":
        raise ValueError(f"{path}: source_type: text; its latencies are words, not seconds; plot speech sources")
    value = scores.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{path}: {key}: {value!r}; score the folder with it, or plot another metric")
    return float(value)

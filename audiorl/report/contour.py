"""The melody and the level of a recording as a small SVG below its player."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.prosody import HOP_SECONDS, SILENT, prosody, voiced_f0
from audiorl.eval.metrics.speech import FRAME_SECONDS, frame_levels
from audiorl.report.summary import metric_name, show

CONTOUR_NOTE = (
    "Under each player: its pitch (line, 12 semitones up and down from the median) and its level (area, 30 dB)."
)
_WIDTH, _HEIGHT = 300, 48
_SEMITONES = 12.0  # from the middle to either edge, on every drawing, so that flat and lively look different


def contour(wav: NDArray[Any], sample_rate: int) -> str:
    """An SVG as wide as a player, from the recording's start to its end; "" for one without samples."""
    levels = frame_levels(wav, sample_rate)
    if not len(levels):
        return ""
    seconds = len(wav) / sample_rate
    parts = [_area(levels, seconds)]
    hertz = voiced_f0(wav, sample_rate)
    if not np.isnan(hertz).all():
        parts.append(_line(12 * np.log2(hertz / np.nanmedian(hertz)), seconds))
    measured = prosody(wav, sample_rate)
    title = "no voice"
    if measured is not None:
        values = (f"{metric_name(name)} {show(getattr(measured, name), name)}" for name in ("f0_range", "energy_range"))
        title = f"median {measured.f0_median:.0f} Hz, {', '.join(values)}"
    return (
        f"<svg class='contour' viewBox='0 0 {_WIDTH} {_HEIGHT}' preserveAspectRatio='none' role='img'>"
        f"<title>{title}</title>{''.join(parts)}</svg>"
    )


def _area(levels: NDArray[np.float64], seconds: float) -> str:
    """The level from `SILENT` dB below the loudest frame, the highest of the frames at each pixel."""
    columns = np.minimum(np.arange(len(levels)) * FRAME_SECONDS / seconds * _WIDTH, _WIDTH - 1).astype(int)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    heights = np.maximum.reduceat(levels, starts)
    loudest = heights.max()
    shares = np.clip(1 + (heights - loudest) / SILENT, 0, 1) if np.isfinite(loudest) else np.zeros(len(heights))
    edges = [*columns[starts], _WIDTH]
    path = "".join(
        f"V{_HEIGHT * (1 - share):.0f}H{end}" for share, end in zip(shares, (int(e) for e in edges[1:]), strict=True)
    )
    return f"<path d='M0 {_HEIGHT}{path}V{_HEIGHT}Z' fill='var(--grid)'/>"


def _line(semitones: NDArray[np.float64], seconds: float) -> str:
    """The pitch, at most one point a pixel; a new line begins after each pause."""
    x = np.arange(len(semitones)) * HOP_SECONDS / seconds * _WIDTH
    y = np.clip(_HEIGHT / 2 * (1 - semitones / _SEMITONES), 1, _HEIGHT - 1)
    step = max(len(semitones) // _WIDTH, 1)
    path, drawing = "", False
    for across, down in zip(x[::step], y[::step], strict=True):
        if np.isnan(down):
            drawing = False
            continue
        path += f"{'L' if drawing else 'M'}{across:.1f} {down:.1f}"
        drawing = True
    return (
        f"<path d='{path}' fill='none' stroke='var(--line0)' stroke-width='2' stroke-linecap='round' "
        "vector-effect='non-scaling-stroke'/>"
    )

"""Long speech made of pieces: is a joint heard in the level, and does the voice drift?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.f0 import yin

SIDE = 0.5
"""Seconds on either side of a joint whose levels are compared."""
QUIET = 1e-4
"""Root mean square below which there is no speech to compare (-80 dB of full scale)."""


def level_steps(before: NDArray[Any], after: NDArray[Any], rate: int) -> list[float]:
    """|difference| in dB of the root mean squares of the last and first `SIDE` s that are not silent.

    Silent samples at the end of `before` and at the start of `after` are skipped. Empty where a side has less than
    half of `SIDE` left.
    """
    side = round(SIDE * rate)
    sides = (_speech(before)[-side:], _speech(after)[:side])
    if min(map(len, sides)) < side / 2:
        return []
    a, b = (float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) for x in sides)
    return [abs(20 * float(np.log10(a / b)))] if min(a, b) >= QUIET else []


def pitch_steps(before: NDArray[Any], after: NDArray[Any], rate: int) -> list[float]:
    """|difference| in semitones of the median F0 of the last and first `SIDE` s that are not silent, by `f0.yin`.

    F0 between 65 and 500 Hz. Empty where a side has less than half of `SIDE` left, or less than 0.1 s of voice.
    """
    side = round(SIDE * rate)
    medians = []
    for wav in (_speech(before)[-side:], _speech(after)[:side]):
        if len(wav) < side / 2:
            return []
        f0 = yin(wav, rate)
        voiced = f0[~np.isnan(f0)]
        if len(voiced) < 10:
            return []
        medians.append(float(np.median(voiced)))
    return [abs(12 * float(np.log2(medians[1] / medians[0])))]


def _speech(wav: NDArray[Any]) -> NDArray[Any]:
    """Without the silence at both ends."""
    (loud,) = np.nonzero(np.abs(wav) > 10 * QUIET)
    return wav[loud[0] : loud[-1] + 1] if len(loud) else wav[:0]


def slope_per_minute(values: Sequence[float], seconds: Sequence[float]) -> float:
    """The change of a value per minute by least squares; NaN for fewer than three values or one time."""
    x, y = np.asarray(seconds, np.float64) / 60, np.asarray(values, np.float64)
    if len(x) != len(y):
        raise ValueError(f"slope_per_minute: {len(y)} values at {len(x)} times")
    if len(x) < 3 or np.ptp(x) == 0:
        return float("nan")
    return float(np.polyfit(x, y, 1)[0])

"""How lively speech is: the ranges of its pitch and of its level, and its pauses. Mono [T] floats.

Rewards of intelligibility alone make speech monotone (arXiv 2509.18531): no error rate sees the melody go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.f0 import HOP_SECONDS, yin
from audiorl.eval.metrics.speech import FRAME_SECONDS, frame_levels

SILENT = 30.0
"""A 25 ms frame so many dB below the loudest of the recording is silent."""
QUIETEST = -80.0
"""dB of the loudest frame below which all is silent."""
PAUSE_SECONDS = 0.15
"""Shorter silence belongs to a sound: before a p, t or k the mouth is closed for about 0.1 s."""
LEAST_VOICE = 0.1
"""Seconds of voice without which there is no range of the pitch."""
MEASURES = ("f0_range", "energy_range", "pauses")
"""The fields of `Prosody` that rewards compare and evaluations show."""


@dataclass(frozen=True)
class Prosody:
    """The measures of one recording. Ranges are those between the 5th and the 95th percentile."""

    f0_range: float
    """Range of the F0 of voiced frames, in semitones."""
    f0_deviation: float
    """Standard deviation of the same, in semitones."""
    f0_median: float
    """Hz."""
    voiced: float
    """Share of the time between the first and the last sound that has voice."""
    energy_range: float
    """Range of the levels of the 25 ms frames that are not silent, in dB."""
    pauses: float
    """Share of the time between the first and the last sound that lies in pauses of at least 0.15 s."""
    pause_count: int
    """How many such pauses there are."""


def prosody(
    wav: NDArray[Any], sample_rate: int, f0: Callable[[NDArray[Any], int], NDArray[np.float64]] = yin
) -> Prosody | None:
    """The measures of a recording; None for silence and for less than 0.1 s of voice.

    They do not change with the recording's level. `f0`: `f0.yin` or `f0.pyin`. Raises ValueError for samples that are
    not finite.
    """
    levels = frame_levels(wav, sample_rate)
    (sounding,) = np.nonzero(levels >= max(levels.max(initial=-np.inf) - SILENT, QUIETEST))
    if not len(sounding):
        return None
    hertz = voiced_f0(wav, sample_rate, f0)
    hertz = hertz[~np.isnan(hertz)]
    if len(hertz) * HOP_SECONDS < LEAST_VOICE:
        return None
    semitones = 12 * np.log2(hertz)
    gaps = np.diff(sounding) - 1
    pauses = gaps[gaps * FRAME_SECONDS >= PAUSE_SECONDS - 1e-9]
    frames = int(sounding[-1] - sounding[0]) + 1
    return Prosody(
        f0_range=_range(semitones),
        f0_deviation=float(semitones.std()),
        f0_median=float(np.median(hertz)),
        voiced=min(len(hertz) * HOP_SECONDS / (frames * FRAME_SECONDS), 1.0),
        energy_range=_range(levels[sounding]),
        pauses=float(pauses.sum()) / frames,
        pause_count=len(pauses),
    )


def voiced_f0(
    wav: NDArray[Any], sample_rate: int, f0: Callable[[NDArray[Any], int], NDArray[np.float64]] = yin
) -> NDArray[np.float64]:
    """F0 in Hz every 10 ms, NaN where there is no voice, in silence and where the pitch cannot be this speaker's.

    A speaker's pitch lies between 0.6 times the first and 2 times the third quartile, which leaves out frames that are
    an octave off: the idea of Hirst (De Looze and Hirst 2008), whose 0.75 and 1.5 would also cut off wild melodies.
    """
    hertz = f0(wav, sample_rate)
    levels = frame_levels(wav, sample_rate)
    frames = np.minimum((np.arange(len(hertz)) * HOP_SECONDS / FRAME_SECONDS).astype(int), len(levels) - 1)
    if not len(hertz):
        return hertz
    loud = levels[frames] >= max(levels.max() - SILENT, QUIETEST)
    hertz = np.where(loud, hertz, np.nan)
    voiced = hertz[~np.isnan(hertz)]
    if not len(voiced):
        return hertz
    low, high = np.percentile(voiced, [25, 75])
    return np.where((hertz >= 0.6 * low) & (hertz <= 2 * high), hertz, np.nan)


def _range(values: NDArray[np.float64]) -> float:
    low, high = np.percentile(values, [5, 95])
    return float(high - low)

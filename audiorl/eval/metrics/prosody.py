"""How lively speech is: the ranges of its pitch and of its level, its pauses, and how smoothly its pieces are joined.

Rewards of intelligibility alone make speech monotone (arXiv 2509.18531): no error rate sees the melody go.

Waveforms are mono float [T]. F0, the fundamental frequency, comes every 10 ms in Hz [N], NaN where there is no voice;
value i belongs to the time i · `HOP_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from audiorl.eval.metrics.speech import FRAME_SECONDS, frame_levels

# -- F0 ----------------------------------------------------------------------------------------------------------------


LOWEST, HIGHEST = 65, 500
"""Hz between which F0 is searched."""
HOP_SECONDS = 0.01

_RATE = 8000  # of YIN, in Hz
_HOP = round(HOP_SECONDS * _RATE)
_WINDOW = 200  # samples that are compared with later ones: 25 ms
_SHORTEST, _LONGEST = _RATE // HIGHEST, -(-_RATE // LOWEST)  # periods, in samples
_CENTRE = (_WINDOW + 50) // 2  # of a window and its copy 50 samples later, a period of 160 Hz
_APERIODIC = 0.3  # normalised difference from which a frame has no voice
_NEAR = 0.05  # a shorter period is preferred to twice its length where its difference is at most so much greater
_JUMP = 2.0  # semitones between neighbouring frames that part two runs of voice
_SHORTEST_RUN = 5  # frames
_BLOCK = 2000  # frames at a time, which bounds the memory


def yin(wav: NDArray[Any], sample_rate: int) -> NDArray[np.float64]:
    """Find F0 by YIN at 8 kHz; voice is periodic for 50 ms without a jump of more than 2 semitones.

    Source: de Cheveigné and Kawahara 2002, with the shortest of almost equally good periods instead of their absolute
    threshold.
    """
    wav = np.asarray(wav, np.float64)
    if not len(wav):
        return np.zeros(0)
    wav = wav if sample_rate == _RATE else soxr.resample(wav, sample_rate, _RATE)
    length = _WINDOW + _LONGEST + 1
    padded = np.pad(wav - wav.mean(), (_CENTRE, length))
    frames = np.lib.stride_tricks.sliding_window_view(padded, length)[::_HOP][: len(wav) // _HOP + 1]
    f0 = np.concatenate([_frame_f0(frames[i : i + _BLOCK]) for i in range(0, len(frames), _BLOCK)])
    return _long_runs(f0)


def _frame_f0(frames: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Hz of each frame [N, window + longest period + 1]; NaN where it is not periodic."""
    difference = _normalised_difference(frames)
    inner = difference[:, _SHORTEST : _LONGEST + 1]
    before, after = difference[:, _SHORTEST - 1 : _LONGEST], difference[:, _SHORTEST + 1 : _LONGEST + 2]
    minima = np.where((inner <= before) & (inner < after), inner, np.inf)
    best = minima.min(axis=1)
    periods = np.argmax(minima <= (best + _NEAR)[:, None], axis=1)
    rows = np.arange(len(frames))
    a, b, c = before[rows, periods], inner[rows, periods], after[rows, periods]
    curvature = a - 2 * b + c  # of the parabola through three values, whose minimum is the period
    shift = np.where(curvature > 1e-12, (a - c) / (2 * np.maximum(curvature, 1e-12)), 0.0)
    f0 = _RATE / (_SHORTEST + periods + shift)
    return np.where((best < _APERIODIC) & (f0 >= LOWEST) & (f0 <= HIGHEST), f0, np.nan)


def _normalised_difference(frames: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return YIN's d'(τ), [N, longest period + 2] for τ from 0: the difference over its mean up to τ."""
    size = 1 << (frames.shape[1] + _WINDOW).bit_length()
    spectrum = np.fft.rfft(frames, size) * np.conj(np.fft.rfft(frames[:, :_WINDOW], size))
    correlation = np.fft.irfft(spectrum, size)[:, : _LONGEST + 2]
    sums = np.concatenate([np.zeros((len(frames), 1)), np.cumsum(frames**2, axis=1)], axis=1)
    energy = sums[:, _WINDOW : _WINDOW + _LONGEST + 2] - sums[:, : _LONGEST + 2]
    difference = np.maximum(energy[:, :1] + energy - 2 * correlation, 0.0)[:, 1:]
    total = np.maximum(np.cumsum(difference, axis=1), 1e-12)
    normalised = difference * np.arange(1, _LONGEST + 2) / total
    # Silence differs from itself by nothing, which is no period.
    normalised[energy[:, 0] < _WINDOW * 1e-10] = 1.0
    return np.concatenate([np.ones((len(frames), 1)), normalised], axis=1)


def _long_runs(f0: NDArray[np.float64]) -> NDArray[np.float64]:
    """Drop runs of voice that are too short; a jump of the pitch ends a run."""
    with np.errstate(invalid="ignore"):
        parted = ~(np.abs(np.diff(12 * np.log2(f0))) <= _JUMP)  # also where one of both is NaN
    bounds = np.flatnonzero(np.concatenate([[True], parted, [True]]))
    lengths = np.diff(bounds)
    return np.where(np.repeat(lengths, lengths) >= _SHORTEST_RUN, f0, np.nan)


# -- range and pauses --------------------------------------------------------------------------------------------------


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


def prosody(wav: NDArray[Any], sample_rate: int) -> Prosody | None:
    """Measure a recording; None for silence and for less than 0.1 s of voice.

    The measures do not change with the recording's level. Raises ValueError for samples that are not finite.
    """
    levels = frame_levels(wav, sample_rate)
    (sounding,) = np.nonzero(levels >= max(levels.max(initial=-np.inf) - SILENT, QUIETEST))
    if not len(sounding):
        return None
    hertz = voiced_f0(wav, sample_rate)
    hertz = hertz[~np.isnan(hertz)]
    if len(hertz) * HOP_SECONDS < LEAST_VOICE:
        return None
    semitones = 12 * np.log2(hertz)
    gaps = np.diff(sounding) - 1
    pauses = gaps[gaps * FRAME_SECONDS >= PAUSE_SECONDS - 1e-9]
    frames = int(sounding[-1] - sounding[0]) + 1
    return Prosody(
        f0_range=float(np.ptp(np.percentile(semitones, [5, 95]))),
        f0_deviation=float(semitones.std()),
        f0_median=float(np.median(hertz)),
        voiced=min(len(hertz) * HOP_SECONDS / (frames * FRAME_SECONDS), 1.0),
        energy_range=float(np.ptp(np.percentile(levels[sounding], [5, 95]))),
        pauses=float(pauses.sum()) / frames,
        pause_count=len(pauses),
    )


def voiced_f0(wav: NDArray[Any], sample_rate: int) -> NDArray[np.float64]:
    """Find F0 in Hz every 10 ms, NaN where there is no voice, in silence and where the pitch is not this speaker's.

    A speaker's pitch lies between 0.6 times the first and 2 times the third quartile, which leaves out frames that are
    an octave off: the idea of Hirst (De Looze and Hirst 2008), whose 0.75 and 1.5 would also cut off wild melodies.
    """
    hertz = yin(wav, sample_rate)
    if not len(hertz):
        return hertz
    levels = frame_levels(wav, sample_rate)
    frames = np.minimum((np.arange(len(hertz)) * HOP_SECONDS / FRAME_SECONDS).astype(int), len(levels) - 1)
    hertz = np.where(levels[frames] >= max(levels.max() - SILENT, QUIETEST), hertz, np.nan)
    if np.isnan(hertz).all():
        return hertz
    low, high = np.nanpercentile(hertz, [25, 75])
    return np.where((hertz >= 0.6 * low) & (hertz <= 2 * high), hertz, np.nan)


# -- pieces of long speech ---------------------------------------------------------------------------------------------


SIDE = 0.5
"""Seconds on either side of a joint that are compared."""
QUIET = 1e-4
"""Root mean square below which there is no speech to compare (-80 dB of full scale)."""


def level_steps(before: NDArray[Any], after: NDArray[Any], rate: int) -> list[float]:
    """Return [|difference|] in dB of the root mean squares of the two sides of a joint; [] without speech on a side."""
    levels = [float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) for x in _sides(before, after, rate)]
    return [abs(20 * float(np.log10(levels[0] / levels[1])))] if min(levels, default=0) >= QUIET else []


def pitch_steps(before: NDArray[Any], after: NDArray[Any], rate: int) -> list[float]:
    """Return [|difference|] in semitones of the median F0 of the two sides of a joint; [] without voice on a side."""
    voiced = [f0[~np.isnan(f0)] for f0 in (yin(wav, rate) for wav in _sides(before, after, rate))]
    if min(map(len, voiced), default=0) < 10:
        return []
    a, b = map(np.median, voiced)
    return [abs(12 * float(np.log2(b / a)))]


def _sides(before: NDArray[Any], after: NDArray[Any], rate: int) -> tuple[NDArray[Any], ...]:
    """Return the last and the first `SIDE` s without the silence between; () where a side has less than half of it."""
    side = round(SIDE * rate)
    spoken = []
    for wav in (before, after):
        (loud,) = np.nonzero(np.abs(wav) > 10 * QUIET)
        spoken.append(wav[loud[0] : loud[-1] + 1] if len(loud) else wav[:0])
    sides = (spoken[0][-side:], spoken[1][:side])
    return () if min(map(len, sides)) < side / 2 else sides


def slope_per_minute(values: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the change of a value per minute by least squares; NaN for fewer than three values or one time."""
    x, y = np.asarray(seconds, np.float64) / 60, np.asarray(values, np.float64)
    return float(np.polyfit(x, y, 1)[0]) if len(x) >= 3 and np.ptp(x) else float("nan")

"""The fundamental frequency (F0) of speech, every 10 ms: by YIN, or by librosa's slower pYIN.

Both take a mono float waveform [T] and give Hz [N], NaN where there is no voice; value i belongs to the time
i · `HOP_SECONDS`. F0 lies between 65 and 500 Hz. `bench/prosody.py` compares them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

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


def pyin(wav: NDArray[Any], sample_rate: int) -> NDArray[np.float64]:
    """F0 by librosa's pYIN. Raises ImportError without librosa. Source: Mauch and Dixon 2014."""
    try:
        import librosa
    except ImportError as error:
        raise ImportError("the pitch by pYIN needs librosa: pip install 'audiorl[speech]'") from error
    f0, _, _ = librosa.pyin(
        np.asarray(wav, np.float64),
        fmin=LOWEST,
        fmax=HIGHEST,
        sr=sample_rate,
        frame_length=1 << (sample_rate // 20).bit_length(),
        hop_length=sample_rate // 100,
    )
    return np.asarray(f0, np.float64)


def yin(wav: NDArray[Any], sample_rate: int) -> NDArray[np.float64]:
    """F0 by YIN at 8 kHz; a frame has voice where it is periodic, for 50 ms without a jump of more than 2 semitones.

    Source: de Cheveigné and Kawahara 2002, with the shortest of almost equally good periods in place of their absolute
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
    """Hz of each frame [N, window + longest period + 1]; NaN where it is not periodic."""
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
    """YIN's d'(τ), [N, longest period + 2] for τ from 0: the difference over its mean up to τ."""
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
    """Without runs of voice that are too short; a jump of the pitch ends a run."""
    with np.errstate(invalid="ignore"):
        parted = ~(np.abs(np.diff(12 * np.log2(f0))) <= _JUMP)  # also where one of both is NaN
    bounds = np.flatnonzero(np.concatenate([[True], parted, [True]]))
    lengths = np.diff(bounds)
    return np.where(np.repeat(lengths, lengths) >= _SHORTEST_RUN, f0, np.nan)

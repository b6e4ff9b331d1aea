"""Tones whose F0 is known, and human speech with its melody flattened or exaggerated."""

from __future__ import annotations

import numpy as np

from audiorl.eval.metrics.prosody import voiced_f0


def harmonics(hertz: np.ndarray, rate: int) -> np.ndarray:
    """Ten harmonics of an F0 given for each sample, as a voice has them, [T]."""
    phase = 2 * np.pi * np.cumsum(hertz) / rate
    return 0.05 * sum(np.sin(k * phase) / k for k in range(1, 11))


def glide(semitones: float, rate: int, seconds: float = 1.5, start: float = 110.0) -> np.ndarray:
    """A tone whose F0 rises steadily by so many semitones, [T]."""
    return harmonics(start * 2 ** (semitones / 12 * np.linspace(0, 1, round(seconds * rate))), rate)


def melody_scaled(wav: np.ndarray, rate: int, factor: float) -> np.ndarray:
    """The recording played faster and slower, so that its semitones from the median are `factor` times as many."""
    f0 = voiced_f0(wav, rate)
    (voiced,) = np.nonzero(~np.isnan(f0))
    semitones = 12 * np.log2(f0[voiced] / np.median(f0[voiced]))
    every = np.interp(np.arange(len(wav)) / rate * 100, voiced, semitones)
    times = np.cumsum(2 ** (-(factor - 1) * every / 12))  # when each sample is played
    return np.interp(np.arange(times[0], times[-1]), times, wav).astype(np.float32)

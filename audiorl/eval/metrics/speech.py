"""What a waveform is like on its own: how long, how loud, how silent, how clipped. Mono [T] in [-1, 1].

Nothing (T = 0) has a value everywhere: no length, infinitely quiet, wholly silent, not clipped.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRAME_SECONDS = 0.025


def seconds(wav: NDArray[Any], sample_rate: int) -> float:
    """Length in seconds."""
    return len(_checked(wav)) / sample_rate


def level(wav: NDArray[Any]) -> float:
    """Root mean square in dB, where a square wave of amplitude 1 has 0 dB; -inf for silence."""
    wav = _checked(wav)
    power = float(wav @ wav) / len(wav) if len(wav) else 0.0
    return 10.0 * math.log10(power) if power > 0 else -math.inf


def frame_levels(wav: NDArray[Any], sample_rate: int) -> NDArray[np.float64]:
    """`level` of each 25 ms, [ceil(T / 25 ms)]; the last frame may be shorter."""
    wav = _checked(wav)
    size = max(round(FRAME_SECONDS * sample_rate), 1)
    starts = np.arange(0, len(wav), size)
    if not len(starts):
        return np.zeros(0)
    power = np.add.reduceat(wav**2, starts) / np.diff(np.append(starts, len(wav)))
    with np.errstate(divide="ignore"):
        return 10.0 * np.log10(power)


def silent_share(wav: NDArray[Any], sample_rate: int, threshold: float = -50.0) -> float:
    """Share of 25 ms frames below `threshold` dB; 1 for nothing."""
    levels = frame_levels(wav, sample_rate)
    return float((levels < threshold).mean()) if len(levels) else 1.0


def speech_level(wav: NDArray[Any], sample_rate: int, threshold: float = -50.0) -> float:
    """The `level` of all frames that are not silent; -inf where all are."""
    levels = frame_levels(wav, sample_rate)
    speech = levels[levels >= threshold]
    return 10.0 * math.log10(float((10 ** (speech / 10)).mean())) if len(speech) else -math.inf


def clipped_share(wav: NDArray[Any], threshold: float = 0.999) -> float:
    """Share of samples that are at the limits, |x| >= `threshold`; 0 for nothing."""
    wav = _checked(wav)
    return float((np.abs(wav) >= threshold).mean()) if len(wav) else 0.0


def duration_ratio(duration: float, reference: float) -> float:
    """min / max of two lengths in seconds, in [0, 1]: 1 for equal, 0.5 for half or double, 0 where only one is 0.

    Two lengths of 0 are equal, which is 1.
    """
    if not (math.isfinite(duration) and math.isfinite(reference) and duration >= 0 and reference >= 0):
        raise ValueError(f"durations must be at least 0 s, got {duration} and {reference}")
    longer = max(duration, reference)
    return min(duration, reference) / longer if longer else 1.0


def real_time_factor(compute_seconds: float, audio_seconds: float) -> float:
    """Seconds of computing per second of audio; below 1 is faster than real time. Source: the usual definition."""
    if not audio_seconds > 0:
        raise ValueError(f"real_time_factor: {audio_seconds} s of audio")
    return compute_seconds / audio_seconds


def _checked(wav: NDArray[Any]) -> NDArray[np.float64]:
    wav = np.asarray(wav)
    if wav.ndim != 1 or wav.dtype.kind != "f":
        raise ValueError(f"samples: {wav.dtype} of shape {wav.shape}; give mono floats [T] in [-1, 1]")
    if not np.isfinite(wav).all():
        raise ValueError(f"samples: {int(np.count_nonzero(~np.isfinite(wav)))} of {len(wav)} are NaN or infinite")
    return wav.astype(np.float64)

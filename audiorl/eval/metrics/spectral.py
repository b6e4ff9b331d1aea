"""How far a reconstructed waveform is from the original: spectral distances and SI-SDR, in float64.

Both waveforms are mono [T] at one rate, aligned and of equal length; cut the tail that a codec's last frame adds. Lower
is better for the distances, higher for SI-SDR.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SI_SDR_RANGE = (-80.0, 120.0)
"""dB between which SI-SDR is kept, so that silence and a perfect copy have a value that can be averaged."""


def stft_distance(
    reference: NDArray[Any], estimate: NDArray[Any], windows: Sequence[int] = (2048, 512), floor: float = 1e-5
) -> float:
    """Multi-scale STFT distance: Σ over windows of mean|log10 X² - log10 Y²| + mean|X - Y|.

    X, Y: magnitudes of the STFT, raised to at least `floor` inside the logarithm. Periodic Hann window of each length,
    a hop of a quarter of it, frames centred on reflected edges, no normalisation; means over frames and bins.
    Source: MultiScaleSTFTLoss as Kumar et al. 2023 (DAC, arXiv 2306.06546) evaluate with its defaults.
    """
    x, y = aligned(reference, estimate)
    return sum(_distance(magnitudes(x, w), magnitudes(y, w), floor) for w in windows)


def mel_distance(
    reference: NDArray[Any],
    estimate: NDArray[Any],
    sample_rate: int,
    windows: Sequence[int] = (2048, 512),
    bands: Sequence[int] = (150, 80),
    floor: float = 1e-5,
) -> float:
    """`stft_distance` on mel spectra: `bands[i]` bands from 0 Hz to half the rate for `windows[i]`.

    The filters (`mel_filters`) weigh magnitudes, not powers. Source: MelSpectrogramLoss as Kumar et al. 2023 (DAC)
    evaluate with its defaults; with which DAC was trained is another configuration.
    """
    if len(windows) != len(bands):
        raise ValueError(f"mel_distance: {len(windows)} windows but {len(bands)} numbers of bands")
    x, y = aligned(reference, estimate)
    total = 0.0
    for window, count in zip(windows, bands, strict=True):
        filters = mel_filters(sample_rate, window, count)
        total += _distance(magnitudes(x, window) @ filters.T, magnitudes(y, window) @ filters.T, floor)
    return total


def si_sdr(reference: NDArray[Any], estimate: NDArray[Any]) -> float:
    """Scale-invariant signal-to-distortion ratio in dB, means removed, kept within SI_SDR_RANGE.

    10·log10(|αs|² / |αs - ŝ|²) with α = ŝ·s / s·s. NaN for a constant reference, which has no signal to find again.
    Source: Le Roux et al. 2019, "SDR: half-baked or well done?".
    """
    x, y = aligned(reference, estimate)
    x, y = x - x.mean(), y - y.mean()
    power = float(x @ x)
    if power <= 1e-20 * len(x):
        return math.nan
    target = (float(y @ x) / power) * x
    signal, noise = float(target @ target), float((y - target) @ (y - target))
    low, high = SI_SDR_RANGE
    if signal <= 0.0:
        return low
    return high if noise <= 0.0 else min(max(10.0 * math.log10(signal / noise), low), high)


def magnitudes(wav: Array, window: int) -> Array:
    """|STFT| [frames, window // 2 + 1] with a hop of window // 4, frames centred on reflected edges."""
    padded = np.pad(wav, window // 2, mode="reflect") if len(wav) > 1 else np.pad(wav, window // 2, mode="edge")
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[:: window // 4]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    return np.abs(np.fft.rfft(frames * hann, axis=-1))


@functools.lru_cache(maxsize=16)
def mel_filters(sample_rate: int, window: int, bands: int) -> Array:
    """Triangular filters [bands, window // 2 + 1] of unit area, equally spaced on Slaney's mel scale.

    The scale is linear up to 1000 Hz (15 mel) and logarithmic above. Source: Slaney 1998, Auditory Toolbox.
    """
    top = _to_mel(np.array([sample_rate / 2]))[0]
    corners = _from_mel(np.linspace(0.0, top, bands + 2))
    bins = np.fft.rfftfreq(window, 1 / sample_rate)
    low, centre, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


def aligned(reference: NDArray[Any], estimate: NDArray[Any]) -> tuple[Array, Array]:
    """Both waveforms as float64, or a ValueError that says why they cannot be compared."""
    x, y = np.asarray(reference, dtype=np.float64), np.asarray(estimate, dtype=np.float64)
    for name, wav in (("reference", x), ("estimate", y)):
        if wav.ndim != 1 or not len(wav):
            raise ValueError(f"{name}: shape {wav.shape}; give mono samples [T], at least one")
        if not np.isfinite(wav).all():
            bad = int(np.count_nonzero(~np.isfinite(wav)))
            raise ValueError(f"{name}: {bad} of {len(wav)} samples are NaN or infinite")
    if len(x) != len(y):
        raise ValueError(f"reference has {len(x)} samples, estimate {len(y)}; cut or pad to equal length first")
    return x, y


def _distance(x: Array, y: Array, floor: float) -> float:
    logs = np.log10(np.maximum(x, floor) ** 2) - np.log10(np.maximum(y, floor) ** 2)
    return float(np.abs(logs).mean() + np.abs(x - y).mean())


def _to_mel(hertz: Array) -> Array:
    return np.where(hertz < 1000, hertz * 3 / 200, 15 + 27 * np.log(np.maximum(hertz, 1000) / 1000) / math.log(6.4))


def _from_mel(mel: Array) -> Array:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((np.maximum(mel, 15) - 15) * math.log(6.4) / 27))

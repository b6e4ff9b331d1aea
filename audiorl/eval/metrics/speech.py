"""Quality of speech: what a waveform is like on its own, how far it is from the original, and who speaks.

Waveforms are mono floats [T] in [-1, 1]. Two that are compared are aligned, at one rate and of equal length; cut the
tail that a codec's last frame adds. An empty waveform is infinitely quiet, silent and not clipped. All functions raise
ValueError for anything else.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from audiorl.errors import install

Array = NDArray[np.float64]

FRAME_SECONDS = 0.025
SI_SDR_RANGE = (-80.0, 120.0)
"""dB between which SI-SDR is kept: silence and a perfect copy have a value that can be averaged."""
PESQ_RATE = 16_000
PESQ_WORST = 1.0
"""PESQ of silence instead of speech, of which it says nothing; the worst that it gives otherwise is about 1.04."""
BANDS = {2048: 150, 512: 80}
"""Mel bands by the window of the STFT, in samples."""
_FLOOR = 1e-5  # of magnitudes inside a logarithm


def level(wav: NDArray[Any]) -> float:
    """Return the root mean square in dB, where a square wave of amplitude 1 has 0 dB; -inf for silence."""
    wav = _checked(wav)
    power = float(wav @ wav) / len(wav) if len(wav) else 0.0
    return 10.0 * math.log10(power) if power > 0 else -math.inf


def frame_levels(wav: NDArray[Any], sample_rate: int) -> Array:
    """Return the `level` of each 25 ms, [ceil(T / 25 ms)]; the last frame may be shorter."""
    wav = _checked(wav)
    size = max(round(FRAME_SECONDS * sample_rate), 1)
    starts = np.arange(0, len(wav), size)
    if not len(starts):
        return np.zeros(0)
    power = np.add.reduceat(wav**2, starts) / np.diff(np.append(starts, len(wav)))
    with np.errstate(divide="ignore"):
        return 10.0 * np.log10(power)


def silent_share(wav: NDArray[Any], sample_rate: int, threshold: float = -50.0) -> float:
    """Return the share of 25 ms frames below `threshold` dB; 1 for an empty waveform."""
    levels = frame_levels(wav, sample_rate)
    return float((levels < threshold).mean()) if len(levels) else 1.0


def clipped_share(wav: NDArray[Any], threshold: float = 0.999) -> float:
    """Return the share of samples that are at the limits, |x| >= `threshold`; 0 for an empty waveform."""
    wav = _checked(wav)
    return float((np.abs(wav) >= threshold).mean()) if len(wav) else 0.0


def duration_ratio(duration: float, reference: float) -> float:
    """Return min / max of two lengths in seconds, in [0, 1]: 1 for equal (or both 0), 0.5 for half or double."""
    if not (0 <= duration < math.inf and 0 <= reference < math.inf):
        raise ValueError(f"durations must be at least 0 s, got {duration} and {reference}")
    longer = max(duration, reference)
    return min(duration, reference) / longer if longer else 1.0


def real_time_factor(compute_seconds: float, audio_seconds: float) -> float:
    """Return seconds of computing per second of audio; below 1 is faster than real time."""
    if not audio_seconds > 0:
        raise ValueError(f"real_time_factor: {audio_seconds} s of audio")
    return compute_seconds / audio_seconds


def _checked(wav: NDArray[Any], name: str = "samples") -> Array:
    wav = np.asarray(wav)
    if wav.ndim != 1 or wav.dtype.kind != "f":
        raise ValueError(f"{name}: {wav.dtype} of shape {wav.shape}; give mono floats [T] in [-1, 1]")
    if not np.isfinite(wav).all():
        bad = int(np.count_nonzero(~np.isfinite(wav)))
        raise ValueError(f"{name}: {bad} of {len(wav)} samples are NaN or infinite")
    return wav.astype(np.float64)


def _aligned(reference: NDArray[Any], estimate: NDArray[Any]) -> tuple[Array, Array]:
    """Return both waveforms as float64."""
    x, y = _checked(reference, "reference"), _checked(estimate, "estimate")
    if len(x) != len(y) or not len(x):
        raise ValueError(f"reference has {len(x)} samples, estimate {len(y)}; cut or pad to equal length first")
    return x, y


# -- spectral distances and SI-SDR, in float64 -------------------------------------------------------------------------


def stft_distance(reference: NDArray[Any], estimate: NDArray[Any]) -> float:
    """Return the multi-scale STFT distance: Σ over windows of mean|log10 X² - log10 Y²| + mean|X - Y|.

    X, Y: magnitudes of the STFT, raised to at least 1e-5 inside the logarithm. Periodic Hann windows of 2048 and 512
    samples, a hop of a quarter of it, frames centred on reflected edges, no normalisation; means over frames and bins.
    Source: MultiScaleSTFTLoss as Kumar et al. 2023 (DAC, arXiv 2306.06546) evaluate with its defaults.
    """
    x, y = _aligned(reference, estimate)
    return sum(_distance(magnitudes(x, window), magnitudes(y, window)) for window in BANDS)


def mel_distance(reference: NDArray[Any], estimate: NDArray[Any], sample_rate: int) -> float:
    """Return `stft_distance` on mel spectra of `BANDS` from 0 Hz to half the rate.

    The filters (`mel_filters`) weigh magnitudes, not powers. Source: MelSpectrogramLoss as Kumar et al. 2023 (DAC)
    evaluate with its defaults; with which DAC was trained is another configuration.
    """
    x, y = _aligned(reference, estimate)
    total = 0.0
    for window, bands in BANDS.items():
        filters = mel_filters(sample_rate, window, bands)
        total += _distance(magnitudes(x, window) @ filters.T, magnitudes(y, window) @ filters.T)
    return total


def _distance(x: Array, y: Array) -> float:
    logs = np.log10(np.maximum(x, _FLOOR) ** 2) - np.log10(np.maximum(y, _FLOOR) ** 2)
    return float(np.abs(logs).mean() + np.abs(x - y).mean())


def si_sdr(reference: NDArray[Any], estimate: NDArray[Any]) -> float:
    """Return the scale-invariant signal-to-distortion ratio in dB, means removed, kept within SI_SDR_RANGE.

    10·log10(|αs|² / |αs - ŝ|²) with α = ŝ·s / s·s. NaN for a constant reference, which has no signal to find again.
    Source: Le Roux et al. 2019, "SDR: half-baked or well done?".
    """
    x, y = _aligned(reference, estimate)
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
    """Return |STFT| [frames, window // 2 + 1] with a hop of window // 4, frames centred on reflected edges."""
    padded = np.pad(wav, window // 2, mode="reflect" if len(wav) > 1 else "edge")
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[:: window // 4]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    return np.abs(np.fft.rfft(frames * hann, axis=-1))


@functools.lru_cache(maxsize=16)
def mel_filters(sample_rate: int, window: int, bands: int) -> Array:
    """Return triangular filters [bands, window // 2 + 1] of unit area, equally spaced on Slaney's mel scale.

    The scale is linear up to 1000 Hz (15 mel) and logarithmic above. Source: Slaney 1998, Auditory Toolbox.
    """
    from transformers.audio_utils import mel_filter_bank  # takes seconds

    bank = mel_filter_bank(window // 2 + 1, bands, 0.0, sample_rate / 2, sample_rate, norm="slaney", mel_scale="slaney")
    return np.ascontiguousarray(bank.T)


# -- STOI and PESQ -----------------------------------------------------------------------------------------------------


def stoi(reference: NDArray[Any], estimate: NDArray[Any], sample_rate: int, extended: bool = False) -> float:
    """Return short-time objective intelligibility, up to 1; `extended` for ESTOI. NaN for speech under about 0.4 s.

    Source: Taal et al. 2011; Jensen and Taal 2016; computed by pystoi (extra `speech`).
    """
    try:
        from pystoi import stoi as measure
    except ImportError as error:
        raise ImportError(f"STOI needs pystoi: {install('speech')}") from error
    x, y = _aligned(reference, estimate)
    if not np.any(x):
        return math.nan
    with warnings.catch_warnings():
        # pystoi answers 1e-5 with a warning where there are fewer than 30 frames of speech.
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(x, y, sample_rate, extended=extended))
        except RuntimeWarning:
            return math.nan


def pesq_wb(reference: NDArray[Any], estimate: NDArray[Any], sample_rate: int) -> float:
    """Return wideband PESQ (ITU-T P.862.2), about 1.04 to 4.64, at 16 kHz, to which other rates are resampled.

    NaN where the reference holds no speech that it finds, or lasts under 0.25 s; PESQ_WORST where only the estimate is
    silent. Computed by pesq (extra `pesq`, built with a C compiler).
    """
    try:
        from pesq import BufferTooShortError, NoUtterancesError, pesq
    except ImportError as error:
        raise ImportError(f"PESQ needs its package and a C compiler: {install('pesq')}") from error
    x, y = _aligned(reference, estimate)
    if sample_rate != PESQ_RATE:
        x, y = (soxr.resample(wav, sample_rate, PESQ_RATE) for wav in (x, y))
    x, y = x.astype(np.float32), y.astype(np.float32)
    if not np.any(x):
        return math.nan
    try:
        return PESQ_WORST if not np.any(y) else float(pesq(PESQ_RATE, x, y, "wb"))
    except BufferTooShortError:
        return math.nan
    except NoUtterancesError:
        pass
    try:
        pesq(PESQ_RATE, x, x, "wb")
    except NoUtterancesError:
        return math.nan
    return PESQ_WORST


# -- voices ------------------------------------------------------------------------------------------------------------


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return a·b / (|a|·|b|) in float64. ValueError for a vector without length or direction."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"cosine: vectors of shape {x.shape} and {y.shape}; embed both with the same encoder")
    norms = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    if not (norms > 0 and math.isfinite(norms)):
        raise ValueError("cosine: a vector of zeros, or one that is not finite, has no direction")
    return min(max(float(x @ y) / norms, -1.0), 1.0)  # rounding may lead beyond


def voice_cosines(embeddings: Sequence[NDArray[Any] | None], speakers: Sequence[str]) -> tuple[float, float]:
    """Return (intra, inter): the mean cosines of all pairs of turns by one speaker, and by two; NaN without a pair.

    None is a turn without speech. A pair with such a turn counts as the worst: 0 for one speaker, 1 for two.
    """
    assert len(embeddings) == len(speakers)
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for i, one in enumerate(speakers):
        for j in range(i):
            same, a, b = one == speakers[j], embeddings[i], embeddings[j]
            cosines[same].append(float(not same) if a is None or b is None else cosine(a, b))
    intra, inter = (sum(f) / len(f) if f else math.nan for f in (cosines[True], cosines[False]))
    return intra, inter

"""Quality of speech: what a waveform is like on its own, how far it is from the original, and who speaks.

Waveforms are mono [T] in [-1, 1]. Two that are compared are aligned, at one rate and of equal length; cut the tail that
a codec's last frame adds. An empty waveform (T = 0) is defined everywhere: infinitely quiet, silent, not clipped.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

Array = NDArray[np.float64]

FRAME_SECONDS = 0.025
SI_SDR_RANGE = (-80.0, 120.0)
"""dB between which SI-SDR is kept: silence and a perfect copy have a value that can be averaged."""
PESQ_RATE = 16_000
PESQ_WORST = 1.0
"""PESQ of silence instead of speech, of which it says nothing; the worst that it gives otherwise is about 1.04."""


def level(wav: NDArray[Any]) -> float:
    """Return the root mean square in dB, where a square wave of amplitude 1 has 0 dB; -inf for silence."""
    wav = _checked(wav)
    power = float(wav @ wav) / len(wav) if len(wav) else 0.0
    return 10.0 * math.log10(power) if power > 0 else -math.inf


def frame_levels(wav: NDArray[Any], sample_rate: int) -> NDArray[np.float64]:
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
    if not (math.isfinite(duration) and math.isfinite(reference) and duration >= 0 and reference >= 0):
        raise ValueError(f"durations must be at least 0 s, got {duration} and {reference}")
    longer = max(duration, reference)
    return min(duration, reference) / longer if longer else 1.0


def real_time_factor(compute_seconds: float, audio_seconds: float) -> float:
    """Return seconds of computing per second of audio; below 1 is faster than real time."""
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


# -- spectral distances and SI-SDR, in float64 -------------------------------------------------------------------------


def stft_distance(
    reference: NDArray[Any], estimate: NDArray[Any], windows: Sequence[int] = (2048, 512), floor: float = 1e-5
) -> float:
    """Return the multi-scale STFT distance: Σ over windows of mean|log10 X² - log10 Y²| + mean|X - Y|.

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
    """Return `stft_distance` on mel spectra: `bands[i]` bands from 0 Hz to half the rate for `windows[i]`.

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
    """Return the scale-invariant signal-to-distortion ratio in dB, means removed, kept within SI_SDR_RANGE.

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
    """Return |STFT| [frames, window // 2 + 1] with a hop of window // 4, frames centred on reflected edges."""
    padded = np.pad(wav, window // 2, mode="reflect") if len(wav) > 1 else np.pad(wav, window // 2, mode="edge")
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[:: window // 4]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    return np.abs(np.fft.rfft(frames * hann, axis=-1))


@functools.lru_cache(maxsize=16)
def mel_filters(sample_rate: int, window: int, bands: int) -> Array:
    """Return triangular filters [bands, window // 2 + 1] of unit area, equally spaced on Slaney's mel scale.

    The scale is linear up to 1000 Hz (15 mel) and logarithmic above. Source: Slaney 1998, Auditory Toolbox.
    """
    top = _to_mel(np.array([sample_rate / 2]))[0]
    corners = _from_mel(np.linspace(0.0, top, bands + 2))
    bins = np.fft.rfftfreq(window, 1 / sample_rate)
    low, centre, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


def aligned(reference: NDArray[Any], estimate: NDArray[Any]) -> tuple[Array, Array]:
    """Return both waveforms as float64. Raise a ValueError that says why they cannot be compared."""
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


# -- STOI and PESQ -----------------------------------------------------------------------------------------------------


def stoi(reference: NDArray[Any], estimate: NDArray[Any], sample_rate: int, extended: bool = False) -> float:
    """Return short-time objective intelligibility, up to 1; `extended` for ESTOI. NaN for speech under about 0.4 s.

    Source: Taal et al. 2011; Jensen and Taal 2016; computed by pystoi (extra `speech`).
    """
    try:
        from pystoi import stoi as measure
    except ImportError as error:
        raise ImportError("STOI needs pystoi: pip install 'audiorl[speech]'") from error
    x, y = aligned(reference, estimate)
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
        raise ImportError("PESQ needs its package and a C compiler: pip install 'audiorl[pesq]'") from error
    x, y = aligned(reference, estimate)
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
    return float(x @ y) / norms


@dataclass(frozen=True)
class VoiceCosines:
    """Mean cosines over all pairs of turns of a conversation: by the same speaker, and by two speakers.

    NaN where there is no such pair.
    """

    intra: float
    inter: float

    @property
    def similarity(self) -> float:
        """Return sqrt(intra · (1 - inter)), each factor kept in [0, 1]; NaN where one is not defined.

        The geometric mean of how alike a speaker's turns are and how unlike two speakers are. Reported by Higgs Audio
        V2 in words; formula reconstructed.
        """
        alike, unlike = min(max(self.intra, 0.0), 1.0), min(max(1.0 - self.inter, 0.0), 1.0)
        return math.sqrt(alike * unlike) if not math.isnan(self.intra + self.inter) else math.nan


def voice_cosines(embeddings: Sequence[NDArray[Any] | None], speakers: Sequence[str]) -> VoiceCosines:
    """Average the cosines of turns with these embeddings, spoken by these speakers; every pair of turns counts once.

    None is a turn without speech. A pair with such a turn counts as the worst: 0 for one speaker, 1 for two.
    """
    if len(embeddings) != len(speakers):
        raise ValueError(f"voice_cosines: {len(embeddings)} embeddings but {len(speakers)} speakers")
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for i, one in enumerate(speakers):
        for j in range(i):
            same, a, b = one == speakers[j], embeddings[i], embeddings[j]
            cosines[same].append(float(not same) if a is None or b is None else cosine(a, b))
    intra, inter = (sum(f) / len(f) if f else math.nan for f in (cosines[True], cosines[False]))
    return VoiceCosines(intra, inter)

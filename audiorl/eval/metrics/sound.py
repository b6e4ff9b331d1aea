"""Metrics of sounds that are no speech: onsets, the delay between two ears, hiss and loudness, and distances of sets.

Waveforms are floats in [-1, 1], [T] or [T, channels], as `AudioClip` holds them. Shapes: N sounds, D dimensions of an
embedding, C classes. A distance of sets says nothing without the model that embedded or tagged them: name it beside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.speech import clipped_share, frame_levels

Array = NDArray[np.float64]
BANDS = 24
"""Mel bands in which onsets are looked for."""
RISE = 3.0
"""dB by which the mean band rises in 10 ms at an onset."""
RANGE = 50.0
"""dB below the loudest band at its loudest that still count."""
APART = 0.1
"""Seconds between two onsets, at least."""
HISS = (-65.0, -35.0)
"""dB above 4 kHz in the quietest tenth of a sound: no hiss, and nothing but hiss."""
CLIPPED = 0.01
"""Share of samples at the limits that makes a sound worthless."""
BLOCK_SECONDS = 0.4


def mono(wave: NDArray[Any]) -> Array:
    """Return the mean of the channels, [T]. Raises ValueError for other shapes and for samples that are not finite."""
    wave = np.asarray(wave, np.float64)
    if wave.ndim not in (1, 2) or (wave.ndim == 2 and wave.shape[1] > 2):
        raise ValueError(f"a sound of shape {wave.shape}; give [T] or [T, 1 or 2 channels]")
    if not np.isfinite(wave).all():
        raise ValueError(f"a sound with {np.count_nonzero(~np.isfinite(wave))} samples that are not finite")
    return wave if wave.ndim == 1 else wave.mean(axis=1)


# -- when --------------------------------------------------------------------------------------------------------------


def onsets(wave: NDArray[Any], sample_rate: int) -> Array:
    """Return the times in seconds at which something begins, by the rise of the log energy in mel bands.

    Frames of 16 ms every 5 ms; an onset is a peak of the mean rise over 10 ms of at least RISE dB, APART from stronger
    ones. Its time is where the waveform first reaches a tenth of its height in the 30 ms after, so that a click's is
    exact. Source: spectral flux, Dixon 2006, on log mel energies.
    """
    wav = mono(wave)
    size, hop = 2 * round(0.008 * sample_rate), round(0.005 * sample_rate)
    if not len(wav) or not np.abs(wav).max() > 1e-4:
        return np.zeros(0)
    filled = np.pad(wav, (size + 2 * hop, size))
    frames = np.lib.stride_tricks.sliding_window_view(filled, size)[::hop] * np.hanning(size)
    power = (
        np.abs(np.fft.rfft(frames, 512 if size <= 512 else size)) ** 2
        @ mel_bands(sample_rate, max(512, size), BANDS, 50, sample_rate / 2).T
    )
    floor = power.max() * 10 ** (-RANGE / 10)
    decibels = 10 * np.log10(np.maximum(power, floor) / floor)
    rise = np.maximum(decibels[2:] - decibels[:-2], 0).mean(axis=1)  # rise[k]: from frame k to k + 2
    times, order, around = [], np.argsort(-rise, kind="stable"), round(0.015 * sample_rate)
    for k in order[: int(np.count_nonzero(rise >= RISE))]:
        # Frame k + 2 covers these samples of the waveform; the rise lies in them.
        first = (int(k) + 2) * hop - size - 2 * hop
        begin = _begin(wav, first, first + size + round(0.03 * sample_rate))
        before, after = wav[max(begin - around, 0) : begin], wav[begin : begin + around]
        if after @ after > 0.5 * (before @ before):  # else a sound is cut, which fills all bands, too
            times.append(begin / sample_rate)
    kept: list[float] = []
    for time in times:  # the strongest first
        if all(abs(time - other) >= APART for other in kept):
            kept.append(time)
    return np.sort(np.array(kept))


def _begin(wav: Array, first: int, last: int) -> int:
    first, last = max(first, 0), min(last, len(wav))
    near = np.abs(wav[first:last])
    before = np.abs(wav[max(first - (last - first), 0) : first]).max(initial=0.0)  # what still sounds
    return first + int(np.argmax(near >= max(0.1 * near.max(), min(1.2 * before, near.max()))))


@cache
def mel_bands(sample_rate: int, size: int, bands: int, lowest: float, highest: float) -> Array:
    """Return triangles of height 1, [bands, size // 2 + 1], from `lowest` to `highest` Hz, equally spaced on the mel
    scale 2595·log10(1 + f / 700) of O'Shaughnessy 1987 (HTK's; `metrics.speech.mel_filters` has Slaney's)."""
    low, high = (2595 * math.log10(1 + f / 700) for f in (lowest, highest))
    edges = 700 * (10 ** (np.linspace(low, high, bands + 2) / 2595) - 1)
    edges = np.maximum(edges, np.arange(bands + 2) * sample_rate / size)  # the lowest bands hold a frequency each
    frequencies = np.fft.rfftfreq(size, 1 / sample_rate)
    up = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return np.asarray(np.clip(np.minimum(up, down), 0, None))


def matched_onsets(asked: Sequence[float], found: Sequence[float], window: float) -> list[tuple[int, int]]:
    """Return (index of the asked onset, index of the one found) of pairs within `window` seconds of each other, no
    onset twice, those that are nearest first."""
    pairs = sorted((abs(f - a), i, j) for i, a in enumerate(asked) for j, f in enumerate(found) if abs(f - a) <= window)
    matched: dict[int, int] = {}
    for _, i, j in pairs:
        if i not in matched and j not in matched.values():
            matched[i] = j
    return sorted(matched.items())


def onset_scores(
    spans: Sequence[tuple[float, float]], found: Sequence[float], tolerance: float = 0.1, window: float = 0.5
) -> dict[str, float]:
    """Compare the onsets that were found with the spans (start, end) of the events that were asked.

    `f1`: of onsets within `tolerance` seconds of a start. `lag`: the mean distance in seconds to the nearest onset,
    `window` where none is as near. `graded`: F1 in which a pair within the window counts 1 - lag / window. An onset
    that belongs to no start but lies inside of a span is that sound's own texture: neither for nor against.
    """
    starts = [start for start, _ in spans]
    lag = {j: abs(found[j] - starts[i]) for i, j in matched_onsets(starts, found, window)}
    outside = [j for j, time in enumerate(found) if not any(start <= time <= end for start, end in spans)]
    near = {j for j in lag if lag[j] <= tolerance}

    def f1(hits: float, right: Collection[int]) -> float:
        extra = sum(j not in right for j in outside)
        return 2 * hits / (len(spans) + hits + extra) if hits else 0.0

    lags = [*lag.values()] + [window] * (len(spans) - len(lag))
    graded = f1(sum(1 - value / window for value in lag.values()), lag)
    return {"f1": f1(len(near), near), "lag": float(np.mean(lags)) if lags else 0.0, "graded": graded}


# -- where -------------------------------------------------------------------------------------------------------------


def interaural_delay(wave: NDArray[Any], sample_rate: int, most: float = 0.001) -> float:
    """Return by how many seconds the left channel [T, 2] is later than the right, between -most and most: GCC-PHAT.

    Frequencies more than 40 dB below the strongest are left out, whose phase is noise; the correlation is interpolated
    to a hundredth of a sample. 0 for silence. Raises ValueError for one channel. Source: Knapp and Carter 1976.
    """
    wave = np.asarray(wave, np.float64)
    if wave.ndim != 2 or wave.shape[1] != 2:
        raise ValueError(f"a delay needs two channels, got {wave.shape}; take a model with 2 channels")
    mono(wave)
    size = 1 << (2 * len(wave)).bit_length()
    left, right = (np.fft.rfft(channel, size) for channel in wave.T)
    cross = left * right.conj()
    strength = np.abs(cross)
    if not len(wave) or not strength.max() > 1e-12:
        return 0.0
    phat = np.where(strength >= strength.max() * 1e-4, cross / np.maximum(strength, 1e-30), 0)
    correlation = np.fft.irfft(phat, size)
    reach = math.ceil(most * sample_rate)
    lags = np.arange(-reach, reach + 1)
    best = int(lags[np.argmax(correlation[lags])])
    # Between the samples: the correlation is band-limited, so that it can be evaluated anywhere.
    used = np.flatnonzero(phat)
    turns, values, lag = 2j * np.pi * used / size, phat[used], float(best)
    for step in (0.25, 0.05, 0.01):
        near, heights = lag + step * np.arange(-5, 6), []
        turned, turn = values * np.exp(near[0] * turns), np.exp(step * turns)
        for _ in near:  # a product for each lag in place of an exponential, in a third of the time
            heights.append(turned.real.sum())
            turned = turned * turn
        lag = float(near[np.argmax(heights)])
    return min(max(lag / sample_rate, -most), most)


# -- quality -----------------------------------------------------------------------------------------------------------


def hiss_level(wave: NDArray[Any], sample_rate: int) -> float:
    """Return the level in dB above 4 kHz of the quietest tenth of the 25 ms frames, at least -100: what a generator
    leaves behind where it should be silent. A sound without a quiet moment has the level of its quietest one."""
    wav = mono(wave)
    spectrum = np.fft.rfft(wav)
    spectrum[np.fft.rfftfreq(len(wav), 1 / sample_rate) < 4000] = 0
    levels = frame_levels(np.fft.irfft(spectrum, len(wav)), sample_rate) if len(wav) > 1 else np.zeros(0)
    return max(float(np.quantile(levels, 0.1, method="lower")), -100.0) if len(levels) else -100.0


def loudness_range(wave: NDArray[Any], sample_rate: int) -> float:
    """Return the dB between the loudest (95 %) and quietest (10 %) blocks of 0.4 s that are above -70 dB; 0 without
    any. The idea of EBU Tech 3342, by RMS and on blocks that fit scenes of a few seconds."""
    wav = mono(wave)
    size = round(BLOCK_SECONDS * sample_rate)
    blocks = [wav[i : i + size] for i in range(0, max(len(wav) - size // 2, 1), size // 2)]
    levels = np.array([10 * math.log10(max(float(np.mean(b**2)), 1e-12)) for b in blocks if len(b)])
    levels = levels[levels > -70]
    return float(np.quantile(levels, 0.95) - np.quantile(levels, 0.1)) if len(levels) else 0.0


def sound_quality(wave: NDArray[Any], sample_rate: int) -> dict[str, float]:
    """Return `clipping` and `hiss` in [0, 1], where 1 is none; `clean`, their product; and `loudness_range` in dB.

    clipping: falls to 0 at a share CLIPPED of samples at the limits, in the worse channel. hiss: by `hiss_level`,
    between HISS. An empty or silent sound has 0 in all of them: it would be the cleanest.
    """
    wave = np.asarray(wave, np.float64)
    wav = mono(wave)
    if not len(wav) or not np.abs(wave).max() > 1e-4:
        return {"clean": 0.0, "clipping": 0.0, "hiss": 0.0, "loudness_range": 0.0}
    clipped = max(clipped_share(channel) for channel in wave.reshape(len(wav), -1).T)
    quiet, loud = HISS
    hiss = min(max((loud - hiss_level(wave, sample_rate)) / (loud - quiet), 0.0), 1.0)
    clipping = max(0.0, 1 - clipped / CLIPPED)
    range_ = loudness_range(wave, sample_rate)
    return {"clean": clipping * hiss, "clipping": clipping, "hiss": hiss, "loudness_range": range_}


# -- sets of sounds ----------------------------------------------------------------------------------------------------


def frechet_distance(embeddings_ND: NDArray[Any], reference_MD: NDArray[Any]) -> float:
    """Return the Fréchet distance of two sets of embeddings, as of Gaussians: |μ - μ'|² + tr(Σ + Σ' - 2 (Σ Σ')^½).

    With fewer sounds than dimensions the covariances are of low rank, and the distance grows as N falls: compare sets
    of one size only. Raises ValueError for fewer than two sounds. Source: Heusel et al. 2017; Kilgour et al. 2019.
    """
    sets = [np.asarray(e, np.float64) for e in (embeddings_ND, reference_MD)]
    if min(len(e) for e in sets) < 2 or sets[0].shape[1:] != sets[1].shape[1:]:
        raise ValueError(f"a Fréchet distance needs two sets of two embeddings or more, got {[e.shape for e in sets]}")
    (a, b), centred = [e.mean(axis=0) for e in sets], [(e - e.mean(axis=0)) / math.sqrt(len(e) - 1) for e in sets]
    # tr (Σ Σ')^½ is the sum of the singular values of X X'ᵀ, which needs no root of a matrix of low rank; those of the
    # triangles of X and X' are the same, and no larger than D × D.
    triangles = [np.asarray(np.linalg.qr(c)[1]) for c in centred]
    root = np.linalg.svd(triangles[0] @ triangles[1].T, compute_uv=False).sum()
    return max(float((a - b) @ (a - b) + sum((c**2).sum() for c in centred) - 2 * root), 0.0)


def kl_divergence(reference_NC: NDArray[Any], found_NC: NDArray[Any]) -> Array:
    """Return KL(reference ‖ found) in nats of each pair of sounds, [N], from probabilities of classes, made to sum to
    1. Source: Iashin and Rahtu 2021, as AudioGen and ThinkSound use it."""
    p, q = (_distribution(values) for values in (reference_NC, found_NC))
    return np.asarray((p * np.log(p / q)).sum(axis=1))


def inception_score(found_NC: NDArray[Any]) -> float:
    """Return exp of the mean KL of each sound's distribution over classes from their mean: high where sounds are clear
    and varied. Source: Salimans et al. 2016."""
    p = _distribution(found_NC)
    return float(np.exp((p * np.log(p / p.mean(axis=0))).sum(axis=1).mean()))


def _distribution(values: NDArray[Any]) -> Array:
    values = np.asarray(values, np.float64) + 1e-6  # tags of several labels may all be 0
    return np.asarray(values / values.sum(axis=1, keepdims=True))

"""Waveform augmentation: pure functions on mono float32 [T] that draw from a numpy Generator you pass.

They make synthetic or studio speech less clean, so that a model trained on it survives a telephone. Each returns a new
float32 array and leaves its input as it was; only `speed` changes the length. Rooms and telephones are for RATE Hz.
"""

from __future__ import annotations

import zlib

import numpy as np
import soxr

from audiorl.audio import AudioClip
from audiorl.types import Sample

RATE = 16_000


def add_noise(wav: np.ndarray, snr_db: float, rng: np.random.Generator, color: float = 0.0) -> np.ndarray:
    """Add Gaussian noise `snr_db` below the mean power of `wav`; its spectrum falls with f^-color (0 white, 1 pink)."""
    noise = rng.standard_normal(len(wav))
    if color:
        spectrum = np.fft.rfft(noise)
        shape = np.arange(len(spectrum), dtype=np.float64)
        shape[0] = 1.0
        noise = np.fft.irfft(spectrum * shape ** (-color / 2), n=len(wav))
    power, noise_power = np.mean(wav.astype(np.float64) ** 2), np.mean(noise**2)
    if power == 0 or noise_power == 0:
        return wav.astype(np.float32)
    return (wav + noise * np.sqrt(power / noise_power) * 10 ** (-snr_db / 20)).astype(np.float32)


def gain(wav: np.ndarray, db: float) -> np.ndarray:
    """Louder or softer by `db` decibels, limited to [-1, 1] the way a converter would."""
    return np.clip(wav * 10 ** (db / 20), -1, 1).astype(np.float32)


def speed(wav: np.ndarray, factor: float) -> np.ndarray:
    """Play `factor` times as fast, pitch included (Ko et al. 2015 use 0.9, 1, 1.1): [T] becomes about [T / factor]."""
    return soxr.resample(wav.astype(np.float32), factor, 1.0)


def telephone(wav: np.ndarray) -> np.ndarray:
    """Return what a narrow-band call leaves: 300 to 3400 Hz with 100 Hz wide slopes, 8-bit mu-law steps (G.711)."""
    spectrum = np.fft.rfft(wav.astype(np.float64))
    frequency = np.fft.rfftfreq(len(wav), 1 / RATE)
    band = np.clip((frequency - 200) / 100, 0, 1) * np.clip((3500 - frequency) / 100, 0, 1)
    narrow = np.clip(np.fft.irfft(spectrum * band, n=len(wav)), -1, 1)
    companded = np.sign(narrow) * np.log1p(255 * np.abs(narrow)) / np.log1p(255)
    steps = np.round(companded * 127) / 127
    return (np.sign(steps) * np.expm1(np.abs(steps) * np.log1p(255)) / 255).astype(np.float32)


def reverb(wav: np.ndarray, rng: np.random.Generator, decay_seconds: float, wet: float) -> np.ndarray:
    """Return a simple room: the sound [T] plus a decaying noise tail that is 60 dB down after `decay_seconds`.

    `wet` is the tail's level against the direct sound.
    """
    taps = max(1, round(decay_seconds * RATE))
    tail = rng.standard_normal(taps) * 10 ** (-3 * np.arange(taps) / taps)
    tail *= wet / np.sqrt(np.sum(tail**2))
    size = 1 << (len(wav) + taps).bit_length()
    echo = np.fft.irfft(np.fft.rfft(wav.astype(np.float64), size) * np.fft.rfft(tail, size), size)
    return (wav + echo[: len(wav)]).astype(np.float32)


def silence_pieces(wav: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Silence a random `share` of the pieces of 0.1 s at RATE, at least one, without moving the others.

    The distortion of OPA-DPO's pairs of prompts (arXiv 2501.09695), which masks 30 % of an image's patches.
    """
    size = RATE // 10
    pieces = -(-len(wav) // size)
    silent = rng.choice(pieces, min(pieces, max(1, round(share * pieces))), replace=False)
    return np.where(np.isin(np.arange(len(wav)) // size, silent), 0.0, wav).astype(np.float32)


def augment(wav: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random chain: speed, often a room, sometimes a telephone, noise at 5 to 40 dB, gain -12 to 3 dB."""
    wav = speed(wav, rng.uniform(0.9, 1.1))
    if rng.random() < 0.5:
        wav = reverb(wav, rng, rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.5))
    if rng.random() < 0.25:
        wav = telephone(wav)
    wav = add_noise(wav, rng.uniform(5, 40), rng, color=rng.uniform(0, 1.5))
    return gain(wav, rng.uniform(-12, 3))


def noisy(clip: AudioClip, key: str) -> AudioClip:
    """Return a recording of RATE Hz, in a room or not, under noise at 0 to 15 dB; all of it is drawn by `key`."""
    rng, wav = np.random.default_rng(zlib.crc32(key.encode())), clip.load(RATE)
    if rng.random() < 0.5:
        wav = reverb(wav, rng, rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.5))
    wav = add_noise(wav, rng.uniform(0, 15), rng, color=rng.uniform(0, 1.5))
    return AudioClip(array=gain(wav, 0), sample_rate=RATE)


def noisy_recording(sample: Sample, key: str | None = None) -> AudioClip:
    """Return what a sample asks to enhance: its recording `before`, or its clean `audio` made `noisy` by the key, by
    default its id."""
    before: AudioClip | None = sample.metadata.get("before")
    return noisy(sample.metadata["audio"], key or sample.id) if before is None else before

"""From audio as files hold it to the input of a codec."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenizers_audio.protocol import AudioTokenizer

OVERSHOOT = 2.0
"""Lossy formats and resampling go beyond full scale; up to this peak that is cut off, above it the scale is wrong."""


def prepare(wav: Tensor | np.ndarray, sample_rate: int, codec: AudioTokenizer) -> Tensor:
    """[T] or [T, channels] floats at any rate -> [T'] float32 in [-1, 1] at the codec's rate.

    Channels come last, as soundfile reads them, and are averaged. Raises ValueError for audio that is empty, NaN,
    infinite, [channels, T], of integers or beyond OVERSHOOT.
    """
    samples = wav.detach().cpu().numpy() if isinstance(wav, Tensor) else np.asarray(wav)
    if samples.dtype.kind != "f":
        raise ValueError(f"samples are {samples.dtype}; give floats in [-1, 1] (divide int16 by 32768)")
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and samples.shape[1] > max(8, samples.shape[0])):
        raise ValueError(f"audio has shape {samples.shape}; give [T] or [T, channels] (transpose [channels, T])")
    if samples.size == 0:
        raise ValueError(f"audio holds no samples (shape {samples.shape}); leave it out")
    if sample_rate <= 0:
        raise ValueError(f"sample_rate is {sample_rate}; give the audio's own rate in Hz")
    if not np.isfinite(samples).all():
        bad = np.count_nonzero(~np.isfinite(samples))
        raise ValueError(f"{bad} of {samples.size} samples are NaN or infinite; repair the audio")
    if (peak := float(np.abs(samples).max())) > OVERSHOOT:
        raise ValueError(f"samples reach {peak:.4g}, far beyond [-1, 1]; scale them (int16 by 1/32768)")
    mono = samples.astype(np.float32) if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    if sample_rate != codec.sample_rate:
        import soxr  # here: training on text needs torch and transformers only

        mono = soxr.resample(mono, sample_rate, codec.sample_rate)
        if len(mono) == 0:
            few = f"{len(samples)} samples at {sample_rate} Hz"
            raise ValueError(f"{few} are none at the codec's {codec.sample_rate} Hz; leave it out")
    return torch.from_numpy(np.clip(mono, -1, 1))

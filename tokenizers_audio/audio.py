"""From audio as files hold it to the input of a codec, and the resampler that some codecs were trained with."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenizers_audio.protocol import AudioTokenizer

OVERSHOOT = 2.0
"""Lossy formats and resampling go beyond full scale; up to this peak that is cut off, above it the scale is wrong."""
ZEROS = 6
"""Zero crossings of the resampler's sinc on either side."""
ROLLOFF = 0.99
"""Its cut-off as a share of the lower Nyquist frequency."""


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
    power, left = (float(np.mean(np.square(x, dtype=np.float64))) for x in (samples, mono))
    if left < 0.01 * power and power > 1e-8:  # 20 dB below the channels
        raise ValueError(
            "the channels cancel each other out in their mean, as in stereo out of phase; give one of them"
        )
    if sample_rate != codec.sample_rate:
        import soxr  # here: training on text needs torch and transformers only

        mono = soxr.resample(mono, sample_rate, codec.sample_rate)
        if len(mono) == 0:
            few = f"{len(samples)} samples at {sample_rate} Hz"
            raise ValueError(f"{few} are none at the codec's {codec.sample_rate} Hz; leave it out")
    return torch.from_numpy(np.clip(mono, -1, 1))


def resample(wav: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """Resample [..., T] to [..., ceil(T · new / old)] as torchaudio.functional.resample does, bit for bit.

    Windowed sinc with a Hann window. A codec that was trained with that resampler needs its output at inference too;
    for all else there is soxr.
    """
    if old_rate == new_rate:
        return wav
    divisor = math.gcd(old_rate, new_rate)
    old, new = old_rate // divisor, new_rate // divisor
    kernels, width = _kernels(old, new, wav)
    padded = F.pad(wav.reshape(-1, wav.shape[-1]), (width, width + old))
    phases = F.conv1d(padded[:, None], kernels, stride=old)  # [N, new, about T / old]
    interleaved = phases.transpose(1, 2).reshape(len(padded), -1)
    return interleaved[..., : math.ceil(new * wav.shape[-1] / old)].reshape(*wav.shape[:-1], -1)


def _kernels(old: int, new: int, like: Tensor) -> tuple[Tensor, int]:
    """[new, 1, 2 · width + old], one filter per phase. The order of operations decides the last bits."""
    cutoff = min(old, new) * ROLLOFF
    width = math.ceil(ZEROS * old / cutoff)
    inputs = torch.arange(-width, width + old, dtype=like.dtype, device=like.device)[None, None] / old
    phases = torch.arange(0, -new, -1, dtype=like.dtype, device=like.device)[:, None, None] / new
    times = ((phases + inputs) * cutoff).clamp(-ZEROS, ZEROS)
    window = torch.cos(times * math.pi / ZEROS / 2) ** 2
    angles = times * math.pi
    sinc = torch.where(angles == 0, torch.ones_like(angles), angles.sin() / angles)
    return sinc * (window * (cutoff / old)), width

"""Windowed-sinc resampling as torchaudio.functional.resample defines it, bit for bit, without torchaudio.

A codec that was trained with that resampler needs its output at inference too. For all else there is soxr.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ZEROS = 6
"""Zero crossings of the sinc on either side."""
ROLLOFF = 0.99
"""Cut-off as a share of the lower Nyquist frequency."""


def resample(wav: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """[..., T] -> [..., ceil(T · new / old)], with a Hann window."""
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

"""Causal spectra of samples and samples from spectra, for whole recordings and streams (see `layers`).

Frame k of `hop` samples has the window of N samples that ends with it; the spectrum of frame k that the decoder writes
is added to the N samples that begin with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tokenizers_audio.unified.layers import Cache, wide, with_past

FLOOR = 1e-4
"""Magnitudes below this, 80 dB under a full-scale sine, are silence."""


class Analysis(nn.Module):
    """[B, 1, T] samples -> [B, N / 2 + 1, T / hop] logarithms of magnitudes, about -1 to 1.2."""

    window: Tensor

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size), persistent=False)

    def forward(self, wav: Tensor, cache: Cache | None = None) -> Tensor:
        wav = wide(with_past(self, wav[:, 0], self.size - self.hop, cache))
        spectra = torch.fft.rfft(wav.unfold(-1, self.size, self.hop) * self.window)
        magnitudes = spectra.abs() / (self.size / 4)  # a full-scale sine has magnitude 1
        return (magnitudes.clamp_min(FLOOR).log10() / 2 + 1).transpose(1, 2)


class Synthesis(nn.Module):
    """[B, N + 2, T] log magnitudes and phases -> [B, 1, T · hop] samples, by overlap-add (Vocos, arXiv 2306.00814)."""

    window: Tensor

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.size, self.hop, self.bins = size, hop, size // 2 + 1
        self.register_buffer("window", torch.hann_window(size), persistent=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        logs, phases = wide(x).split(self.bins, dim=1)
        magnitudes = logs.clamp_max(math.log(self.size)).exp()
        spectra = torch.complex(magnitudes * phases.cos(), magnitudes * phases.sin())
        # Squared windows at this hop add up to 3/8 · size / hop everywhere.
        gain = 8 * self.hop / (3 * self.size)
        frames = torch.fft.irfft(spectra, n=self.size, dim=1) * (self.window * gain)[:, None]
        added = nn.functional.fold(
            frames, (1, (x.shape[-1] - 1) * self.hop + self.size), (1, self.size), stride=(1, self.hop)
        )[:, :, 0]
        length = x.shape[-1] * self.hop
        if cache is not None:
            if self in cache:
                tail = cache[self]
                added = torch.cat([added[..., : tail.shape[-1]] + tail, added[..., tail.shape[-1] :]], -1)
            cache[self] = added[..., length:].clone()
        return added[..., :length]

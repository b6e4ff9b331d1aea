"""Causal spectra of samples and samples from spectra, for whole recordings and streams (see `layers`).

Frame k of `hop` samples has the window of N samples that ends with it; the spectrum of frame k that the decoder writes
is added to the N samples that begin with it. The decoder either learns magnitudes and phases (`Synthesis`), or it says
log-mels, which is learned in minutes, and phases are worked out from their peaks (`MelSynthesis`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from tokenizers_audio.unified.layers import Cache, full_precision, wide, with_past

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


class LogMel(nn.Module):
    """[…, N] samples of a window -> […, mels], log10 of mel energies scaled to about -1 … 1; `undo` gives energies."""

    window: Tensor
    filters: Tensor

    def __init__(self, size: int, sample_rate: int, mels: int):
        super().__init__()
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        self.register_buffer("filters", mel_filters(sample_rate, size // 2 + 1, mels), persistent=False)

    def forward(self, windows: Tensor) -> Tensor:
        spectra = torch.fft.rfft(windows * self.window).abs()
        with full_precision(windows):
            return ((spectra @ self.filters).clamp_min(1e-5).log10() + 1.5) / 2

    @staticmethod
    def undo(logs: Tensor) -> Tensor:
        return 10 ** (2 * logs.clamp_max(2.5) - 1.5)


class Synthesis(nn.Module):
    """[B, N + 2, T] log magnitudes and phases -> [B, 1, T · hop] samples (Vocos, arXiv 2306.00814)."""

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.size, self.bins = size, size // 2 + 1
        self.add = OverlapAdd(size, hop)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        logs, phases = wide(x).transpose(1, 2).split(self.bins, dim=-1)
        return self.add(logs.clamp_max(math.log(self.size)).exp(), phases, cache)


class MelSynthesis(nn.Module):
    """[B, mels, T] log-mels as `LogMel` gives them -> [B, 1, T · hop] samples; gradients flow through magnitudes."""

    inverse: Tensor

    def __init__(self, size: int, hop: int, sample_rate: int, mels: int):
        super().__init__()
        filters = mel_filters(sample_rate, size // 2 + 1, mels)
        self.register_buffer("inverse", torch.linalg.pinv(filters.double()).float(), persistent=False)
        self.phases = PeakPhases(size, hop)
        self.add = OverlapAdd(size, hop)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        with full_precision(x):
            magnitudes = (LogMel.undo(wide(x)).transpose(1, 2) @ self.inverse).clamp_min(1e-5)
        return self.add(magnitudes, self.phases(magnitudes.detach(), cache), cache)


class PeakPhases(nn.Module):
    """[B, T, bins] magnitudes -> phases [B, T, bins] of a sinusoid at every peak of the spectrum.

    Single-pass spectrogram inversion (Beauregard, Harish and Wyse 2015): a peak's frequency is that of the parabola
    through the logarithms of it and its neighbours, its phase goes on from the frame before with that frequency, and
    the bins around it follow it as those of a Hann window do, with alternating signs.
    """

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.turn = 2 * math.pi * hop / size

    @torch.no_grad()
    def forward(self, magnitudes: Tensor, cache: Cache | None = None) -> Tensor:
        bins = magnitudes.shape[-1]
        places = torch.arange(bins, device=magnitudes.device)
        logs = magnitudes.clamp_min(1e-9).log()  # in which a window's main lobe is nearly a parabola
        left, mid, right = logs[..., :-2], logs[..., 1:-1], logs[..., 2:]
        peak = nn.functional.pad((mid > left) & (mid >= right), (1, 1))
        offset = nn.functional.pad(0.5 * (left - right) / (left - 2 * mid + right).clamp_max(-1e-12), (1, 1))
        before = torch.where(peak, places, -bins).cummax(-1).values
        after = torch.where(peak, places, 2 * bins).flip(-1).cummin(-1).values.flip(-1)
        owner = torch.where(places - before <= after - places, before, after)
        owner = torch.where((owner < 0) | (owner >= bins), places, owner)  # no peak at all
        advance = self.turn * (places + torch.where(peak, offset, 0.0))
        step = advance.gather(-1, owner) + math.pi * ((places - owner) % 2)
        last_phase = None if cache is None else cache.get(self)
        phase = torch.zeros_like(magnitudes[:, 0]) if last_phase is None else last_phase
        phases = torch.empty_like(magnitudes)
        for t in range(magnitudes.shape[1]):
            phase = (phase.gather(-1, owner[:, t]) + step[:, t]) % (2 * math.pi)
            phases[:, t] = phase
        if cache is not None:
            cache[self] = phase.clone()
        return phases


class OverlapAdd(nn.Module):
    """Magnitudes and phases [B, T, bins] -> [B, 1, T · hop] samples."""

    window: Tensor

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size), persistent=False)

    def forward(self, magnitudes: Tensor, phases: Tensor, cache: Cache | None = None) -> Tensor:
        spectra = torch.complex(magnitudes * phases.cos(), magnitudes * phases.sin()).transpose(1, 2)
        # Squared windows at this hop add up to 3/8 · size / hop everywhere.
        gain = 8 * self.hop / (3 * self.size)
        frames = torch.fft.irfft(spectra, n=self.size, dim=1) * (self.window * gain)[:, None]
        length = frames.shape[-1] * self.hop
        added = nn.functional.fold(frames, (1, length - self.hop + self.size), (1, self.size), stride=(1, self.hop))[
            :, :, 0
        ]
        if cache is not None:
            if self in cache:
                tail = cache[self]
                added = torch.cat([added[..., : tail.shape[-1]] + tail, added[..., tail.shape[-1] :]], -1)
            cache[self] = added[..., length:].clone()
        return added[..., :length]


def mel_filters(sample_rate: int, bins: int, mels: int) -> Tensor:
    """[bins, mels] triangles of equal area on Slaney's mel scale, 0 Hz to half the sample rate."""
    filters = mel_filter_bank(bins, mels, 0.0, sample_rate / 2, sample_rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters).float()

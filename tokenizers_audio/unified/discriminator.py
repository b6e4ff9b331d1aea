"""The discriminator: convolutions over complex spectra of several resolutions, and the losses played with it.

MS-STFT discriminator of EnCodec (Défossez et al. 2022, arXiv 2210.13438), hinge losses, feature matching.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, relu
from torch.nn.utils.parametrizations import weight_norm

Judgement = list[list[Tensor]]
"""For each resolution the feature maps of the layers; the last one is the score of every patch, high for real."""


class SpectrumDiscriminator(nn.Module):
    """One resolution: real and imaginary parts [B, 2, frames, bins] through two-dimensional convolutions."""

    window: Tensor

    def __init__(self, size: int, channels: int):
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        layers = [nn.Conv2d(2, channels, (3, 9), padding=(1, 4))]
        for dilation in (1, 2, 4):
            layers.append(nn.Conv2d(channels, channels, (3, 9), (1, 2), padding=(dilation, 4), dilation=(dilation, 1)))
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, 1, 3, padding=1)]
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)

    def forward(self, wav: Tensor) -> list[Tensor]:
        spectra = torch.stft(
            wav.float(), self.size, self.size // 4, window=self.window, normalized=True, return_complex=True,
            pad_mode="constant",
        )  # fmt: skip
        x = torch.view_as_real(spectra).permute(0, 3, 2, 1)
        features = []
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k < len(self.layers) - 1:
                x = leaky_relu(x, 0.2)
            features.append(x.float())
        return features


class Discriminator(nn.Module):
    """[B, T] samples -> a judgement."""

    def __init__(self, windows: Sequence[int] = (2048, 1024, 512, 256), channels: int = 32):
        super().__init__()
        self.scales = nn.ModuleList(SpectrumDiscriminator(size, channels) for size in windows)

    def forward(self, wav: Tensor) -> Judgement:
        return [scale(wav) for scale in self.scales]


def discriminator_loss(real: Judgement, fake: Judgement) -> Tensor:
    """Hinge: the mean over resolutions of mean max(0, 1 - real) + mean max(0, 1 + fake)."""
    losses = [relu(1 - r[-1]).mean() + relu(1 + f[-1]).mean() for r, f in zip(real, fake, strict=True)]
    return torch.stack(losses).mean()


def adversarial_loss(fake: Judgement) -> Tensor:
    """Hinge, the generator's side: the mean over resolutions of mean max(0, 1 - fake)."""
    return torch.stack([relu(1 - f[-1]).mean() for f in fake]).mean()


def feature_matching_loss(real: Judgement, fake: Judgement) -> Tensor:
    """Return the mean over resolutions and layers of mean |real - fake| / mean |real|, scores left out."""
    losses = [
        (a.detach() - b).abs().mean() / a.detach().abs().mean().clamp_min(1e-5)
        for r, f in zip(real, fake, strict=True)
        for a, b in zip(r[:-1], f[:-1], strict=True)
    ]
    return torch.stack(losses).mean()

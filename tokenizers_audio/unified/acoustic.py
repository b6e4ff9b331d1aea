"""The acoustic branch: convolutions down from samples (or spectra) to frames, and back up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokenizers_audio.unified.config import UnifiedConfig
from tokenizers_audio.unified.layers import (
    Cache,
    CachedSequential,
    CausalConv,
    CausalUpsample,
    activation,
    residual_units,
)
from tokenizers_audio.unified.spectrum import Analysis, MelSynthesis, Synthesis


class AcousticEncoder(CachedSequential):
    """[B, 1, F · hop] samples -> [B, acoustic_dim, F]. Frame f depends on the samples up to its own end."""

    def __init__(self, config: UnifiedConfig):
        channels, act = config.channels, activation(config.activation)
        layers: list[nn.Module] = []
        if config.spectrum_hop is None:
            layers.append(CausalConv(1, channels[0], 7))
        else:
            layers.append(Analysis(config.window, config.spectrum_hop))
            layers.append(CausalConv(config.window // 2 + 1, channels[0], 3))
        for stride, before, after in zip(config.strides, channels, channels[1:], strict=False):
            layers += residual_units(before, config.dilations, act)
            layers += [act(before), CausalConv(before, after, 2 * stride, stride)]
        layers += [act(channels[-1]), CausalConv(channels[-1], config.acoustic_dim, 3)]
        super().__init__(*layers)


class AcousticDecoder(nn.Module):
    """[B, acoustic_dim, F] -> [B, 1, F · hop] samples; frame f depends on frames up to f.

    `layers` say what the samples are made of, `voice` makes them; between the two others may add to it.
    """

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        channels, act = config.channels, activation(config.activation)
        layers: list[nn.Module] = [CausalConv(config.acoustic_dim, channels[-1], 7)]
        for stride, before, after in zip(config.strides[::-1], channels[::-1], channels[-2::-1], strict=False):
            layers += [act(before), CausalUpsample(before, after, stride)]
            layers += residual_units(after, config.dilations, act)
        layers.append(act(channels[0]))
        self.voice: nn.Module
        if config.spectrum_hop is None:
            layers.append(CausalConv(channels[0], 1, 7))
            self.voice = Bounded()
        elif config.phases == "learned":
            layers.append(CausalConv(channels[0], config.window + 2, 1))
            self.voice = Synthesis(config.window, config.spectrum_hop)
        else:
            layers.append(CausalConv(channels[0], config.mels, 1))
            self.voice = MelSynthesis(config.window, config.spectrum_hop, config.sample_rate, config.mels)
        self.layers = CachedSequential(*layers)

    @torch.no_grad()
    def silence(self) -> None:
        """Let the last layer say 0; its weights' directions stay."""
        for name, p in self.layers[-1].named_parameters():
            if name.endswith(("original0", "bias")):
                p.zero_()


class Bounded(nn.Module):
    """Into (-1, 1)."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return x.tanh()

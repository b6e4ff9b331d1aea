"""The straight way from log-mels to a frame's vector and back: what networks add to.

A frame's log-mels, laid end to end, are a patch. Its principal components are a good vector before anything has been
learned, and the patches that a decoder should say are nearly linear in the vectors around them. Both maps begin at
their closed-form solution on some recordings (`principal_components`, `least_squares`) and then learn with the rest.

Shapes: B recordings, F frames, S log-mel steps a frame, M mels, D codebook_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokenizers_audio.unified.config import UnifiedConfig
from tokenizers_audio.unified.layers import Cache, with_past
from tokenizers_audio.unified.spectrum import LogMel


class PatchEncoder(nn.Module):
    """[B, T] samples -> [B, F, D]. A frame's patch has the S windows that end in it."""

    def __init__(self, config: UnifiedConfig, mels: LogMel):
        super().__init__()
        assert config.spectrum_hop is not None
        self.step, self.size = config.spectrum_hop, config.window
        self.steps = config.hop // config.spectrum_hop
        self._mels = [mels]  # its owner's
        self.map = nn.Linear(self.steps * config.mels, config.codebook_dim)

    def patches(self, wav: Tensor, cache: Cache | None) -> Tensor:
        """[B, T] samples -> [B, F, S · M]"""
        windows = with_past(self, wav, self.size - self.step, cache).unfold(-1, self.size, self.step)
        return self._mels[0](windows).unflatten(1, (-1, self.steps)).flatten(2)

    def forward(self, wav: Tensor, cache: Cache | None = None) -> Tensor:
        with torch.no_grad():
            patches = self.patches(wav, cache)
        return self.map(patches)


class PatchDecoder(nn.Module):
    """[B, D, F] vectors -> [B, M, F · S] log-mels, from a frame's vector and the one before it."""

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        assert config.spectrum_hop is not None
        self.steps = config.hop // config.spectrum_hop
        self.map = nn.Linear(2 * config.codebook_dim, self.steps * config.mels)

    @staticmethod
    def pairs(vectors: Tensor) -> Tensor:
        """[B, D, 1 + F] vectors -> [B, F, 2 · D], each after the one before it."""
        return torch.cat([vectors[..., :-1], vectors[..., 1:]], 1).transpose(1, 2)

    def forward(self, vectors: Tensor, cache: Cache | None = None) -> Tensor:
        patches = self.map(self.pairs(with_past(self, vectors, 1, cache)))
        return patches.unflatten(2, (self.steps, -1)).flatten(1, 2).transpose(1, 2)


@torch.no_grad()
def principal_components(map: nn.Linear, patches: Tensor, generator: torch.Generator) -> None:
    """Set `map` to the principal components of patches [N, S · M], scaled to variance 1 on average.

    They are turned at random, so that every coordinate has about as much to say.
    """
    x = patches.double()
    mean = x.mean(0)
    values, vectors = torch.linalg.eigh((x - mean).mT @ (x - mean) / len(x))
    count = map.out_features
    scale = (count / values[-count:].sum().clamp_min(1e-12)).sqrt()
    turn = torch.linalg.qr(torch.randn(count, count, generator=generator, dtype=torch.float64)).Q.to(x.device)
    weight = scale * turn @ vectors[:, -count:].mT
    map.weight.copy_(weight)
    map.bias.copy_(-(weight @ mean))


@torch.no_grad()
def least_squares(map: nn.Linear, inputs: Tensor, wanted: Tensor, ridge: float = 1e-3) -> None:
    """Set `map` to the linear regression of `wanted` [N, ·] on `inputs` [N, ·]."""
    x, y = inputs.double(), wanted.double()
    mean, target = x.mean(0), y.mean(0)
    gram = (x - mean).mT @ (x - mean) / len(x)
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), device=x.device, dtype=x.dtype)
    weight = torch.linalg.solve(gram, (x - mean).mT @ (y - target) / len(x)).mT
    map.weight.copy_(weight)
    map.bias.copy_(target - weight @ mean)

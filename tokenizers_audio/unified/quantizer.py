"""Vectors to codes and back. How codebooks are learned is in `codebooks`.

Shapes: B recordings, D codebook_dim, F frames, Q codebooks, K codes in each, N = B · F vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenizers_audio.unified.config import UnifiedConfig
from tokenizers_audio.unified.layers import full_precision, wide


@dataclass(frozen=True)
class Quantized:
    """What training sees. `inputs[q]` [N, D'] are the vectors that codebook q had to name, `codes` [B, Q, F] the names.

    vectors: [B, D, F], the gradient goes straight through to what was quantised. commitment: scalar.
    """

    vectors: Tensor
    codes: Tensor
    inputs: tuple[Tensor, ...]
    commitment: Tensor


def nearest(x: Tensor, codebook: Tensor) -> Tensor:
    """[N] index of the row of `codebook` [K, D] that lies nearest to each row of x [N, D]; the first of equals."""
    with full_precision(x):
        distances = codebook.square().sum(1) - 2 * x @ codebook.T  # |x|² is the same for all
    return distances.argmin(1)


class ResidualQuantizer(nn.Module):
    """Each codebook names what the ones before it left over (Zeghidour et al. 2021, arXiv 2107.03312)."""

    codebooks: Tensor

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        size = (config.num_codebooks, config.codebook_size, config.codebook_dim)
        self.register_buffer("codebooks", torch.randn(size))

    def encode(self, x: Tensor, levels: int) -> Tensor:
        """[B, D, F] -> [B, levels, F]."""
        left = _rows(x)
        codes = []
        for codebook in self.codebooks[:levels]:
            codes.append(nearest(left, codebook))
            left = left - codebook[codes[-1]]
        return _by_frame(codes, x)

    def decode(self, codes: Tensor) -> Tensor:
        """[B, levels, F] -> [B, D, F]."""
        named = [codebook[codes[:, q]] for q, codebook in enumerate(self.codebooks[: codes.shape[1]])]
        return torch.stack(named).sum(0).transpose(1, 2)

    def forward(self, x: Tensor, levels: Tensor) -> Quantized:
        """Quantise [B, D, F] with the first `levels` [B] codebooks of each recording; all codebooks see vectors."""
        frames = x.shape[-1]
        rows, left = _rows(x), _rows(x).detach()
        named = torch.zeros_like(left)
        used = levels.repeat_interleave(frames)
        codes, inputs = [], []
        commitment = x.new_zeros(())
        for q, codebook in enumerate(self.codebooks):
            codes.append(nearest(left, codebook))
            inputs.append(left)
            chosen = codebook[codes[-1]]
            active = (used > q).unsqueeze(1)
            # rows - named is `left` with a gradient.
            commitment = commitment + ((rows - named - chosen).square() * active).mean() / len(self.codebooks)
            left = left - chosen
            named = named + chosen * active
        vectors = rows + (named - rows).detach()
        return Quantized(_columns(vectors, x), _by_frame(codes, x), tuple(inputs), commitment)


class GroupedQuantizer(nn.Module):
    """Each codebook names its own D / Q coordinates: plain quantisers side by side (Jégou et al. 2011)."""

    codebooks: Tensor

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        size = (config.num_codebooks, config.codebook_size, config.codebook_dim // config.num_codebooks)
        self.register_buffer("codebooks", torch.randn(size))

    def encode(self, x: Tensor, levels: int) -> Tensor:
        """[B, D, F] -> [B, levels, F]."""
        groups = _rows(x).chunk(len(self.codebooks), 1)
        return _by_frame([nearest(g, c) for g, c in zip(groups[:levels], self.codebooks[:levels], strict=True)], x)

    def decode(self, codes: Tensor) -> Tensor:
        """[B, levels, F] -> [B, D, F], zeros where a group has no code."""
        groups = self.codebooks.new_zeros(codes.shape[0], codes.shape[2], len(self.codebooks), self.codebooks.shape[2])
        for q, codebook in enumerate(self.codebooks[: codes.shape[1]]):
            groups[:, :, q] = codebook[codes[:, q]]
        return groups.flatten(2).transpose(1, 2)

    def forward(self, x: Tensor, levels: Tensor) -> Quantized:
        """Quantise [B, D, F]; the groups beyond `levels` [B] are zero."""
        rows = _rows(x)
        groups = rows.chunk(len(self.codebooks), 1)
        codes = [nearest(g.detach(), c) for g, c in zip(groups, self.codebooks, strict=True)]
        chosen = torch.stack([c[k] for c, k in zip(self.codebooks, codes, strict=True)], 1)  # [N, Q, D / Q]
        order = torch.arange(len(self.codebooks), device=x.device)
        active = (levels.repeat_interleave(x.shape[-1])[:, None] > order)[..., None]
        commitment = ((torch.stack(groups, 1) - chosen).square() * active).mean()
        named = (chosen * active).flatten(1)
        vectors = rows + (named - rows).detach()
        inputs = tuple(g.detach() for g in groups)
        return Quantized(_columns(vectors, x), _by_frame(codes, x), inputs, commitment)


def _rows(x: Tensor) -> Tensor:
    """[B, D, F] -> [N, D]"""
    return wide(x).transpose(1, 2).flatten(0, 1)


def _columns(rows: Tensor, like: Tensor) -> Tensor:
    """[N, D] -> [B, D, F]"""
    return rows.unflatten(0, (like.shape[0], like.shape[-1])).transpose(1, 2)


def _by_frame(codes: list[Tensor], like: Tensor) -> Tensor:
    """Q times [N] -> [B, Q, F]"""
    return torch.stack(codes, 1).unflatten(0, (like.shape[0], like.shape[-1])).transpose(1, 2)

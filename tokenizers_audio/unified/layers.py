"""Causal layers that run on whole recordings and on streams.

Every layer takes `(x, cache)`. Without a cache, x [B, C, T] is a whole recording: before it comes silence (zeros). With
one, x is the next piece of a stream, what a layer still needs of the past is kept in the cache under the layer itself,
and the pieces' outputs laid end to end are the output for the whole. A piece is a whole number of frames, so that every
stride divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

Cache = dict[nn.Module, Tensor]


def with_past(module: nn.Module, x: Tensor, length: int, cache: Cache | None) -> Tensor:
    """[…, length + T]: x after the `length` values that came before it; remembers the last `length` values."""
    past = None if cache is None else cache.get(module)
    x = torch.cat([x.new_zeros(*x.shape[:-1], length) if past is None else past, x], -1)
    if cache is not None:
        cache[module] = x[..., x.shape[-1] - length :].clone()  # a view would keep the whole piece in memory
    return x


class Snake(nn.Module):
    """x + sin²(αx) / α with one learned α per channel (Ziyin et al. 2020)."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels, 1))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return x + torch.sin(self.alpha * x).square() / (self.alpha + 1e-9)


class Elu(nn.Module):
    """x, and exp(x) - 1 below zero."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return nn.functional.elu(x)


Activation = Callable[[int], nn.Module]
"""The activation for so many channels."""


def activation(name: Literal["snake", "elu"]) -> Activation:
    return Snake if name == "snake" else lambda channels: Elu()


class CausalConv(nn.Module):
    """[B, C, T] -> [B, C', T / stride]; output t has seen inputs up to (t + 1) · stride - 1."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, dilation: int = 1):
        super().__init__()
        self.past = (kernel - 1) * dilation + 1 - stride
        assert self.past >= 0
        self.conv = weight_norm(nn.Conv1d(before, after, kernel, stride, dilation=dilation))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return self.conv(with_past(self, x, self.past, cache))


class CausalUpsample(nn.Module):
    """[B, C, T] -> [B, C', T · stride] by a transposed convolution two inputs wide: the own one and the one before."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.stride = stride
        self.conv = weight_norm(nn.ConvTranspose1d(before, after, 2 * stride, stride))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        length = x.shape[-1] * self.stride
        return self.conv(with_past(self, x, 1, cache))[..., self.stride : self.stride + length]


class ResidualUnit(nn.Module):
    """x + a dilated convolution to half the channels and a pointwise one back (SEANet, Tagliasacchi et al. 2020)."""

    def __init__(self, channels: int, dilation: int, act: Activation, kernel: int = 3):
        super().__init__()
        inner = max(channels // 2, 1)
        self.inside = CachedSequential(
            act(channels), CausalConv(channels, inner, kernel, dilation=dilation),
            act(inner), CausalConv(inner, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return x + self.inside(x, cache)


class CachedSequential(nn.Sequential):
    """Layers one after the other, all with the same cache."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(x, cache)
        return x


def residual_units(channels: int, dilations: Sequence[int], act: Activation) -> list[nn.Module]:
    return [ResidualUnit(channels, dilation, act) for dilation in dilations]


def full_precision(x: Tensor) -> torch.autocast:
    """Keep autocast away from what is computed from x: codes must not depend on how networks are trained."""
    return torch.autocast(x.device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """x in at least float32, whatever the autocast."""
    return x if x.dtype == torch.float64 else x.float()

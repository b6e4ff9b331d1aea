"""Layers that hear piece by piece give what torch and the families' own modules give for the whole input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import EncodecConfig, MimiConfig
from transformers.models.encodec.modeling_encodec import EncodecConv1d, EncodecConvTranspose1d
from transformers.models.mimi.modeling_mimi import MimiConv1d

from tokenizers_audio.layers import Chain, Conv, Frames, Layer, Lstm, Pointwise, Residual, TransposedConv
from tokenizers_audio.seanet import conv_layer, transposed_layer

cuts = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def piecewise(layer: Layer, x: Tensor, sizes: list[int]) -> Tensor:
    """x in chunks of these sizes, the last one takes what remains."""
    parts, start = [], 0
    for size in [*sizes, x.shape[-1]]:
        parts.append(layer.push(x[..., start : start + size]))
        start += size
    return torch.cat([*parts, layer.finish()], -1)


@torch.no_grad()
def check(layer: Layer, whole: Tensor, x: Tensor, sizes: list[int]) -> None:
    for _ in range(2):  # after finish a layer is as new
        torch.testing.assert_close(piecewise(layer, x, sizes), whole, rtol=0, atol=1e-12)


def seeded(module: Any) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(0, 6), st.integers(1, 30), cuts)
def test_convolution(kernel: int, stride: int, dilation: int, padding: int, length: int, sizes: list[int]) -> None:
    stride = min(stride, (kernel - 1) * dilation + 1)
    length = max(length, (kernel - 1) * dilation + 1)
    conv = seeded(nn.Conv1d(2, 3, kernel, stride, padding, dilation))
    x = torch.randn(1, 2, length, dtype=torch.float64)
    check(Conv(conv, padding, padding), conv(x), x, sizes)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 2), st.integers(1, 20), cuts)
def test_transposed_convolution(stride: int, overlap: int, padding: int, length: int, sizes: list[int]) -> None:
    padding, extra = min(padding, overlap), min(stride - 1, min(padding, overlap))
    length = max(length, 2 * padding + 1)  # torch has no transposed convolution with nothing left of it
    conv = seeded(nn.ConvTranspose1d(2, 3, stride + overlap, stride, padding, output_padding=extra))
    x = torch.randn(1, 2, length, dtype=torch.float64)
    check(TransposedConv(conv, padding, padding - extra), conv(x), x, sizes)


@pytest.mark.parametrize("mode", ["reflect", "constant", "replicate"])
@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=30)
@given(st.sampled_from([(7, 1, 1), (3, 1, 2), (1, 1, 1), (4, 2, 1), (10, 5, 1), (8, 4, 1)]), st.integers(1, 40), cuts)
def test_seanet_convolution(
    causal: bool, mode: str, shape: tuple[int, int, int], length: int, sizes: list[int]
) -> None:
    """Also inputs that are shorter than their own reflection, and any filling of the last stride."""
    kernel, stride, dilation = shape
    x = torch.randn(1, 2, length, dtype=torch.float64)
    encodec = seeded(
        EncodecConv1d(EncodecConfig(use_causal_conv=causal, pad_mode=mode), 2, 3, kernel, stride, dilation)
    )
    check(conv_layer(encodec), encodec(x), x, sizes)
    mimi = seeded(MimiConv1d(MimiConfig(use_causal_conv=causal), 2, 3, kernel, stride, dilation, pad_mode=mode))
    check(conv_layer(mimi), mimi(x), x, sizes)


@pytest.mark.parametrize(("causal", "ratio"), [(True, 1.0), (True, 0.4), (False, 1.0)])
@settings(max_examples=30)
@given(st.sampled_from([(4, 2), (10, 5), (3, 3)]), st.integers(1, 12), cuts)
def test_seanet_transposed_convolution(
    causal: bool, ratio: float, shape: tuple[int, int], length: int, sizes: list[int]
) -> None:
    config = EncodecConfig(use_causal_conv=causal, trim_right_ratio=ratio)
    module = seeded(EncodecConvTranspose1d(config, 2, 3, *shape))
    x = torch.randn(1, 2, length, dtype=torch.float64)
    check(transposed_layer(module), module(x), x, sizes)


@settings(max_examples=30)
@given(st.integers(1, 20), cuts)
def test_residual_chain_lstm_and_frames(length: int, sizes: list[int]) -> None:
    conv = seeded(nn.Conv1d(2, 2, 5, padding=2))
    lstm = seeded(nn.LSTM(2, 2, 2))
    x = torch.randn(1, 2, length, dtype=torch.float64)
    filled = nn.functional.pad(x, (0, -length % 3))
    inner = filled + conv(torch.tanh(filled))
    steps = inner.permute(2, 0, 1)
    whole = torch.sin((lstm(steps)[0] + steps).permute(1, 2, 0))
    body = Chain([Pointwise(torch.tanh), Conv(conv, 2, 2)])
    layers = [Frames(3, fill=True), Residual(body, Pointwise(nn.Identity())), Lstm(lstm), Pointwise(torch.sin)]
    check(Chain(layers), whole, x, sizes)


def test_outputs_come_as_soon_as_they_are_final() -> None:
    conv = seeded(nn.Conv1d(1, 1, 5, padding=2))  # looks 2 ahead
    layer = Conv(conv, 2, 2)
    counts = [layer.push(torch.randn(1, 1, 1, dtype=torch.float64)).shape[-1] for _ in range(6)]
    assert counts == [0, 0, 1, 1, 1, 1] and layer.finish().shape[-1] == 2
    frames = Frames(4, fill=False)
    assert [frames.push(torch.zeros(1, 1, n)).shape[-1] for n in (3, 1, 9)] == [0, 4, 8]
    assert frames.finish().shape[-1] == 1

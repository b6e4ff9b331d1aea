"""SEANet, the convolutions of Encodec and Mimi in transformers, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from tokenizers_audio.layers import Chain, Conv, Layer, Lstm, Pointwise, Residual, TransposedConv


def seanet_layers(modules: Iterable[Any]) -> Chain:
    """Return the layers of an EncodecEncoder, EncodecDecoder, MimiEncoder or MimiDecoder."""
    return Chain([_layer(module) for module in modules])


def conv_layer(module: Any) -> Conv:
    """Return an EncodecConv1d or MimiConv1d: all padding before a causal one, half of it otherwise, the last stride
    filled."""
    conv = module.conv
    total = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - conv.stride[0]
    right = 0 if module.causal else total // 2
    return Conv(conv, total - right, right, module.pad_mode, complete=True)


def transposed_layer(module: Any) -> TransposedConv:
    """Return an EncodecConvTranspose1d or MimiConvTranspose1d."""
    conv = module.conv
    total = conv.kernel_size[0] - conv.stride[0]
    right = math.ceil(total * module.trim_right_ratio) if module.causal else total // 2
    return TransposedConv(conv, total - right, right)


def _layer(module: Any) -> Layer:
    # The two families' classes are twins without a common base; what they hold tells them apart.
    if isinstance(module, nn.ELU | nn.Identity):
        return Pointwise(module)
    if hasattr(module, "lstm"):
        return Lstm(module.lstm)
    if hasattr(module, "block"):
        return Residual(seanet_layers(module.block), _layer(module.shortcut))
    return conv_layer(module) if isinstance(module.conv, nn.Conv1d) else transposed_layer(module)

"""Mimi (arXiv 2410.00037), transformers' MimiModel: 24 kHz, 12.5 frames/s, a semantic and up to 31 acoustic codebooks.

Causal convolutions and transformers with a sliding window: a frame's code is final with its last sample and its audio
with its codes. Streams keep one window of keys and values per layer and are exact at any length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, MimiModel

from tokenizers_audio.codec import Codec, codebooks
from tokenizers_audio.layers import Chain, Frames, Layer, rest
from tokenizers_audio.loading import load_model
from tokenizers_audio.seanet import conv_layer, seanet_layers, transposed_layer


def load(path: str | Path, *, num_codebooks: int | None = None, bandwidth: float | None = None) -> Codec:
    """Return a Mimi codec of a folder or hub id, with all its codebooks, the first `num_codebooks` (Moshi uses 8), or
    those of a `bandwidth` in kbit/s. Raises ValueError."""
    return Codec(Mimi(load_model(MimiModel, path), num_codebooks, bandwidth))


class MimiParts(nn.Module):
    """The modules of a MimiModel by their names in checkpoints. In memory transformers 5.21 put them into two halves.

    The codebooks move with it: each remembers its table outside of the module's state.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        halves = hasattr(model.encoder, "encoder_seanet")
        self.encoder = model.encoder.encoder_seanet if halves else model.encoder
        self.decoder = model.decoder.decoder_seanet if halves else model.decoder
        first, second = (model.encoder, model.decoder) if halves else (model, model)
        self.encoder_transformer, self.downsample = first.encoder_transformer, first.downsample
        self.decoder_transformer, self.upsample = second.decoder_transformer, second.upsample
        self.quantizer = model.quantizer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MimiParts:
        for module in self.modules():
            if hasattr(module, "_embed"):
                module._embed = None  # type: ignore[assignment]
        return super()._apply(fn, recurse)


class Mimi:
    family = "mimi"

    def __init__(self, model: Any, num_codebooks: int | None = None, bandwidth: float | None = None) -> None:
        config = model.config
        if not config.use_causal_conv or config.audio_channels != 1:
            raise ValueError("only causal mono Mimi models are supported, as all released ones are")
        self.model: Any = MimiParts(model)
        self.sample_rate: int = config.sampling_rate
        self.hop: int = math.prod(config.upsampling_ratios) * (1 if self.model.downsample is None else 2)
        self.codebook_size: int = config.codebook_size
        rate = self.sample_rate / self.hop
        self.num_codebooks = codebooks(config.num_quantizers, rate, self.codebook_size, num_codebooks, bandwidth)
        if self.num_codebooks < config.num_semantic_quantizers:
            raise ValueError(f"Mimi needs its {config.num_semantic_quantizers} semantic codebooks, not {num_codebooks}")

    def analyse(self, wav: Tensor) -> Tensor:
        features = _transform(self.model.encoder_transformer, self.model.encoder(wav))
        return features if self.model.downsample is None else self.model.downsample(features)

    def quantise(self, features: Tensor) -> Tensor:
        return self.model.quantizer.encode(features, self.num_codebooks).transpose(0, 1)

    def dequantise(self, codes: Tensor) -> Tensor:
        return self.model.quantizer.decode(codes)

    def synthesise(self, features: Tensor) -> Tensor:
        features = features if self.model.upsample is None else self.model.upsample(features)
        return self.model.decoder(_transform(self.model.decoder_transformer, features))

    def analysis(self) -> Layer:
        model = self.model
        last = [] if model.downsample is None else [conv_layer(model.downsample)]
        convs = seanet_layers(model.encoder.layers)
        return Chain([Frames(self.hop, fill=False), convs, _Transformer(model.encoder_transformer), *last])

    def synthesis(self) -> Layer:
        model = self.model
        first = [] if model.upsample is None else [transposed_layer(model.upsample)]
        return Chain([*first, _Transformer(model.decoder_transformer), seanet_layers(model.decoder.layers)])


class _Transformer:
    """A MimiTransformerModel, piece by piece."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.empty: Tensor | None = None
        self.cache = DynamicCache(config=model.config)

    def push(self, x: Tensor) -> Tensor:
        self.empty = rest(x, x.shape[-1])
        return _transform(self.model, x, self.cache) if x.shape[-1] else x

    def finish(self) -> Tensor:
        assert self.empty is not None
        self.cache = DynamicCache(config=self.model.config)
        return self.empty


def _transform(model: Any, x: Tensor, cache: Any = None) -> Tensor:
    """[B, D, T] through a transformer that takes [B, T, D]."""
    outputs = model(x.transpose(1, 2), past_key_values=cache, use_cache=cache is not None, return_dict=True)
    return outputs.last_hidden_state.transpose(1, 2)

"""DAC (arXiv 2306.06546), transformers' DacModel: 16, 24 or 44.1 kHz, residual codebooks of 1024.

Its convolutions look ahead by a few frames and have no other memory, so streams are exact. Audio is completed with
silence to whole frames, as DAC's own feature extractor does. Odd strides make the decoder end a few samples early; they
are silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import DacModel

from tokenizers_audio.codec import Codec, codebooks, whole_frames
from tokenizers_audio.layers import Chain, Conv, Frames, Layer, Pointwise, Residual, TransposedConv
from tokenizers_audio.loading import load_model


def load(path: str | Path, *, num_codebooks: int | None = None, bandwidth: float | None = None) -> Codec:
    """Return a DAC codec of a folder or hub id, with all its codebooks, the first `num_codebooks`, or those of a
    `bandwidth` in kbit/s. Raises ValueError."""
    return Codec(Dac(load_model(DacModel, path), num_codebooks, bandwidth))


class Dac:
    family = "dac"

    def __init__(self, model: Any, num_codebooks: int | None = None, bandwidth: float | None = None) -> None:
        config = model.config
        self.model = model
        self.sample_rate: int = config.sampling_rate
        self.hop: int = config.hop_length
        self.codebook_size: int = config.codebook_size
        rate = self.sample_rate / self.hop
        self.num_codebooks = codebooks(config.n_codebooks, rate, self.codebook_size, num_codebooks, bandwidth)

    def analyse(self, wav: Tensor) -> Tensor:
        return self.model.encoder(whole_frames(wav, self.hop))

    def quantise(self, features: Tensor) -> Tensor:
        return self.model.quantizer(features, self.num_codebooks)[1]

    def dequantise(self, codes: Tensor) -> Tensor:
        return self.model.quantizer.from_codes(codes)[0]

    def synthesise(self, features: Tensor) -> Tensor:
        return self.model.decoder(features)

    def analysis(self) -> Layer:
        return Chain([Frames(self.hop, fill=True), encoder_layers(self.model.encoder)])

    def synthesis(self) -> Layer:
        return decoder_layers(self.model.decoder)


def encoder_layers(encoder: Any) -> Chain:
    """transformers' DacEncoder, piece by piece."""
    layers: list[Layer] = [_conv(encoder.conv1)]
    for block in encoder.block:
        layers += [*_units(block), Pointwise(block.snake1), _conv(block.conv1)]
    return Chain([*layers, Pointwise(encoder.snake1), _conv(encoder.conv2)])


def decoder_layers(decoder: Any) -> Chain:
    """transformers' DacDecoder, piece by piece."""
    layers: list[Layer] = [_conv(decoder.conv1)]
    for block in decoder.block:
        layers += [Pointwise(block.snake1), _transposed(block.conv_t1), *_units(block)]
    return Chain([*layers, Pointwise(decoder.snake1), _conv(decoder.conv2), Pointwise(decoder.tanh)])


def _units(block: Any) -> list[Layer]:
    return [
        Residual(
            Chain([Pointwise(unit.snake1), _conv(unit.conv1), Pointwise(unit.snake2), _conv(unit.conv2)]),
            Pointwise(nn.Identity()),
        )
        for unit in (block.res_unit1, block.res_unit2, block.res_unit3)
    ]


def _conv(conv: nn.Conv1d) -> Conv:
    padding = int(conv.padding[0])
    return Conv(conv, padding, padding)


def _transposed(conv: nn.ConvTranspose1d) -> TransposedConv:
    padding = int(conv.padding[0])
    return TransposedConv(conv, padding, padding - conv.output_padding[0])

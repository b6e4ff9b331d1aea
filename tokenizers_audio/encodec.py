"""Encodec (arXiv 2210.13438), transformers' EncodecModel: 24 kHz, and the 32 kHz one of MusicGen.

Convolutions and a forward LSTM: streams are exact. The 48 kHz model is refused: it gives a loudness with the codes of
every second, and its codes without it cannot be decoded.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import EncodecModel

from tokenizers_audio.codec import Codec, codebooks
from tokenizers_audio.layers import Chain, Frames, Layer
from tokenizers_audio.loading import load_model
from tokenizers_audio.seanet import seanet_layers


def load(path: str | Path, *, num_codebooks: int | None = None, bandwidth: float | None = None) -> Codec:
    """Return an Encodec codec of a folder or hub id, with all its codebooks (transformers' own default is the fewest),
    the first `num_codebooks`, or those of a `bandwidth` in kbit/s. Raises ValueError."""
    return Codec(Encodec(load_model(EncodecModel, path), num_codebooks, bandwidth))


class Encodec:
    family = "encodec"

    def __init__(self, model: Any, num_codebooks: int | None = None, bandwidth: float | None = None) -> None:
        config = model.config
        if config.normalize or config.audio_channels != 1 or config.norm_type != "weight_norm" or config.chunk_length_s:
            raise ValueError(
                "an Encodec that scales loudness, normalises over time, works in chunks or is stereo, as the 48 kHz "
                "one, needs more than codes to decode; take a 24 or 32 kHz one"
            )
        self.model = model
        self.sample_rate: int = config.sampling_rate
        self.hop: int = math.prod(config.upsampling_ratios)
        self.codebook_size: int = config.codebook_size
        rate = self.sample_rate / self.hop
        self.num_codebooks = codebooks(config.num_quantizers, rate, self.codebook_size, num_codebooks, bandwidth)

    def analyse(self, wav: Tensor) -> Tensor:
        return self.model.encoder(wav)

    def quantise(self, features: Tensor) -> Tensor:
        return self.model.quantizer.encode(features)[: self.num_codebooks].transpose(0, 1)

    def dequantise(self, codes: Tensor) -> Tensor:
        return self.model.quantizer.decode(codes.transpose(0, 1))

    def synthesise(self, features: Tensor) -> Tensor:
        return self.model.decoder(features)

    def analysis(self) -> Layer:
        return Chain([Frames(self.hop, fill=False), seanet_layers(self.model.encoder.layers)])

    def synthesis(self) -> Layer:
        return seanet_layers(self.model.decoder.layers)

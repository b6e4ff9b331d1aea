"""X-Codec (arXiv 2408.17175), transformers' XcodecModel: 16 kHz, acoustic and HuBERT features quantised together.

HuBERT attends to the whole recording, so encoding works in blocks (`blocks.py`); the decoder is convolutions and
streams exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import XcodecModel

from tokenizers_audio.blocks import Blocks, block_size
from tokenizers_audio.codec import Codec, codebooks, whole_frames
from tokenizers_audio.dac import decoder_layers
from tokenizers_audio.layers import Chain, Frames, Layer, join
from tokenizers_audio.loading import load_model

BLOCK_SECONDS = 30.0
OVERLAP_SECONDS = 2.0


def load(
    path: str | Path,
    *,
    num_codebooks: int | None = None,
    bandwidth: float | None = None,
    block_seconds: float = BLOCK_SECONDS,
    overlap_seconds: float = OVERLAP_SECONDS,
) -> Codec:
    """Return an X-Codec of a folder or hub id, with all its codebooks, the first `num_codebooks`, or those of a
    `bandwidth` in kbit/s. Streams of codes come up to `block_seconds` late. Raises ValueError."""
    model = load_model(XcodecModel, path)
    return Codec(SemanticCodec("xcodec", model, num_codebooks, bandwidth, block_seconds, overlap_seconds))


class SemanticCodec:
    """The Backend of X-Codec and of what was made from it."""

    def __init__(
        self,
        family: str,
        model: Any,
        num_codebooks: int | None = None,
        bandwidth: float | None = None,
        block_seconds: float = BLOCK_SECONDS,
        overlap_seconds: float = OVERLAP_SECONDS,
    ) -> None:
        config = model.config
        self.family = family
        self.model = model
        self.sample_rate: int = config.sample_rate
        self.hop: int = config.hop_length
        self.codebook_size: int = config.codebook_size
        rate = self.sample_rate / self.hop
        self.num_codebooks = codebooks(config.num_quantizers, rate, self.codebook_size, num_codebooks, bandwidth)
        self.blocks = block_size(block_seconds, overlap_seconds, rate)

    def analyse(self, wav: Tensor) -> Tensor:
        blocks = Blocks(self._analyse_block, self.hop, self.blocks)
        return join(blocks.push(whole_frames(wav, self.hop)), blocks.finish())

    def _analyse_block(self, wav: Tensor) -> Tensor:
        """Return what XcodecModel.encode computes before it quantises. [B, 1, F · hop] -> [B, D, F]"""
        model, frames = self.model, wav.shape[-1] // self.hop
        semantic = model.encoder_semantic(model._extract_semantic_features(wav).transpose(1, 2))
        acoustic = model.acoustic_encoder(wav)
        if not semantic.shape[-1] == acoustic.shape[-1] == frames:
            raise ValueError(
                f"{frames} frames of audio make {semantic.shape[-1]} semantic and {acoustic.shape[-1]} acoustic ones; "
                f"the strides in the {self.family} model's config do not fit each other"
            )
        return model.fc(torch.cat([acoustic, semantic], 1).transpose(1, 2)).transpose(1, 2)

    def quantise(self, features: Tensor) -> Tensor:
        return self.model.quantizer.encode(features)[: self.num_codebooks].transpose(0, 1)

    def dequantise(self, codes: Tensor) -> Tensor:
        latents = self.model.quantizer.decode(codes.transpose(0, 1))
        return self.model.fc2(latents.transpose(1, 2)).transpose(1, 2)

    def synthesise(self, features: Tensor) -> Tensor:
        return self.model.acoustic_decoder(features)

    def analysis(self) -> Layer:
        return Chain([Frames(self.hop, fill=True), Blocks(self._analyse_block, self.hop, self.blocks)])

    def synthesis(self) -> Layer:
        return decoder_layers(self.model.acoustic_decoder)

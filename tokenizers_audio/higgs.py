"""The tokenizer of Higgs Audio V2: 24 kHz, 25 frames/s, 8 codebooks of 1024, 2 kbit/s.

X-Codec with projected codebooks, HuBERT on 16 kHz audio and every second of its frames. transformers' model of it needs
torchaudio for its resampler alone; this one does not and is otherwise the same, weight for weight and bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import HiggsAudioV2TokenizerConfig, XcodecModel

from tokenizers_audio.audio import resample
from tokenizers_audio.codec import Codec
from tokenizers_audio.loading import load_model
from tokenizers_audio.xcodec import BLOCK_SECONDS, OVERLAP_SECONDS, SemanticCodec


def load(
    path: str | Path,
    *,
    num_codebooks: int | None = None,
    bandwidth: float | None = None,
    block_seconds: float = BLOCK_SECONDS,
    overlap_seconds: float = OVERLAP_SECONDS,
) -> Codec:
    """Return a Higgs Audio V2 tokenizer of a folder or hub id, with all its codebooks, the first `num_codebooks`, or
    those of a `bandwidth` in kbit/s. Streams of codes come up to `block_seconds` late. Raises ValueError."""
    model = load_model(HiggsAudioV2TokenizerModel, path)
    family = "higgs_audio_v2_tokenizer"
    return Codec(SemanticCodec(family, model, num_codebooks, bandwidth, block_seconds, overlap_seconds))


class HiggsAudioV2TokenizerModel(XcodecModel):
    """Named like transformers' class: either reads the folders that it saves."""

    config_class = HiggsAudioV2TokenizerConfig
    base_model_prefix = "higgs_audio_v2_tokenizer"
    _keys_to_ignore_on_load_unexpected = ("semantic_model.masked_spec_embed",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i, quantizer in enumerate(self.quantizer.quantizers):
            self.quantizer.quantizers[i] = _ProjectedQuantizer(quantizer.codebook, config)

    def _extract_semantic_features(self, input_values: Tensor) -> Tensor:
        """[B, 1, T] -> [B, F, D], the mean over HuBERT's layers."""
        config = self.config
        wav = resample(input_values, config.sample_rate, config.semantic_sample_rate)[:, 0]
        hidden = self.semantic_model(F.pad(wav, (160, 160)), output_hidden_states=True).hidden_states
        return torch.stack(hidden, 1).mean(1)[:, :: max(1, config.semantic_downsample_factor)]


class _ProjectedQuantizer(nn.Module):
    """A codebook of `codebook_dim` between two linear layers."""

    def __init__(self, codebook: nn.Module, config: Any) -> None:
        super().__init__()
        self.codebook: Any = codebook
        self.project_in = nn.Linear(config.hidden_size, config.codebook_dim)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def encode(self, features: Tensor) -> Tensor:
        """[B, D, F] -> [B, F]"""
        return self.codebook.encode(self.project_in(features.transpose(1, 2)))

    def decode(self, indices: Tensor) -> Tensor:
        """[B, F] -> [B, D, F]"""
        return self.project_out(self.codebook.decode(indices)).transpose(1, 2)

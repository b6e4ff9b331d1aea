"""The semantic branch: features that say what is spoken, a small encoder for them, and a decoder that predicts them.

Features are computed in blocks of frames, each from the samples of its own block, a fixed past and a fixed future, so
that a stream gives what the whole recording gives, however long it is: `block` frames at once, from `past` samples
before them to `ahead` samples after them. Shapes: B recordings, n blocks, D features;
[B, past + n · block · hop + ahead] samples make [B, D, n · block].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from tokenizers_audio.audio import resample
from tokenizers_audio.loading import load_model, read_config
from tokenizers_audio.unified.config import UnifiedConfig
from tokenizers_audio.unified.layers import (
    CachedSequential,
    CausalConv,
    Elu,
    activation,
    full_precision,
    residual_units,
    wide,
)
from tokenizers_audio.unified.spectrum import LogMel

SPEECH_MODELS = ("hubert", "wavlm", "wav2vec2")


class MelStatistics(nn.Module):
    """Mean and standard deviation of each log-mel band over the four steps of a frame: [B, 2 · mels, F].

    Needs no pretrained model: formants and voicing instead of phonetic classes. Bands are scaled to about -1 … 1.
    """

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        self.step = config.hop // 4
        self.size = config.hop
        self.channels = 2 * config.mels
        self.block, self.past, self.ahead = 1, self.size - self.step, 0
        self.mels = LogMel(self.size, config.sample_rate, config.mels)

    @torch.no_grad()
    def forward(self, wav: Tensor) -> Tensor:
        steps = self.mels(wide(wav).unfold(-1, self.size, self.step)).transpose(1, 2).unflatten(-1, (-1, 4))
        return torch.cat([steps.mean(-1), steps.std(-1, correction=0)], 1)


class SpeechModelFeatures(nn.Module):
    """The mean of all hidden states of a frozen speech model, thinned out to the codec's frames: [B, D, F].

    Every block is encoded with the one before it and one frame after it, which bounds the attention of the model:
    latency is a block and a frame.
    """

    def __init__(self, model: PreTrainedModel, config: UnifiedConfig):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        about: Any = model.config
        rate = 16_000  # of every released model of these families
        stride = math.prod(about.conv_stride)
        if (config.hop * rate) % (config.sample_rate * stride):
            raise ValueError(
                f"a frame of {config.hop} samples at {config.sample_rate} Hz is no whole number of the semantic "
                f"model's steps ({stride} samples at {rate} Hz); choose other strides"
            )
        self.every = config.hop * rate // (config.sample_rate * stride)
        self.channels = int(about.hidden_size)
        self.block = config.semantic_block
        self.past, self.ahead = self.block * config.hop, config.hop
        self.normalise = about.feat_extract_norm == "layer"  # the others ignore the loudness anyway
        self.hop, self.rates = config.hop, (config.sample_rate, rate)

    def train(self, mode: bool = True) -> SpeechModelFeatures:
        return super().train(False)  # dropout in a frozen model would make its features random

    @torch.no_grad()
    def forward(self, wav: Tensor) -> Tensor:
        own = self.block * self.hop
        windows = wide(wav).unfold(-1, self.past + own + self.ahead, own)
        count = windows.shape[1]
        waves = resample(windows.flatten(0, 1), *self.rates)
        if self.normalise:
            waves = (waves - waves.mean(-1, keepdim=True)) / (waves.var(-1, keepdim=True, correction=0) + 1e-7).sqrt()
        with full_precision(wav):
            states = self.model(waves, output_hidden_states=True).hidden_states
        mean = torch.stack(states).mean(0)[:, :: self.every]
        first = self.past // self.hop
        return mean[:, first : first + self.block].unflatten(0, (-1, count)).flatten(1, 2).transpose(1, 2)


class SemanticEncoder(CachedSequential):
    """[B, D, F] features -> [B, semantic_dim, F]."""

    def __init__(self, config: UnifiedConfig, channels: int):
        width = config.semantic_dim
        super().__init__(CausalConv(channels, width, 3), *residual_units(width, (1, 1), activation("elu")), Elu())


class SemanticDecoder(CachedSequential):
    """[B, semantic_dim, F] -> [B, D, F] predicted features."""

    def __init__(self, config: UnifiedConfig, channels: int):
        width = config.semantic_dim
        super().__init__(*residual_units(width, (1, 1), activation("elu")), Elu(), CausalConv(width, channels, 3))


def load_speech_model(path: str | Path) -> PreTrainedModel:
    """Return a HuBERT, WavLM or Wav2Vec2 from a local folder or hub id."""
    model_type = read_config(path)["model_type"]
    if model_type not in SPEECH_MODELS:
        raise ValueError(f"{path}: a {model_type} model; the semantic branch takes {', '.join(SPEECH_MODELS)}")
    return load_model(AutoModel, path)


def build_speech_model(config: Mapping[str, Any], where: str) -> PreTrainedModel:
    """One of that configuration with random weights, to be filled in."""
    try:
        values = {k: v for k, v in config.items() if k != "model_type"}
        return AutoModel.from_config(AutoConfig.for_model(config["model_type"], **values))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: the speech model's configuration is damaged ({error})") from error

"""Small tokenizers of our own family for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import HubertConfig, HubertModel

from tests.support.codecs import HUBERT, speech
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer
from tokenizers_audio.unified.train import TrainConfig


def tiny_config(**changes: Any) -> UnifiedConfig:
    """On spectra: 24 kHz, 25 frames/s, 4 x 16 codes."""
    values: dict[str, Any] = dict(
        num_codebooks=4, codebook_size=16, codebook_dim=8, spectrum_hop=240, strides=(2, 2), channels=(16, 16, 16),
        dilations=(1,), activation="elu", acoustic_dim=16, semantic_dim=16, mels=20,
    )  # fmt: skip
    return UnifiedConfig(**values | changes)


def tiny_training(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = dict(
        steps=20, lr=5e-3, stft_windows=(512,), mel_windows=(512,), mel_bands=(40,), start_vectors=40,
        codebook_dropout=0.5, adversarial_after=None, discriminator_windows=(256,), discriminator_channels=4,
    )  # fmt: skip
    return TrainConfig(**values | changes)


def tiny(seed: int = 0, **changes: Any) -> UnifiedTokenizer:
    torch.manual_seed(seed)
    return UnifiedTokenizer(tiny_config(**changes))


def tiny_hubert(**changes: Any) -> HubertModel:
    torch.manual_seed(1)
    return HubertModel(HubertConfig(**HUBERT | changes)).eval()


def clips(count: int = 4, frames: int = 12) -> Tensor:
    """[count, frames · 960] pieces of human recordings at 24 kHz."""
    tokenizer = tiny()
    wav = torch.cat([speech(tokenizer, 1.0, key) for key in ("agent-alreadyon", "conf-locked", "agent-loginok")])
    return wav[2400 : 2400 + count * frames * 960].reshape(count, -1)

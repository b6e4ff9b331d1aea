"""Qwen2-Audio: a Whisper-style audio encoder over fixed 30 s windows, a linear projector and a Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
)

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.audio_encoder import check_min_frames, check_window, padded_mel
from audiorl.models.backbone import Backbone
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import chatml, chatml_template
from audiorl.models.speech import FrameLayout, branch_builder
from audiorl.models.tiny import seeded, tiny_decoder_sizes, tiny_extractor, tiny_tokenizer
from audiorl.models.weights import ModelSource, load_frontend, load_model
from audiorl.types import Message

_RELEASED_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
    "": "",  # the branch of a dualized model
}
"""By the prefix that a weight has in memory: the one that it has in released checkpoints."""


class Qwen2Audio(Backbone):
    """Backbone of Qwen2-Audio: 25 audio tokens a second, at most 30 s a clip."""

    audio_token: str | None = "<|AUDIO|>"
    processor_files: Mapping[str, Mapping[str, str]] = {
        "preprocessor_config.json": {"processor_class": "Qwen2AudioProcessor"}
    }

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        return chatml(messages, lambda clip, k: [f"Audio {k}: <|audio_bos|>", clip, "<|audio_eos|>\n"])

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        return ["<|audio_bos|>", clip, "<|audio_eos|>"]

    def chat_template(self) -> str | None:
        return chatml_template("Audio {k}: <|audio_bos|><|AUDIO|><|audio_eos|>\n")

    def save_model(self, model: PreTrainedModel, folder: str, source: ModelSource) -> None:
        # transformers 5.19 would write language_model.model.model.*, which vLLM does not read.
        weights = {}
        for name, weight in model.state_dict().items():
            prefix = next(p for p in _RELEASED_NAMES if name.startswith(p))
            weights[_RELEASED_NAMES[prefix] + name.removeprefix(prefix)] = weight
        model.save_pretrained(folder, state_dict=weights, save_original_format=False)

    def decoder(self, model: Any) -> Any:
        return model.model.language_model

    def audio_encoder(self, model: Any) -> Any:
        return model.model.audio_tower

    def projector(self, model: Any) -> Sequence[nn.Module]:
        return [model.model.multi_modal_projector]

    def tokens(self, model: Any, frames: int) -> int:
        return self._lengths(model, frames)[1]

    def encode_audio(self, model: Any, mels: Sequence[Tensor]) -> list[Tensor]:
        window = self._window(model)
        lengths = [self._lengths(model, mel.shape[1]) for mel in mels]
        for mel in mels:
            check_min_frames(mel.shape[1])
        padded = torch.stack([padded_mel(mel, window) for mel in mels])
        after_conv = torch.tensor([frames for frames, _ in lengths]).to(padded.device)
        valid = torch.arange(window // 2, device=padded.device) < after_conv[:, None]
        mask = valid[:, None, None, :].expand(-1, 1, window // 2, -1)
        hidden = self.audio_encoder(model)(padded, attention_mask=mask).last_hidden_state
        return [h[:tokens] for h, (_, tokens) in zip(hidden, lengths, strict=True)]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        return model.model.multi_modal_projector(encoder_output)

    def _window(self, model: Any) -> int:
        return 2 * int(self.audio_encoder(model).config.max_source_positions)

    def _lengths(self, model: Any, frames: int) -> tuple[int, int]:
        """Return the frames after the convolutions, and the audio tokens."""
        frames = check_window(frames, self._window(model), "Qwen2-Audio")
        after_conv, tokens = self.audio_encoder(model)._get_feat_extract_output_lengths(torch.tensor(frames))
        return int(after_conv), int(tokens)


def load(path: str | Path, config: ModelConfig, speech: FrameLayout | None = None) -> AudioPolicy:
    """Load Qwen2-Audio from a local folder or a hub id."""
    backbone = Qwen2Audio()
    model = load_model(Qwen2AudioForConditionalGeneration, path, config, branch_builder(backbone, speech))
    tokenizer, extractor = load_frontend(path)
    return AudioPolicy(model, tokenizer, extractor, backbone, config, speech)


def tiny(
    texts: Iterable[str] = (),
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab_size: int = 400,
    window: int = 10,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """Make a random Qwen2-Audio of the real class, small enough for tests. window: seconds of the longest clip."""
    tokenizer = tiny_tokenizer(texts, vocab_size)
    encoder = dict(d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80)
    whole = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(**encoder, max_source_positions=50 * window).to_dict(),
        text_config=Qwen2Config(**tiny_decoder_sizes(tokenizer, hidden, layers, 2048)).to_dict(),
        audio_token_index=int(tokenizer.convert_tokens_to_ids("<|AUDIO|>")),
    )
    model = seeded(Qwen2AudioForConditionalGeneration, whole, seed)
    return AudioPolicy(model, tokenizer, tiny_extractor(window), Qwen2Audio(), config)

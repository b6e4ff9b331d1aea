"""VibeVoice-ASR (Microsoft): an acoustic and a semantic tokenizer's latents, at 24 kHz, before Qwen2.

transformers adds noise to the acoustic latents in every call, of a width that is drawn, too. Two passes over a clip
would differ by more than two clips do, so there is none here: an encoder's output is its mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from audiorl.audio import AudioClip, seconds
from audiorl.models.families.generic import AudioLLM
from audiorl.models.features import Features
from audiorl.pictures import Picture
from audiorl.types import Message


class VibeVoiceASR(AudioLLM):
    """A token is 3,200 samples; the prompt says how long a clip is."""

    def audio_encoder(self, model: Any) -> Any:
        return nn.ModuleList([model.model.acoustic_tokenizer_encoder, model.model.semantic_tokenizer_encoder])

    def tokens(self, model: Any, samples: int) -> int:
        return -(-samples // int(model.config.acoustic_tokenizer_encoder_config.hop_length))

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        rows = []
        for clip in features:
            kinds = []
            for encoder in self.audio_encoder(model):
                cache, parts = None, []
                for samples in clip["input_values"].split(model.config.acoustic_tokenizer_chunk_size, -1):
                    out = encoder(samples, padding_cache=cache, use_cache=True)
                    cache = out.padding_cache
                    parts.append(out.latents[0])
                kinds.append(torch.cat(parts))
            rows.append(torch.cat(kinds, 1))
        return rows

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        width = model.config.acoustic_tokenizer_encoder_config.hidden_size
        projected: Tensor = self.projector(model)[0](*encoder_output.split([width, encoder_output.shape[1] - width], 1))
        return projected

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip | Picture]:
        pieces, mark = super().chat(messages), self.processor.audio_duration_token
        lengths = [f"{seconds(piece):.2f}" for piece in pieces if isinstance(piece, AudioClip)]
        for i, piece in enumerate(pieces):
            while isinstance(piece, str) and mark in piece:
                piece = pieces[i] = piece.replace(mark, lengths.pop(0), 1)
        return pieces

"""Whisper as a policy: an encoder-decoder that recognises speech (Radford et al. 2022, arXiv 2212.04356).

A prompt is a recording of up to 30 s with a request. The request for a transcript that `asr_prompt` writes becomes the
tokens of language and task that Whisper was trained with. Hotwords, and any other request, stand before them, where
Whisper reads the text that came before a recording; a request is something for training to teach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.modeling_whisper import WhisperDecoder

from audiorl.config import ModelConfig
from audiorl.data.schema import FieldError
from audiorl.languages import whisper_code
from audiorl.models.cross_attention import CrossAttentionDecoder
from audiorl.models.families.encoder_decoder import EncoderDecoder
from audiorl.models.features import HOP, RATE, Features, log_mels
from audiorl.models.policy import AudioPolicy
from audiorl.models.tiny import seeded, tiny_extractor, tiny_whisper_tokenizer


class WhisperMemoryDecoder(CrossAttentionDecoder, WhisperDecoder):
    """A `WhisperDecoder` for packed batches."""

    norm_names = "self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"
    output_name = "out_proj"
    last_norm = "layer_norm"
    embed_positions: Any

    def place(self, embeds: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = embeds + self.embed_positions.weight[positions]
        return out

    def feed_forward(self, layer: Any, x: Tensor) -> Tensor:
        out: Tensor = layer.fc2(layer.activation_fn(layer.fc1(x)))
        return out


class WhisperBackbone(EncoderDecoder):
    """As many audio tokens as its window has, 1500, for every clip of up to 30 s.

    The decoder needs the silence that fills the window. With the frames of a clip and two seconds more, Whisper base
    had a word error rate of 50 % on 90 short prompts in three languages, with the whole window 30 %.
    """

    name = "Whisper"
    audio_token: str | None = "<|startoflm|>"
    """A token of its vocabulary that nothing else uses; its embedding is never read."""
    answer_prefix: str = " "
    model_class = WhisperForConditionalGeneration
    decoder_class = WhisperMemoryDecoder
    processor_files: Mapping[str, Mapping[str, str]] = {
        "preprocessor_config.json": {"processor_class": "WhisperProcessor"}
    }
    multilingual = True
    room = 448 // 2 - 1
    """Tokens of text before a recording: half of the decoder's positions, less the token before it."""

    def request(self, text: str) -> str:
        return f"<|startofprev|> {text}<|startoftranscript|><|notimestamps|>"

    def transcript(self, language: str, hotwords: Sequence[str]) -> str:
        before, code = self._context(hotwords), whisper_code(language) if language else ""
        if not self.multilingual:
            if code not in ("", "en"):
                what = f"this Whisper knows English only, the recording's language is {language!r}"
                raise FieldError("language", f"{what}; leave it out")
            return f"{before}<|startoftranscript|><|notimestamps|>"
        self.check_language(language, f"<|{code}|>" in self.tokenizer.get_added_vocab())
        return f"{before}<|startoftranscript|><|{code}|><|transcribe|><|notimestamps|>"

    def _context(self, hotwords: Sequence[str]) -> str:
        """Return the hotwords where Whisper reads what came before a recording, "" for none. Raises FieldError for more
        than the room that it was trained with."""
        text = ", ".join(hotwords)
        tokens = len(self.tokenizer.encode(f" {text}", add_special_tokens=False)) if text else 0
        if tokens > self.room:
            what = f"{len(hotwords)} hotwords take {tokens} tokens, Whisper reads {self.room} before a recording"
            less = "list fewer, or of a file those that a row says and --distractors N others"
            raise FieldError("hotwords", f"{what}; {less}")
        return f"<|startofprev|> {text}" if text else ""

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        return 2 * self.positions(model, 0) * HOP / RATE

    def positions(self, model: Any, samples: int) -> int:
        return int(self.audio_encoder(model).config.max_source_positions)

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        window = 2 * self.positions(model, 0) * HOP
        return [{"input_features": mel[None]} for mel in log_mels(extractor, wavs, device, window)]

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        windows = torch.cat([clip["input_features"] for clip in features])
        return list(self.audio_encoder(model)(windows).last_hidden_state)

    def read_facts(self, model: Any) -> None:
        self.multilingual = getattr(model.generation_config, "is_multilingual", model.config.vocab_size >= 51_865)
        self.room = model.config.max_target_positions // 2 - 1


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
    """Make a random multilingual Whisper of the real class, small enough for tests. window: seconds of a clip."""
    tokenizer = tiny_whisper_tokenizer(texts, vocab_size)
    whole = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=hidden,
        encoder_layers=2,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * hidden,
        decoder_ffn_dim=2 * hidden,
        num_mel_bins=80,
        max_source_positions=50 * window,
        max_target_positions=448,
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=int(tokenizer.convert_tokens_to_ids("<|startoftranscript|>")),
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model = seeded(WhisperForConditionalGeneration, whole, seed)
    extractor = tiny_extractor(window)
    backbone = WhisperBackbone(tokenizer, extractor)
    backbone.use_packed_decoder(model)
    model.generation_config.is_multilingual = True
    model.generation_config._from_model_config = False  # else transformers makes it again when the model is loaded
    return AudioPolicy(model, tokenizer, extractor, backbone, config)

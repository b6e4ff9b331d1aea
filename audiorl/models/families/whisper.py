"""Whisper as a policy: an encoder-decoder that recognises speech (Radford et al. 2022, arXiv 2212.04356).

A prompt is a recording of up to 30 s with a request. The request for a transcript that `asr_prompt` writes becomes the
tokens of language and task that Whisper was trained with. Any other request stands before them, where Whisper reads the
text that came before a recording, and is something for training to teach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, WhisperConfig, WhisperForConditionalGeneration

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.data.prompts import transcript_language
from audiorl.data.schema import FieldError
from audiorl.languages import whisper_code
from audiorl.models.audio_encoder import check_min_frames, check_window, padded_mel
from audiorl.models.backbone import Backbone
from audiorl.models.cross_attention import CrossAttentionDecoder
from audiorl.models.policy import AudioPolicy
from audiorl.models.tiny import seeded, tiny_extractor, tiny_whisper_tokenizer
from audiorl.models.weights import load_frontend, load_model
from audiorl.types import Message


class WhisperBackbone(Backbone):
    """As many audio tokens as its window has, 1500, for every clip of up to 30 s.

    The decoder needs the silence that fills the window. With the frames of a clip and two seconds more, Whisper base
    had a word error rate of 50 % on 90 short prompts in three languages, with the whole window 30 %.
    """

    audio_token: str | None = "<|startoflm|>"
    """A token of its vocabulary that nothing else uses; its embedding is never read."""
    answer_prefix: str = " "
    processor_files: Mapping[str, Mapping[str, str]] = {
        "preprocessor_config.json": {"processor_class": "WhisperProcessor"}
    }

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multilingual: bool):
        self.tokenizer, self.multilingual = tokenizer, multilingual

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        if len(messages) != 1 or messages[0].role != "user":
            raise ValueError("Whisper reads one user turn, a recording and a request; it has no conversation")
        clips = [c for c in messages[0].content if isinstance(c, AudioClip)]
        request = "".join(c for c in messages[0].content if isinstance(c, str)).strip()
        if len(clips) != 1:
            raise ValueError(f"Whisper reads one recording, got {len(clips)}")
        return [clips[0], self._request_tokens(request)]

    def _request_tokens(self, request: str) -> str:
        language = transcript_language(request)
        if language is None:
            return f"<|startofprev|> {request}<|startoftranscript|><|notimestamps|>"
        code = whisper_code(language) if language else ""
        if not self.multilingual:
            if code not in ("", "en"):
                what = f"this Whisper knows English only, the recording's language is {language!r}"
                raise FieldError("language", f"{what}; leave it out")
            return "<|startoftranscript|><|notimestamps|>"
        if not language:
            what = 'Whisper needs the language of a recording: give the row "language", for example "es"'
            raise FieldError("language", what)
        if f"<|{code}|>" not in self.tokenizer.get_added_vocab():
            raise FieldError("language", f"this Whisper has no language {language!r}")
        return f"<|startoftranscript|><|{code}|><|transcribe|><|notimestamps|>"

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        raise ValueError("Whisper reads one recording before it writes; streams need a decoder-only model")

    def decoder(self, model: Any) -> Any:
        return model.model.decoder

    def head(self, model: Any) -> nn.Linear:
        return model.proj_out

    def audio_encoder(self, model: Any) -> Any:
        return model.model.encoder

    def tokens(self, model: Any, frames: int) -> int:
        positions = int(self.audio_encoder(model).config.max_source_positions)
        check_window(frames, 2 * positions, "Whisper")
        check_min_frames(frames)
        return positions

    def encode_audio(self, model: Any, mels: Sequence[Tensor]) -> list[Tensor]:
        encoder = self.audio_encoder(model)
        padded = [padded_mel(mel, 2 * self.tokens(model, mel.shape[1])) for mel in mels]
        return list(encoder(torch.stack(padded)).last_hidden_state)

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        return encoder_output


def use_packed_decoder(model: Any) -> None:
    """Give a Whisper of transformers the decoder that takes packed batches."""
    model.model.decoder.__class__ = CrossAttentionDecoder


def load(path: str | Path, config: ModelConfig) -> AudioPolicy:
    """Load Whisper from a local folder or a hub id."""
    model = load_model(WhisperForConditionalGeneration, path, config, use_packed_decoder)
    tokenizer, extractor = load_frontend(path)
    multilingual = getattr(model.generation_config, "is_multilingual", model.config.vocab_size >= 51_865)
    return AudioPolicy(model, tokenizer, extractor, WhisperBackbone(tokenizer, multilingual), config)


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
    use_packed_decoder(model)
    model.generation_config.is_multilingual = True
    model.generation_config._from_model_config = False  # else transformers makes it again when the model is loaded
    return AudioPolicy(model, tokenizer, tiny_extractor(window), WhisperBackbone(tokenizer, True), config)

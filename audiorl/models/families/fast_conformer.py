"""Cohere ASR and Canary: a FastConformer encoder (Rekesh et al. 2023, arXiv 2305.05084) before a Transformer decoder.

The decoder begins with a context, then tokens of the language and of what to write (punctuation, numbers, times). A
request for a transcript leaves the context empty; hotwords and any other request become it: something for training to
teach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CanaryConfig,
    CanaryForConditionalGeneration,
    CohereAsrConfig,
    CohereAsrFeatureExtractor,
    CohereAsrForConditionalGeneration,
    ParakeetFeatureExtractor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.canary.modeling_canary import CanaryDecoder
from transformers.models.cohere_asr.modeling_cohere_asr import CohereAsrDecoder

from audiorl.config import ModelConfig
from audiorl.models.cross_attention import CrossAttentionDecoder
from audiorl.models.families.encoder_decoder import EncoderDecoder
from audiorl.models.policy import AudioPolicy
from audiorl.models.tiny import seeded, tiny_sentencepiece

_AFTER = "<|noitn|><|notimestamp|><|nodiarize|>"
_SPECIAL = "<unk>", "<|startoftranscript|>", "<|endoftext|>", "<pad>", "<|nospeech|>", "<|startofcontext|>"
_LANGUAGES = "<|en|>", "<|es|>", "<|fr|>", "<|it|>", "<|ru|>"


class _Placed(CrossAttentionDecoder):
    pos_emb: nn.Module
    embedding_layernorm: nn.LayerNorm

    def place(self, embeds: Tensor, positions: Tensor) -> Tensor:
        places: Tensor = self.pos_emb(positions)
        out: Tensor = self.embedding_layernorm(embeds + places.to(embeds.dtype))
        return out


class CohereMemoryDecoder(_Placed, CohereAsrDecoder):
    """A `CohereAsrDecoder` for packed batches."""


class CanaryMemoryDecoder(_Placed, CanaryDecoder):
    """A `CanaryDecoder` for packed batches."""


class Canary(EncoderDecoder):
    """A token for every 80 ms."""

    name = "Canary"
    audio_token: str | None = "<|nospeech|>"
    """Where it stands for audio its embedding is not read."""
    model_class: type[PreTrainedModel] = CanaryForConditionalGeneration
    decoder_class: type[CrossAttentionDecoder] = CanaryMemoryDecoder
    processor_files: Mapping[str, Mapping[str, str]] = {"processor_config.json": {"processor_class": "CanaryProcessor"}}
    before = ""
    """What stands before the context."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, extractor: Any):
        super().__init__(tokenizer, extractor)
        tokenizer.split_special_tokens = False  # a folder may ask for it: <|en|> would be read letter by letter

    def transcript(self, language: str, hotwords: Sequence[str]) -> str:
        self.check_language(language, f"<|{language}|>" in self.tokenizer.get_vocab())
        if hotwords or self.tokenizer.chat_template is None:
            return self._written(language, ", ".join(hotwords))
        asked = {"source_language": language, "target_language": language, "punctuation": True}
        turn = {"role": "user", "content": [{"type": "audio"}, {"type": "text", **asked}]}
        return str(self.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True))

    def request(self, text: str) -> str:
        return self._written("en", text)

    def _written(self, language: str, context: str = "") -> str:
        languages = f"<|{language}|>" * 2  # what is heard, and what is written
        start = f"{self.before}<|startofcontext|>{context}<|startoftranscript|><|emo:undefined|>"
        return f"{start}{languages}<|pnc|>{_AFTER}"

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        encoder = self.audio_encoder(model).config
        frames = encoder.max_position_embeddings * encoder.subsampling_factor
        return float(frames * self.extractor.hop_length / self.extractor.sampling_rate)

    def positions(self, model: Any, samples: int) -> int:
        frames = torch.tensor(samples // self.extractor.hop_length)
        return int(self.audio_encoder(model)._get_subsampling_output_length(frames))


class CohereAsr(Canary):
    """The encoder's output gets the decoder's width in the decoder."""

    name = "Cohere ASR"
    model_class = CohereAsrForConditionalGeneration
    decoder_class = CohereMemoryDecoder
    processor_files: Mapping[str, Mapping[str, str]] = {
        "processor_config.json": {"processor_class": "CohereAsrProcessor"}
    }
    before = "▁"

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        return float(self.extractor.max_audio_clip_s)  # of a longer one the extractor makes several

    def projector(self, model: Any) -> Sequence[nn.Module]:
        return [model.model.decoder.proj]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        out: Tensor = model.model.decoder.proj(encoder_output)
        return out


def tiny(
    texts: Iterable[str] = (),
    kind: str = "canary",
    *,
    hidden: int = 32,
    layers: int = 2,
    vocab_size: int = 400,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """Make a random Canary or Cohere ASR of the real class, small enough for tests."""
    control = "<|emo:undefined|>", "<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"
    tokenizer = tiny_sentencepiece(texts, vocab_size, [*_SPECIAL, *control, *_LANGUAGES])
    tokenizer.pad_token = "<pad>"
    encoder: dict[str, Any] = dict(
        model_type="parakeet_encoder",
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        subsampling_conv_channels=8,
        num_mel_bins=16,
        scale_input=False,
        max_position_embeddings=5000 if kind == "cohere_asr" else 125,
    )
    decoder: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        intermediate_size=2 * hidden,
        max_position_embeddings=448,
    )
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    backbone_class = CohereAsr if kind == "cohere_asr" else Canary
    start = int(tokenizer.convert_tokens_to_ids(backbone_class.before or "<|startofcontext|>"))
    if kind == "canary":
        encoder["hidden_size"] = hidden  # it has nothing between the two
        whole = CanaryConfig(
            encoder_config=encoder,
            decoder_config=decoder | ids,
            vocab_size=len(tokenizer),
            decoder_start_token_id=start,
            **ids,
        )
        extractor = ParakeetFeatureExtractor(feature_size=16)
    else:
        whole = CohereAsrConfig(encoder_config=encoder, **decoder, decoder_start_token_id=start, **ids)
        extractor = CohereAsrFeatureExtractor(feature_size=16, max_audio_clip_s=10.0, overlap_chunk_second=2.0)
    model = seeded(backbone_class.model_class, whole, seed)
    backbone = backbone_class(tokenizer, extractor)
    backbone.use_packed_decoder(model)
    return AudioPolicy(model, tokenizer, extractor, backbone, config)

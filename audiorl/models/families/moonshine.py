"""Moonshine as a policy: an encoder-decoder over the waveform itself (Jeffries et al. 2024, arXiv 2410.15608).

Its released models know one language each. The decoder begins with one token, so that there is no request but the one
for a transcript.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoder, apply_rotary_pos_emb

from audiorl.config import ModelConfig
from audiorl.data.schema import FieldError
from audiorl.models.cross_attention import CrossAttentionDecoder, Rotation
from audiorl.models.families.encoder_decoder import EncoderDecoder
from audiorl.models.policy import AudioPolicy
from audiorl.models.tiny import seeded, tiny_sentencepiece


class MoonshineMemoryDecoder(CrossAttentionDecoder, MoonshineDecoder):
    """A `MoonshineDecoder` for packed batches."""

    rotary_emb: Any

    def place(self, embeds: Tensor, positions: Tensor) -> Tensor:
        return embeds

    def rotation(self, hidden: Tensor, positions: Tensor) -> Rotation | None:
        cos, sin = self.rotary_emb(hidden, positions)
        return lambda query, key: apply_rotary_pos_emb(query, key, cos, sin)


class Moonshine(EncoderDecoder):
    """A token for every 384 samples."""

    name = "Moonshine"
    audio_token: str | None = "<unk>"
    """No text becomes it, since the tokenizer falls back to bytes; its embedding is never read."""
    model_class = MoonshineForConditionalGeneration
    decoder_class = MoonshineMemoryDecoder
    processor_files: Mapping[str, Mapping[str, str]] = {
        "preprocessor_config.json": {"processor_class": "Wav2Vec2Processor"}
    }

    def transcript(self, language: str, hotwords: Sequence[str]) -> str:
        if hotwords:
            raise FieldError("hotwords", "Moonshine has no place for hotwords; leave them out")
        return str(self.tokenizer.bos_token)

    def request(self, text: str) -> str:
        raise ValueError("Moonshine has no place for a request in words; ask for the transcript (audiorl.asr_prompt)")

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        return 64.0  # moonshine's own code refuses more

    def positions(self, model: Any, samples: int) -> int:
        return int(model._get_feat_extract_output_lengths(samples))


def tiny(
    texts: Iterable[str] = (),
    *,
    hidden: int = 32,
    layers: int = 2,
    vocab_size: int = 400,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """Make a random Moonshine of the real class, small enough for tests."""
    tokenizer = tiny_sentencepiece(texts, vocab_size, ("<unk>", "<s>", "</s>"))
    whole = MoonshineConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=layers,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        max_position_embeddings=194,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = seeded(MoonshineForConditionalGeneration, whole, seed)
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    backbone = Moonshine(tokenizer, extractor)
    backbone.use_packed_decoder(model)
    return AudioPolicy(model, tokenizer, extractor, backbone, config)

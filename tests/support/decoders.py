"""Tiny decoders by family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy
from audiorl.models.families.text import TextDecoder
from tests.conftest import make_text

SIZE = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


def of_class(
    model_class: Callable[[object], PreTrainedModel],
    config_class: type,
    tied: bool,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ModelConfig | None = None,
    spare: int = 0,
) -> AudioPolicy:
    """`spare`: rows of the embeddings beyond the tokenizer's."""
    tokenizer = tokenizer or make_text().tokenizer
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    size = config_class(vocab_size=len(tokenizer) + spare, tie_word_embeddings=tied, **SIZE, **ends)
    torch.manual_seed(0)
    return AudioPolicy(model_class(size), tokenizer, None, TextDecoder(tokenizer), config)


FAMILIES: dict[str, Callable[[], AudioPolicy]] = {
    "qwen2": make_text,
    "llama": lambda: of_class(LlamaForCausalLM, LlamaConfig, tied=False),
    "qwen3-tied": lambda: of_class(Qwen3ForCausalLM, Qwen3Config, tied=True),
}

"""Tiny text models and Whisper models of the real classes, as folders: what `audiorl graft` joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.conftest import TEXTS

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
SIZE = dict(
    hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1, pad_token_id=None,
)  # fmt: skip
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"


def tokenizer(template: str | None = TEMPLATE, sequence: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE without any token of a speech model, which puts <s> in front of every text, as Llama's do.

    With `sequence` by the second of two steps, as Llama 3's does.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    steps = [processors.ByteLevel(trim_offsets=False), begin]
    backend.post_processor = processors.Sequence(steps) if sequence else begin
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def save_llm(
    folder: Path,
    kind: str = "llama",
    *,
    tied: bool = True,
    template: str | None = TEMPLATE,
    sequence: bool = False,
    **changes: Any,
) -> Path:
    """A random text model whose every weight matters, with its tokenizer.

    Its vocabulary has one row more than the tokenizer: transformers gives Qwen2's another token when it is loaded.
    """
    model_class, config_class = CLASSES[kind]
    made = tokenizer(template, sequence)
    sizes = {**SIZE, "vocab_size": len(made) + 1, "tie_word_embeddings": tied, **changes}
    torch.manual_seed(0)
    model = model_class(config_class(**sizes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def save_whisper(folder: Path, *, extractor: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A random Whisper model of 30 s windows with its feature extractor."""
    sizes = dict(
        vocab_size=400, num_mel_bins=80, d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64, max_source_positions=1500,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(1)
    WhisperForConditionalGeneration(WhisperConfig(**{**sizes, **changes})).save_pretrained(folder)
    WhisperFeatureExtractor(**{"feature_size": 80, **(extractor or {})}).save_pretrained(folder)
    return folder

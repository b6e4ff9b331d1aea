"""Parts of the families' `tiny` models: tokenizers of the real classes over a small byte-level BPE, sizes, weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)

SPECIAL = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
LLAMA_SPECIAL = [
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
    "<|audio_out_bos|>",
    "<|AUDIO_OUT|>",
    "<|reserved_special_token_6|>",
    "<|audio_eos|>",
]
WHISPER_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in ("en", "es", "fr", "it", "ru")),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
"""Plain text that a tiny model should not have to spell."""
ALWAYS = ("system\nYou are a helpful assistant.", "user\n", "assistant\n", "Audio 1: ")


def tiny_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries (256 bytes included) with Qwen's special tokens."""
    vocab, merges = _train(Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer, texts, vocab_size)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=SPECIAL,
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.add_tokens(TAGS)
    return tokenizer


def tiny_llama_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` entries with Llama 3's special tokens, as Higgs uses them."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _train(backend, texts, vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|end_of_text|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(LLAMA_SPECIAL, special_tokens=True)
    return tokenizer


def tiny_whisper_tokenizer(texts: Iterable[str], vocab_size: int) -> WhisperTokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries with the special tokens of a multilingual Whisper."""
    vocab, merges = _train(WhisperTokenizer(vocab={}, merges=[]).backend_tokenizer, texts, vocab_size)
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens(list(WHISPER_SPECIAL), special_tokens=True)
    return tokenizer


def tiny_sentencepiece(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a BPE of at most `vocab_size` entries that writes spaces as SentencePiece does and falls back to bytes.

    special: its first tokens, the unknown one first, then what begins and what ends a text.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    vocab, merges = _train(backend, texts, vocab_size)
    pieces = dict.fromkeys([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *vocab])
    backend.model = BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token=special[0], byte_fallback=True)
    spaces = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(list(spaces))
    unk, bos, eos = special[:3]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unk, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


def _train(backend: Tokenizer, texts: Iterable[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train `backend` in place. Returns its vocabulary and merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*texts, *(text for text in ALWAYS for _ in range(1000))], trainer)
    trained = json.loads(backend.to_str())["model"]
    pairs = (m.split(" ") if isinstance(m, str) else m for m in trained["merges"])
    return trained["vocab"], [(left, right) for left, right in pairs]


def tiny_decoder_sizes(tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int, positions: int) -> dict[str, Any]:
    """Return the config of a Llama-like decoder with 4 heads and 2 key-value heads."""
    return dict(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_extractor(seconds: int = 30) -> WhisperFeatureExtractor:
    """Return Whisper's feature extractor for windows of so many seconds."""
    return WhisperFeatureExtractor(feature_size=80, n_fft=400, hop_length=160, chunk_length=seconds)


def seeded(model_class: Any, config: Any, seed: int, **options: Any) -> Any:
    """Make a model with random weights that depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config, **options)

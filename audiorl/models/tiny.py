"""The tokenizers of the tiny models: those of Qwen and Higgs, class and special tokens, over a small byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer, WhisperTokenizer

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
ALWAYS = (
    "system\nYou are a helpful assistant.",
    "user\n",
    "assistant\n",
    "Audio 1: ",
)


def tiny_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Byte-level BPE of at most `vocab_size` entries (256 bytes included) plus Qwen's special tokens."""
    blank = Qwen2Tokenizer(vocab={}, merges=[])
    backend = blank.backend_tokenizer
    _train(backend, texts, vocab_size)
    import json

    trained = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(m) if not isinstance(m, str) else tuple(m.split(" ")) for m in trained["merges"]],
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=SPECIAL,
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.add_tokens(TAGS)
    return tokenizer


def tiny_llama_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` entries plus Llama 3's special tokens, as Higgs uses them."""
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
    """Byte-level BPE of at most `vocab_size` entries plus the special tokens of a multilingual Whisper."""
    import json

    backend = WhisperTokenizer(vocab={}, merges=[]).backend_tokenizer
    _train(backend, texts, vocab_size)
    trained = json.loads(backend.to_str())["model"]
    tokenizer = WhisperTokenizer(vocab=trained["vocab"], merges=[tuple(m) for m in trained["merges"]])
    tokenizer.add_tokens(list(WHISPER_SPECIAL), special_tokens=True)
    return tokenizer


def _train(backend: Tokenizer, texts: Iterable[str], vocab_size: int) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*texts, *(text for text in ALWAYS for _ in range(1000))], trainer)

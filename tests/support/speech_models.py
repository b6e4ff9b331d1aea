"""Small speech models of the real classes, saved as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    HubertConfig,
    HubertForCTC,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WavLMConfig,
    WavLMForXVector,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

WINDOW = 3
"""Seconds that the tiny Whisper hears at once, in place of 30."""

SPECIAL = ("endoftext", "startoftranscript", "en", "es", "translate", "transcribe", "startoflm", "startofprev")
SPECIAL += ("nospeech", "notimestamps")


def whisper_tokenizer(folder: Path) -> dict[str, int]:
    """Writes tokenizer.json: bytes as text, Whisper's special tokens and a few timestamps after them."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    tokenizer.add_special_tokens([f"<|{i * 0.02:.2f}|>" for i in range(1501)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return {name: tokenizer.token_to_id(f"<|{name}|>") for name in SPECIAL}


def save_whisper(folder: Path, multilingual: bool = True) -> Path:
    """A random Whisper with two layers that speaks in bytes."""
    tokens = whisper_tokenizer(folder)
    torch.manual_seed(0)
    end = tokens["endoftext"]
    config = WhisperConfig(
        vocab_size=256 + len(SPECIAL) + 1501, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=50 * WINDOW, max_target_positions=32, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, decoder_start_token_id=tokens["startoftranscript"], suppress_tokens=None,
        begin_suppress_tokens=None, init_std=0.3,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    languages = {"lang_to_id": {f"<|{c}|>": tokens[c] for c in ("en", "es")}} if multilingual else {}
    tasks = {"task_to_id": {t: tokens[t] for t in ("translate", "transcribe")}} if multilingual else {}
    model.generation_config = GenerationConfig(
        is_multilingual=multilingual, max_length=32, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=tokens["startoftranscript"], no_timestamps_token_id=tokens["notimestamps"],
        prev_sot_token_id=tokens["startofprev"], max_initial_timestamp_index=50, return_timestamps=False, **languages,
        **tasks,
    )  # fmt: skip
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW).save_pretrained(folder)
    WhisperTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def save_ctc(folder: Path, norm: str = "layer") -> Path:
    """A random recogniser with a CTC head over letters: HuBERT with layer norm, Wav2Vec2 with group norm."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer", do_normalize=True).save_pretrained(folder)
    config_class, model_class = (HubertConfig, HubertForCTC) if norm == "layer" else (Wav2Vec2Config, Wav2Vec2ForCTC)
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=len(letters), feat_extract_norm=norm, pad_token_id=0, **SMALL))
    model.save_pretrained(folder)
    return folder


def save_xvector(folder: Path) -> Path:
    """A random WavLM with X-vectors of 24 numbers."""
    Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = WavLMConfig(feat_extract_norm="layer", tdnn_dim=(32, 32, 32, 32, 64), xvector_output_dim=24, **SMALL)
    WavLMForXVector(config).save_pretrained(folder)
    return folder


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "initializer_range": 0.2, "do_stable_layer_norm": False,
}  # fmt: skip

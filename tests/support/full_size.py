"""A Qwen2.5-Omni checkpoint of the released 3B model's widths, two layers deep, with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, WhisperFeatureExtractor

from audiorl.models.tiny import tiny_tokenizer

TOKENS = {
    "audio_token_index": "<|AUDIO|>", "image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>",
    "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
    "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
}  # fmt: skip


def save_full_size(folder: Path) -> int:
    """Write the whole model's checkpoint in bfloat16, tokenizer and extractor; return the number of parameters."""
    tokenizer = tiny_tokenizer(["Which phrase is spoken? Think, then answer."] * 10, 640)
    text = dict(
        hidden_size=2048, intermediate_size=11008, num_attention_heads=16, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=151_936, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )  # fmt: skip
    audio = dict(
        d_model=1280, encoder_layers=2, encoder_attention_heads=20, encoder_ffn_dim=5120, num_mel_bins=128,
        n_window=100, output_dim=2048,
    )  # fmt: skip
    vision = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=2048)
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    thinker = dict(text_config=text, audio_config=audio, vision_config=vision, **tokens)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2_5OmniForConditionalGeneration(
            Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
        )
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())

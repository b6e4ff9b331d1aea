"""A Qwen2.5-Omni checkpoint of the released 3B model's widths, two layers deep, with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, WhisperFeatureExtractor

from audiorl.models.tiny import tiny_tokenizer


def save_full_size(folder: Path, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write the whole model's checkpoint (weights under `thinker.`), tokenizer and extractor; returns parameters."""
    tokenizer = tiny_tokenizer(["Which phrase is spoken? Think, then answer."] * 10, 640)

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    config = Qwen2_5OmniConfig(
        thinker_config=dict(
            text_config=dict(
                hidden_size=2048,
                intermediate_size=11008,
                num_attention_heads=16,
                num_key_value_heads=2,
                num_hidden_layers=layers,
                vocab_size=151_936,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            ),
            audio_config=dict(
                d_model=1280,
                encoder_layers=layers,
                encoder_attention_heads=20,
                encoder_ffn_dim=5120,
                num_mel_bins=128,
                n_window=100,
                output_dim=2048,
            ),
            vision_config=dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=2048),
            audio_token_index=token("<|AUDIO|>"),
            image_token_index=token("<|IMAGE|>"),
            video_token_index=token("<|VIDEO|>"),
            audio_start_token_id=token("<|audio_bos|>"),
            audio_end_token_id=token("<|audio_eos|>"),
            vision_start_token_id=token("<|vision_bos|>"),
            vision_end_token_id=token("<|vision_eos|>"),
        ),
        enable_audio_output=False,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Qwen2_5OmniForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())

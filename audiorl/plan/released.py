"""Configurations of released models, so that one can plan for a model before downloading it.

The numbers are those of the config.json of each checkpoint; what is left out is the default of transformers' class.
They were checked against what the authors say of their models: Qwen2.5-Omni's decoder has the 7.6 B parameters of
Qwen2.5-7B (arXiv 2503.20215), Qwen3-Omni's encoders 650 M and 540 M and its thinker 30 B (arXiv 2509.17765), Higgs
Audio V2 a 3.6 B decoder with 2.2 B in its audio FFNs (its model card), Whisper large 1.55 B (arXiv 2212.04356).
"""

from __future__ import annotations

from typing import Any

_TOWER = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}


def _qwen25_omni(**text: int) -> dict[str, Any]:
    hidden = text["hidden_size"]
    return {
        "model_type": "qwen2_5_omni_thinker",
        "audio_config": {**_TOWER, "num_mel_bins": 128, "n_window": 100, "output_dim": hidden},
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": hidden,
        },
        "text_config": {**text, "tie_word_embeddings": False},
        "tie_word_embeddings": False,
    }


RELEASED: dict[str, dict[str, Any]] = {
    "qwen2.5-omni-3b": _qwen25_omni(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
    ),
    "qwen2.5-omni-7b": _qwen25_omni(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    "qwen3-omni-30b-a3b": {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_config": {**_TOWER, "num_mel_bins": 128, "n_window": 50, "output_dim": 2048},
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 2048,
        },
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 152064,
        },
    },
    "qwen2-audio-7b": {
        "model_type": "qwen2_audio",
        "audio_config": {"model_type": "qwen2_audio_encoder", **_TOWER, "num_mel_bins": 128},
        "text_config": {"model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 156032},
    },
    "whisper-large-v3": {
        "model_type": "whisper",
        "d_model": 1280,
        "encoder_layers": 32,
        "decoder_layers": 32,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
        "num_mel_bins": 128,
        "vocab_size": 51866,
    },
    "higgs-audio-v2-3b": {"model_type": "higgs_audio_v2", "num_codebooks": 8, "codebook_size": 1026},
}
"""By the name that `audiorl doctor --plan` takes."""

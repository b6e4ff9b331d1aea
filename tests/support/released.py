"""A tiny Omni model as it is released: thinker, talker and vocoder in one checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from audiorl.models import AudioPolicy
from audiorl.models.weights import read_copied


def save_released(policy: AudioPolicy, folder: Path) -> Qwen2_5OmniForConditionalGeneration:
    """Save the thinker of `policy` with random other parts to `folder`, by transformers alone."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    whole = Qwen2_5OmniForConditionalGeneration(
        Qwen2_5OmniConfig(
            thinker_config=policy.model.config.to_dict(),
            enable_audio_output=True,
            talker_config=dict(
                vocab_size=64, embedding_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=2, head_dim=16, rope_parameters=rope,
            ),
            token2wav_config=dict(
                dit_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16),
                bigvgan_config=dict(upsample_initial_channel=64),
            ),
        )
    )  # fmt: skip
    names = whole.thinker.state_dict().keys()  # transformers moved the parts that audiorl copies below `model.` in 5.21
    copied = {n if n in names else f"model.{n}": t for n, t in read_copied(policy.source.copied).items()}
    whole.thinker.load_state_dict({**policy.model.state_dict(), **copied})
    whole.save_pretrained(folder)
    assert policy.extractor is not None
    policy.tokenizer.save_pretrained(folder)
    policy.extractor.save_pretrained(folder)
    torch.save({"Ethan": {"bos_token": torch.tensor(1)}}, folder / "spk_dict.pt")
    return whole

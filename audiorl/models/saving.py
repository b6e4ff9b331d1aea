"""A policy as a folder that `load_policy` and transformers read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from audiorl.models.lora import save_adapter

if TYPE_CHECKING:
    from audiorl.models.policy import AudioPolicy


def save_policy(policy: AudioPolicy, folder: str | Path) -> None:
    """A Hugging Face model folder in safetensors; with LoRA, an adapter folder that names its base model."""
    folder = Path(folder)
    if not torch.cuda.is_available():  # transformers imports DeepSpeed here if it can, which would warn of no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if policy.adapter is None:
        policy.model.save_pretrained(str(folder))
    else:
        save_adapter(policy, folder)
    policy.tokenizer.save_pretrained(str(folder))
    if policy.extractor is not None:
        policy.extractor.save_pretrained(str(folder))

"""What loading needs to know before it knows the family."""

from __future__ import annotations

import torch

from audiorl.config import ModelConfig


def checkpoint_dtype(config: ModelConfig) -> torch.dtype | str:
    """`auto` keeps what the checkpoint says."""
    return "auto" if config.dtype == "auto" else getattr(torch, config.dtype)

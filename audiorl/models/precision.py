"""The precision of forward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from audiorl.config import ModelConfig


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[object]:
    """Around forward passes: matrix products in bfloat16 where `config.autocast` asks for it."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if config.autocast else nullcontext()

"""The precision of forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from audiorl.config import ModelConfig


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[object]:
    """Around forward passes: matrix products in bfloat16 where `config.autocast` asks for it."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if config.autocast else nullcontext()


def emulates_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Whether a CPU with these capabilities (`torch.cpu.get_capabilities`) has no instructions that help in bfloat16.

    Then a product of matrices takes tens of times as long as in float32, as `audiorl doctor` measures.
    """
    return capabilities.get("architecture") == "x86_64" and not capabilities.get("avx512_f")

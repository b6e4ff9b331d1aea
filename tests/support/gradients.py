"""Gradients as an optimizer stepped with them: trainers free them after the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

_stepped_with = WeakTensorKeyDictionary()


def _record(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            _stepped_with.pop(p, None)
            if p.grad is not None:
                _stepped_with[p] = p.grad.detach().clone()


register_optimizer_step_pre_hook(_record)


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies by name: of the gradients that are there, else of those of the last step."""
    out = {}
    for name, p in parameters.items():
        gradient = p.grad if p.grad is not None else _stepped_with.get(p)
        if gradient is not None:
            out[name] = gradient.clone()
    return out

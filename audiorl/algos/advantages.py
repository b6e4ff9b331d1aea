"""Advantages. One formula, one function.

Shapes: B rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_relative(rewards: Tensor, group_ids: Sequence[str] | Tensor, std: bool = True, eps: float = 1e-4) -> Tensor:
    """GRPO's advantage, (r - mean) / (std + eps) within each group (Shao et al. 2024, arXiv 2402.03300, eq. 3 ff.).

    rewards [B]; group_ids: B labels, equal for rollouts of one prompt, in any order. Returns [B].
    `std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783). The std is the unbiased one, as in TRL and verl; a
    group of one or of equal rewards has advantage 0.
    """
    index, size = _group_index(group_ids, rewards.device)
    if len(index) != len(rewards):
        raise ValueError(f"group_relative: {len(rewards)} rewards but {len(index)} group ids")
    ones = torch.ones_like(rewards)
    count = torch.zeros(size, dtype=rewards.dtype, device=rewards.device).index_add(0, index, ones)
    mean = torch.zeros_like(count).index_add(0, index, rewards) / count
    centred = rewards - mean[index]
    if not std:
        return centred
    square = torch.zeros_like(count).index_add(0, index, centred**2)
    deviation = (square / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation[index] + eps)


def _group_index(group_ids: Sequence[str] | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Group labels as integers 0 … size-1, in order of first appearance."""
    labels = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    order: dict[object, int] = {}
    index = torch.tensor([order.setdefault(g, len(order)) for g in labels], dtype=torch.long, device=device)
    return index, len(order)

"""The few collective operations that training needs; without a process group they do nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def add_over_ranks(*tensors: Tensor) -> None:
    """Replace each tensor by its sum over the ranks."""
    if world_size() > 1:
        for t in tensors:
            dist.all_reduce(t)


def take_from_first(*tensors: Tensor) -> None:
    """Replace each tensor by rank 0's."""
    if world_size() > 1:
        for t in tensors:
            dist.broadcast(t, 0)


def gather_rows(x: Tensor) -> Tensor:
    """[N, D] of every rank, equally many each -> [ranks · N, D] in the order of the ranks."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their mean over the ranks, in one message.

    Every parameter takes part: one that a rank did not use counts as zero there, so that messages line up.
    """
    if world_size() == 1:
        return
    own = list(parameters)
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own])
    dist.all_reduce(flat)
    flat /= world_size()
    for p, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
        p.grad = part.view_as(p).clone()

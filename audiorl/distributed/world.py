"""The ranks that train one model together, as a worker sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
BUCKET = 64 * 2**20
"""Bytes of gradients that are summed in one message."""


@dataclass(frozen=True)
class World:
    """`size` ranks, each with its own part of every batch. What is here are collective calls: all ranks make them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_process_group(cls) -> World:
        """Return the ranks of torch's default process group; this process alone where there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum every rank's tensor."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def gather_list(self, values: Sequence[T]) -> tuple[list[T], slice]:
        """Return all ranks' values in one list, and where this rank's own are in it."""
        lists = self.gather(list(values))
        start = sum(len(part) for part in lists[: self.rank])
        return [x for part in lists for x in part], slice(start, start + len(values))

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add up sums by name over all ranks; a name that a rank does not know counts 0 there."""
        total: dict[str, float] = {}
        for part in self.gather(dict(sums)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set every gradient to the sum over ranks. One that no rank has stays None."""
        if self.size == 1:
            return
        names = sorted(set().union(*self.gather({n for n, p in parameters.items() if p.grad is not None})))
        for bucket in buckets(names, parameters):
            weights = [parameters[name] for name in bucket]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat)
            for p, total in zip(weights, flat.split([g.numel() for g in grads]), strict=True):
                p.grad = total.view_as(p)


def buckets(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Divide names of parameters, in order, into lists of one dtype and about BUCKET bytes."""
    out: list[list[str]] = []
    room = 0
    for name in names:
        p = parameters[name]
        if not out or p.dtype != parameters[out[-1][-1]].dtype or room < p.nbytes:
            out.append([])
            room = BUCKET
        out[-1].append(name)
        room -= p.nbytes
    return out

"""A part of a trainer's tensor, as one rank holds and writes it; and tensors that are put together from parts.

Every form of sharding here gives a rank a range of the tensor's numbers in row-major order: ZeRO of a flat buffer, FSDP
of the first dimension, plain data parallelism any share. So a piece is a start and a flat tensor, and a state that some
number of ranks wrote is read by any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Range(Protocol):
    """The numbers [start, stop), in row-major order, of a tensor of `shape`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers [start, stop) of the tensor, flat; they lie in this range."""
        ...


@dataclass(frozen=True, eq=False)
class Piece:
    """A `Range` in memory."""

    flat_N: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.flat_N.numel()

    def read(self, start: int, stop: int) -> Tensor:
        return self.flat_N[start - self.start : stop - self.start]


TrainerState = Mapping[str, Mapping[str, Tensor | Piece]]
"""What a trainer needs on top of its weights, by part (such as "optimizer") and name. A tensor is the same on every
rank, a piece is this rank's own."""


def share_of(tensor: Tensor | Piece, rank: int, size: int) -> Piece | None:
    """What rank `rank` of `size` writes: its own piece, or its share of a tensor that all have; None for nothing.

    The first rank writes tensors without numbers.
    """
    if isinstance(tensor, Piece):
        return tensor if tensor.flat_N.numel() or not prod(tensor.shape) else None
    numel = tensor.numel()
    start, stop = numel * rank // size, numel * (rank + 1) // size
    if start == stop and (numel or rank):
        return None
    return Piece(tensor.detach().reshape(-1)[start:stop], start, tuple(tensor.shape))


def even_range(numel: int, rank: int, size: int) -> tuple[int, int]:
    """The numbers of rank `rank` where all ranks but the last have equally many: ZeRO 3, FSDP outside of layers."""
    each = -(-numel // size)
    return min(each * rank, numel), min(each * (rank + 1), numel)


def row_range(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """The numbers of rank `rank` where the first dimension is divided, as FSDP does."""
    first, last = even_range(shape[0], rank, size)
    row = prod(shape[1:])
    return first * row, last * row


class Joined(Mapping[str, Tensor]):
    """Tensors by name, put together from ranges when they are asked for, in whole or in part."""

    def __init__(self, ranges: Mapping[str, Sequence[Range]]):
        self._ranges = ranges

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.range(name, 0, prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._ranges[name][0].shape

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """The numbers [start, stop) of a tensor, flat. Raises ValueError where some are missing."""
        ranges = sorted(self._ranges[name], key=lambda r: r.start)
        parts, at = [], start
        for each in ranges:
            if each.start <= at < min(stop, each.stop):
                parts.append(each.read(at, min(stop, each.stop)))
                at = min(stop, each.stop)
        if at < stop:
            raise ValueError(f"{name!r} is incomplete: numbers {at} to {stop} of {prod(self.shape(name))} are missing")
        if not parts:
            return ranges[0].read(ranges[0].start, ranges[0].start)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_range(tensors: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """The numbers [start, stop) of a tensor in row-major order; of `Joined` nothing else is read."""
    if isinstance(tensors, Joined):
        return tensors.range(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]


def read_shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """The shape of a tensor; of `Joined` nothing is read."""
    return tensors.shape(name) if isinstance(tensors, Joined) else tuple(tensors[name].shape)

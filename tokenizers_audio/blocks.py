"""Encoders that need a whole recording, such as those with HuBERT's attention, cannot stream. Here they get blocks.

A recording of at most `block_seconds` is one block, encoded as the family's own model encodes it. A longer one is cut
into blocks of that length that overlap by `overlap_seconds`; half of each overlap comes from the block before, half
from the block after, so that every frame has that much context on both sides. This *defines* the codes of long
recordings, in whole or in a stream: a stream keeps one block, and its codes come up to one block late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenizers_audio.layers import join, rest


@dataclass(frozen=True)
class BlockSize:
    """In frames. `overlap` is even and smaller than `frames`."""

    frames: int
    overlap: int


def block_size(block_seconds: float, overlap_seconds: float, frame_rate: float) -> BlockSize:
    """Rounded to whole frames, the overlap to an even number. Raises ValueError."""
    size = BlockSize(round(block_seconds * frame_rate), 2 * round(overlap_seconds * frame_rate / 2))
    if size.overlap < 0 or size.frames <= size.overlap:
        raise ValueError(
            f"block_seconds {block_seconds:g} and overlap_seconds {overlap_seconds:g} are {size.frames} and "
            f"{size.overlap} frames; a block must be longer than its overlap, and that at least 0"
        )
    return size


class Blocks:
    """A Layer of whole frames of `hop` samples: [B, 1, T] -> [B, D, T / hop] by `analyse`, block by block."""

    def __init__(self, analyse: Callable[[Tensor], Tensor], hop: int, size: BlockSize) -> None:
        self.analyse, self.hop, self.size = analyse, hop, size
        self.buffer: Tensor | None = None
        self.first = True

    def push(self, x: Tensor) -> Tensor:
        x = join(self.buffer, x)
        features = []
        # Only what comes after a block shows that it is not the last one.
        while x.shape[-1] > self.size.frames * self.hop:
            block = self.analyse(x[..., : self.size.frames * self.hop])
            features.append(block[..., self._skip() : self.size.frames - self.size.overlap // 2])
            x = x[..., (self.size.frames - self.size.overlap) * self.hop :]
            self.first = False
        self.buffer = rest(x, 0)
        return torch.cat(features, -1) if features else rest(x, x.shape[-1])

    def finish(self) -> Tensor:
        assert self.buffer is not None
        features = self.analyse(self.buffer)[..., self._skip() :]
        self.buffer, self.first = None, True
        return features

    def _skip(self) -> int:
        return 0 if self.first else self.size.overlap // 2

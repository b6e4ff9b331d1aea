"""Frames of codes among the tokens of a model that speaks.

Shapes: N rows, Q codebooks, F frames of codes. A codec's frames [Q, F] are F + Q + 1 rows of the delay pattern
(`tokenizers_audio.delay`), in which codebook k is delayed by k rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenizers_audio.delay import deinterleave, interleave, sampled_codes_mask
from tokenizers_audio.protocol import AudioTokenizer

CONFIG_KEY = "audiorl_speech"
"""The key of a dualized model's config.json that holds its `FrameLayout`."""
CODEC_KEY = "audiorl_codec"
"""The key that holds the identity of the codec that its codes belong to."""


@dataclass(frozen=True)
class FrameLayout:
    """How speech is written among tokens: `begin_id`, then rows of frames, then `end_id`.

    Each of `codebooks` has `size` codes, of which the last two, `bos` and `eos`, begin and end it. A frame's id is
    `frame_id`, or `delay_id` in the rows in which some codebook has ended; a model reads its codes, not this id. Rows
    that the delay pattern forces and `end_id` are never sampled.
    """

    codebooks: int
    size: int
    bos: int
    eos: int
    begin_id: int
    frame_id: int
    delay_id: int
    end_id: int

    def __post_init__(self) -> None:
        if self.codebooks < 1 or self.size < 3 or {self.bos, self.eos} != {self.size - 2, self.size - 1}:
            raise ValueError(
                f"{self.codebooks} codebooks of {self.size} codes with BOS {self.bos} and EOS {self.eos}: the size "
                "must count both, as the last two codes (1024 codes make a codebook_size of 1026)"
            )

    def check(self, codec: AudioTokenizer) -> None:
        """Raise ValueError unless the model can write this codec's codes."""
        if (codec.num_codebooks, codec.codebook_size) != (self.codebooks, self.size - 2):
            raise ValueError(
                f"the codec has {codec.num_codebooks} codebooks of {codec.codebook_size} codes, the model writes "
                f"{self.codebooks} of {self.size - 2}; they do not belong together"
            )

    def rows(self, codes: Tensor) -> Rows:
        """Speech [Q, F] as its frames and `end_id`; the caller writes `begin_id` before it.

        Raises ValueError for another number of codebooks and for codes out of range.
        """
        if codes.dim() != 2 or len(codes) != self.codebooks:
            raise ValueError(f"codes are {list(codes.shape)}; the model writes [{self.codebooks}, frames]")
        if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < self.size - 2):
            raise ValueError(
                f"codes reach from {int(codes.min())} to {int(codes.max())}; the model's are 0 to {self.size - 3}"
            )
        frames = interleave(codes.long().cpu(), self.bos, self.eos)
        nothing = torch.full((1, self.codebooks), -1)
        return Rows(
            ids=torch.cat([self.ids(frames), torch.tensor([self.end_id])]),
            codes=torch.cat([frames, nothing]),
            code_mask=torch.cat([sampled_codes_mask(frames, self.bos, self.eos), nothing >= 0]),
        )

    def ids(self, frames: Tensor) -> Tensor:
        """The ids [N] of frames [N, Q]."""
        return torch.where((frames == self.eos).any(-1), self.delay_id, self.frame_id)

    def offered(self, values: Tensor, dim: int = 0) -> Tensor:
        """`values` without BOS along `dim`, which runs over codes: no sampler may choose it."""
        return torch.cat(
            [values.narrow(dim, 0, self.bos), values.narrow(dim, self.bos + 1, self.size - self.bos - 1)], dim
        )

    def offered_head(self, weight: Tensor) -> Tensor:
        """[Q·size, H] -> [Q·(size - 1), H], the rows of codes that a sampler may choose."""
        return self.offered(weight.view(self.codebooks, self.size, -1), 1).flatten(0, 1)

    def spoken(self, codes: Tensor) -> list[Tensor]:
        """The complete frames [Q, F] of each speech in rows [N, Q] that are -1 where a row is no frame."""
        is_frame = codes[:, 0] >= 0
        edges = torch.diff(
            is_frame.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int)
        )
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        return [deinterleave(codes[a:b], self.bos, self.eos) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a stream of tokens and frames: ids [N], codes [N, Q] (-1 where a row is no frame), code_mask [N, Q]."""

    ids: Tensor
    codes: Tensor
    code_mask: Tensor


def padded_codes(codes: Sequence[Tensor | None], lengths: Sequence[int], left: bool = False) -> Tensor | None:
    """Codes [L, Q] of rows of `lengths` as [B, longest, Q], -1 where there is no frame; None without any frame."""
    width = next((c.shape[1] for c in codes if c is not None), None)
    if width is None:
        return None
    padded = torch.full((len(codes), max(lengths), width), -1)
    for row, c, length in zip(padded, codes, lengths, strict=True):
        if c is not None:
            row[len(row) - length if left else 0 :][:length] = c
    return padded

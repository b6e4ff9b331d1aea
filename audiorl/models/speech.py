"""What a model that speaks adds to one that writes: frames of codes among its tokens, and how they are laid out.

Shapes: N rows, Q codebooks, F frames of codes. A codec's frames [Q, F] are F + Q + 1 rows of the delay pattern
(`tokenizers_audio.delay`), in which codebook k comes k rows late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.types import Sample
from tokenizers_audio.delay import deinterleave, interleave, sampled_codes_mask
from tokenizers_audio.protocol import AudioTokenizer

CONFIG_KEY = "audiorl_speech"
"""Where a dualized model's config.json keeps its `FrameLayout`."""
CODEC_KEY = "audiorl_codec"
"""Where it keeps the identity of the codec that its codes belong to."""


@dataclass(frozen=True)
class FrameLayout:
    """How speech stands among tokens: `begin_id`, then rows of frames, then `end_id`.

    Each of `codebooks` has `size` codes, of which the last two, `bos` and `eos`, begin and end it. A frame's id is
    `frame_id`, or `delay_id` in the rows in which some codebook has ended; a model reads its codes, not this id. Rows
    that the delay pattern forces and `end_id` are never drawn.
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
        theirs, ours = (codec.num_codebooks, codec.codebook_size), (self.codebooks, self.size - 2)
        if theirs != ours:
            raise ValueError(
                f"the codec has {theirs[0]} codebooks of {theirs[1]} codes, the model writes {ours[0]} of {ours[1]}; "
                "they do not belong together"
            )

    def rows(self, codes: Tensor) -> Rows:
        """Speech [Q, F] as its frames and `end_id`; what opens it, `begin_id`, is left to the caller.

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
        said = codes[:, 0] >= 0
        edges = torch.diff(said.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        return [deinterleave(codes[a:b], self.bos, self.eos) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a stream of tokens and frames: ids [N], codes [N, Q] (-1 where a row is no frame), drawn [N, Q]."""

    ids: Tensor
    codes: Tensor
    code_mask: Tensor


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the model reads it: ids [P], codes [P, Q] where it holds frames, and the clips heard by the tower."""

    ids: Tensor
    codes: Tensor | None = None
    audio: tuple[AudioClip, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, ids: Tensor, audio: tuple[AudioClip, ...]) -> Prompt:
        """The prompt and then tokens with what is heard in them."""
        codes = self.codes
        if codes is not None:
            codes = torch.cat([codes, codes.new_full((len(ids), codes.shape[1]), -1)])
        return Prompt(torch.cat([self.ids, ids]), codes, self.audio + audio)


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


def wants_speech(sample: Sample) -> bool:
    """Whether the answer is to be spoken at once: `metadata["respond"]` is "speech" and not "text", its default.

    The prompt then ends with `begin_id`, and the answer with the speech. A model that speaks may otherwise decide so
    itself, after text, in any turn.
    """
    respond = sample.metadata.get("respond", "text")
    if respond not in ("text", "speech"):
        raise ValueError(f'sample {sample.id!r}: metadata "respond" is {respond!r}; give "text" or "speech"')
    if respond == "speech" and sample.turns:
        raise ValueError(f'sample {sample.id!r}: a stream\'s turns begin with text; leave "respond" out')
    return bool(respond == "speech")

"""Turns that speak by hand: a codec whose waveform shows its codes."""

from __future__ import annotations

import torch

from audiorl.models.speech import FrameLayout
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.types import Segment

LAYOUT = FrameLayout(2, 6, 4, 5, 100, 101, 101, 102)


class Steps:
    """A codec of 10 frames a second, whose samples are the codes of codebook 0."""

    sample_rate, frame_rate, num_codebooks, codebook_size, identity = 100, 10.0, 2, 4, "steps"

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes[:, 0].repeat_interleave(10, 1).float() / 10


def said(seconds: float, *frames: int) -> Segment:
    """A turn after `seconds` of the source that said these codes, or nothing."""
    if not frames:
        return Segment(torch.zeros(1).long(), torch.tensor([7]), torch.zeros(1), source_time=seconds, emit_time=seconds)
    rows = LAYOUT.tokens(torch.tensor([frames, frames]))
    return Segment(
        torch.zeros(1).long(), rows.ids, torch.zeros(rows.codes.shape), "hola", codes=rows.codes,
        code_mask=rows.code_mask, source_time=seconds, emit_time=seconds,
    )  # fmt: skip


DECODER = CodecSpeechDecoder(Steps(), LAYOUT)  # type: ignore[arg-type]

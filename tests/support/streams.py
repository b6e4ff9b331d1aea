"""Streams of recorded speech."""

from __future__ import annotations

import numpy as np

from audiorl.data.corpus import Utterance
from audiorl.simulst.bundled import build_stream
from audiorl.simulst.streams import Stream

RATE = 16_000


def stream(speech: list[Utterance], first: int, count: int) -> Stream:
    """`count` human recordings with pauses; the references are their transcripts."""
    chosen = speech[first : first + count]
    prompts = [(u.clip.load(RATE), u, u) for u in chosen]
    return build_stream(f"stream {first}", prompts, (0.2, 0.5), np.random.default_rng(first))

"""Streams of recorded speech."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from audiorl.data.corpus import Utterance
from audiorl.data.silence import trimmed
from audiorl.models import AudioPolicy
from audiorl.tasks.simul.bundled import StreamPiece, lay_out, trimmed_recording
from audiorl.tasks.simul.streams import Stream
from tests.conftest import make_omni

RATE = 16_000
Prompt = tuple[np.ndarray, Utterance, Utterance]


def ending_turns(bias: float) -> AudioPolicy:
    """A policy that ends some turns at once, some later, and has others cut off; more of them the larger the bias."""
    policy = make_omni()
    head = policy.backbone.head(policy.model)
    stop = torch.zeros(head.weight.shape[0])
    stop[list(policy.stop_ids)] = bias
    head.register_forward_hook(lambda module, args, out: out + stop * torch.sin(50 * args[0][..., :1]))
    return policy


def build_stream(id: str, prompts: Sequence[Prompt], pauses: tuple[float, float], rng: np.random.Generator) -> Stream:
    """Return the stream of (waveform, source, target), each followed by a pause."""
    waves = [trimmed(wav) for wav, _, _ in prompts]
    gaps = [round(p * RATE) for p in rng.uniform(*pauses, size=len(waves))]
    pieces = [
        StreamPiece(wav, gap, source.text, target.text, trimmed_recording(target))
        for wav, gap, (_, source, target) in zip(waves, gaps, prompts, strict=True)
    ]
    return lay_out(id, pieces, prompts[0][1].language, prompts[0][2].language, rng)


def stream(speech: list[Utterance], first: int, count: int) -> Stream:
    """`count` human recordings with pauses; the references are their transcripts."""
    chosen = speech[first : first + count]
    prompts = [(u.clip.load(RATE), u, u) for u in chosen]
    return build_stream(f"stream {first}", prompts, (0.2, 0.5), np.random.default_rng(first))

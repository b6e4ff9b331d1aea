"""A prompt and an answer to learn from, as text and as tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from audiorl.models import AudioPolicy
from audiorl.types import Experience, Sample


@dataclass(frozen=True)
class Example:
    """A prompt and the assistant's turn to learn; of a stream the references of its turns are learned instead."""

    sample: Sample
    target: str = ""


def experience(policy: AudioPolicy, example: Example, group_id: str = "") -> Experience:
    """The tokens of a prompt and an answer, the loss on the answer and on the token that ends the turn.

    A stream's tokens are chunk, reference, end of turn, chunk, … as a rollout has them.
    """
    sample = example.sample
    prompt = policy.prompt_ids(sample)
    if sample.turns:
        heard = [policy.chunk_ids(turn.audio) for turn in sample.turns]
        heard[0] = torch.cat([prompt, heard[0]])
        said = [turn.reference for turn in sample.turns]
    else:
        heard, said = [prompt], [example.target]
    ids, mask = [], []
    for observed, text in zip(heard, said, strict=True):
        target = torch.tensor([*policy.tokenizer.encode(text, add_special_tokens=False), policy.end_id])
        ids += [observed, target]
        mask += [torch.zeros(len(observed), dtype=torch.bool), torch.ones(len(target), dtype=torch.bool)]
    return Experience(
        ids=torch.cat(ids),
        loss_mask=torch.cat(mask),
        prompt_length=len(heard[0]),
        audio=sample.audio,
        group_id=group_id,
        name=repr(sample.id),
    )

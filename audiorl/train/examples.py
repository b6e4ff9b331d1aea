"""A prompt and an answer to learn from, as text and as tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from audiorl.models import AudioPolicy
from audiorl.types import Experience, Sample


@dataclass(frozen=True)
class Example:
    """A prompt and the assistant's turn to learn."""

    sample: Sample
    target: str


def experience(policy: AudioPolicy, example: Example, group_id: str = "") -> Experience:
    """The tokens of a prompt and an answer, the loss on the answer and on the token that ends the turn."""
    prompt = policy.prompt_ids(example.sample)
    target = policy.tokenizer.encode(example.target, add_special_tokens=False)
    end = policy.tokenizer.get_added_vocab().get("<|im_end|>", policy.tokenizer.eos_token_id)
    ids = torch.cat([prompt, torch.tensor([*target, end])])
    return Experience(
        ids=ids,
        loss_mask=torch.arange(len(ids)) >= len(prompt),
        prompt_length=len(prompt),
        audio=example.sample.audio,
        group_id=group_id,
        name=repr(example.sample.id),
    )

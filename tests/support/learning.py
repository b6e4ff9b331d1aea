"""Small models that learn a few answers by heart within a test."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from audiorl.algos.packing import pack_experiences
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience


def learn(policy: AudioPolicy, examples: Sequence[Example], steps: int) -> None:
    """Full-batch AdamW on the mean log-prob of the answers."""
    lesson = pack_experiences([experience(policy, example) for example in examples])
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=3e-3)
    for _ in range(steps):
        (-policy.forward(lesson).logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

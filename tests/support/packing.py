"""Packing experiences and reading back log-probs and gradients."""

from __future__ import annotations

import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.models import AudioPolicy
from audiorl.types import Message, Sample
from tests.conftest import readable


def experience(policy: AudioPolicy, sample: Sample, length: int, seed: int, group: str = "") -> Experience:
    prompt = policy.prompt(sample).ids
    answer = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(len(prompt) + length) >= len(prompt)
    return Experience(torch.cat([prompt, answer]), mask, len(prompt), sample.audio, group)


def with_audio(sample: Sample, clip: AudioClip) -> Sample:
    text = sample.messages[0].content[1]
    return Sample(sample.id, (Message("user", (clip, text)),), sample.references)


def logprobs(policy: AudioPolicy, experiences: list[Experience], share: bool = True) -> list[torch.Tensor]:
    flat = policy.forward(pack_experiences(experiences, share)).logprobs
    return list(flat.split([int(e.loss_mask.sum()) for e in experiences]))


def groups_of_three(policy: AudioPolicy, samples: list[Sample]) -> list[Experience]:
    """Three answers of different length to each prompt."""
    return [
        experience(policy, s, length, seed=10 * i + k, group=s.id)
        for i, s in enumerate(readable(policy, samples))
        for k, length in enumerate((5, 9, 2))
    ]


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def with_gradients(policy: AudioPolicy, answers: list[torch.Tensor]) -> Result:
    """The log-probs, and the gradients of a sum in which every answer weighs differently."""
    policy.model.zero_grad()
    sum((i + 1) * lp.sum() for i, lp in enumerate(answers)).backward()  # type: ignore[union-attr]
    grads = {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}
    return torch.cat(answers).detach(), grads


def assert_same(found: Result, expected: Result) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    assert found[1].keys() == expected[1].keys()
    for key, grad in expected[1].items():
        scale = max(float(grad.abs().max()), 1.0)
        torch.testing.assert_close(found[1][key] / scale, grad / scale, atol=1e-5, rtol=0, msg=key)

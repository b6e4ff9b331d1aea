"""Scored experiences of tiny policies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.models import AudioPolicy
from audiorl.train.rl.trainer import Trainer
from audiorl.types import Sample

LENGTHS = ((6, 3, 1), (4, 6, 2))


SCORES = ((1.0, 0.0, 2.0), (-1.0, 0.5, 0.5))


def batch_of(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    lengths: Sequence[Sequence[int]] = LENGTHS,
    scores: Sequence[Sequence[float]] = SCORES,
) -> list[Experience]:
    """Random answers of given lengths and scores; the engine's log-probs are a little off."""
    rng = torch.Generator().manual_seed(0)
    out = []
    for sample, ns, values in zip(samples, lengths, scores, strict=False):
        prompt = policy.prompt(sample).ids
        for n, score in zip(ns, values, strict=True):
            ids = torch.cat([prompt, torch.randint(0, 300, (n,), generator=rng)])
            e = Experience(ids, torch.arange(len(ids)) >= len(prompt), len(prompt), sample.audio, sample.id)
            rewards = torch.zeros(len(ids))
            if n:
                rewards[-1] = score
            e = e.replace(name=f"{sample.id!r}", rewards=rewards, score=score, rollout_logprobs=torch.zeros(len(ids)))
            flat = logprobs(policy, e) + 0.1 * torch.randn(n, generator=rng)
            out.append(e.replace(rollout_logprobs=torch.zeros(len(ids)).masked_scatter(e.loss_mask, flat)))
    return out


@torch.no_grad()
def logprobs(policy: AudioPolicy, e: Experience) -> Tensor:
    """Alone in its pack."""
    return policy.forward(pack_experiences([e])).logprobs


@torch.no_grad()
def values(learner: Trainer, e: Experience) -> Tensor:
    assert learner.critic is not None
    return learner.critic.model(pack_experiences([e]))


def with_advantage(experience: Experience, advantage: float) -> Experience:
    """The experience with one advantage on every sampled token."""
    return experience.replace(advantages=torch.where(experience.loss_mask, advantage, 0.0))

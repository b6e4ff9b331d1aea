"""What was sampled, and what the trainer says about it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.types import Rollout, Sample


def requests(samples: Sequence[Sample], n: int = 2, seed: int = 0) -> list[Request]:
    return [Request(s, n, seed) for s in samples]


def ids(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """The tokens of each segment."""
    return [s.ids.tolist() for r in rollouts for s in r.segments]


def logprobs(rollouts: Sequence[Rollout]) -> Tensor:
    return torch.cat([s.logprobs for r in rollouts for s in r.segments])


def forced(policy: AudioPolicy, rollouts: Sequence[Rollout], temperature: float = 1.0, share: bool = True) -> Tensor:
    """What the trainer says about the same tokens."""
    batch = pack_experiences([Experience.from_rollout(r) for r in rollouts], share)
    with torch.no_grad():
        return policy.forward(batch, temperature).logprobs


def ending(policy: AudioPolicy, stop: float) -> AudioPolicy:
    """The logits of its stop tokens are `stop` higher."""
    head = policy.backbone.head(policy.model)
    added = torch.zeros(head.weight.shape[0])
    added[list(policy.stop_ids)] = stop
    head.register_forward_hook(lambda module, args, out: out + added.to(out))
    return policy

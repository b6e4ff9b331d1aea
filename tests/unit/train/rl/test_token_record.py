"""The numbers of tokens in recorded rollouts, against those that the policy gives."""

from __future__ import annotations

import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.distributed.local import LocalGroup
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.processes import GroupEngine, Workers
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Sample
from tests.conftest import make_omni
from tests.support.experiences import with_advantage


def trainer(policy: AudioPolicy, epochs: int) -> Trainer:
    config = RLConfig(steps=2, prompts_per_step=2, group_size=2, epochs=epochs)
    return Trainer(policy, config, OptimConfig(lr=1e-3, warmup_steps=0), 1.0, 6)


def experiences(policy: AudioPolicy, samples: list[Sample]) -> list[Experience]:
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=6)).generate([Request(s, 2, seed=5) for s in samples[:2]])
    batch = [
        with_advantage(Experience.from_rollout(r), a) for r, a in zip(rollouts, (1.0, -1.0, 0.5, -0.5), strict=True)
    ]
    varied = torch.arange(len(batch[0])) * batch[0].loss_mask.float()
    return [batch[0].replace(advantages=varied), *batch[1:]]


def test_numbers_are_those_of_the_last_pass(samples: list[Sample]) -> None:
    batch = experiences(make_omni(), samples)
    twice = trainer(make_omni(), 2).step(TrainBatch(batch, record_tokens=True))
    once = trainer(make_omni(), 1)
    first = once.step(TrainBatch(batch, record_tokens=True))
    with torch.no_grad():
        after = once.policy.forward(pack_experiences(batch))  # what the second pass sees
    start = 0
    for e, of_two, of_one in zip(batch, twice.tokens, first.tokens, strict=True):
        at = slice(start, start := start + e.num_sampled)
        assert e.rollout_logprobs is not None
        ratios = (after.logprobs[at] - e.rollout_logprobs[e.loss_mask]).exp()
        assert (ratios - 1).abs().max() > 0.01, "the update has moved the policy"
        torch.testing.assert_close(of_two["ratios"][e.loss_mask].float(), ratios, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(of_two["entropies"][e.loss_mask].float(), after.entropy[at], atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(of_one["ratios"][e.loss_mask].float(), torch.ones(e.num_sampled), atol=1e-3, rtol=0)
        assert all(not values[~e.loss_mask].any() for values in of_two.values())
    assert torch.equal(first.tokens[0]["advantages"].float(), batch[0].advantages)
    assert all("advantages" not in numbers for numbers in first.tokens[1:]), "one value says it all"


@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3]], [[2, 3], [0, 1]]])
def test_numbers_come_in_the_order_of_the_step(samples: list[Sample], ranks: list[list[int]]) -> None:
    batch = experiences(make_omni(), samples)
    group = LocalGroup([trainer(make_omni(), 1) for _ in range(2)])
    numbers = Workers(RLConfig(), group, GroupEngine(group)).step(TrainBatch(batch, record_tokens=True)).tokens
    assert [len(of_one["ratios"]) for of_one in numbers] == [len(e) for e in batch] and "advantages" in numbers[0]

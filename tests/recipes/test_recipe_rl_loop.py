"""The loop that every reader opens first: it trains, and its gradient is the trainer's."""

from __future__ import annotations

import re

import pytest
import torch

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.models.families.qwen_omni import tiny
from audiorl.protocols import Request
from audiorl.recipes.rl_loop import Config, backward, load, main, with_advantages
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Sample, Score
from tests.support.trainer_steps import gradients


def test_it_prints_reward_and_loss_and_changes_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    before = load(Config()).weights()
    policy = main(Config(max_new_tokens=6))
    lines = capsys.readouterr().out.splitlines()
    assert [bool(re.match(r"step \d  reward \d\.\d{3}  loss [+-]\d\.\d{4}  grad_norm ", line)) for line in lines] == [
        True
    ] * 2
    assert any(not torch.equal(weight, before[name]) for name, weight in policy.weights().items())


def test_its_gradient_is_the_trainers(samples: list[Sample]) -> None:
    """The rewards are given, so that advantages are not 0; packs of few tokens add up to the same."""
    policy, twin = (tiny(["yes no why"], whisper=False) for _ in range(2))
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=6))
    rollouts = engine.generate([Request(s, 3, group_id=s.id) for s in samples[:2]])
    scored = [r.with_score(Score(float(i % 4))) for i, r in enumerate(rollouts)]
    experiences = with_advantages(scored)
    config = RLConfig(prompts_per_step=2, group_size=3, kl_beta=0.0)
    trainer = Trainer(twin, config, OptimConfig(lr=1e-4, max_grad_norm=1e9), 1.0, 6)
    metrics = trainer.step(TrainBatch([e.replace(advantages=None) for e in experiences])).metrics
    expected = gradients(twin)
    for budget in (8192, 64):
        policy.model.zero_grad()
        assert backward(policy, experiences, budget) == pytest.approx(metrics["policy/loss"], abs=1e-6)
        found = gradients(policy)
        assert found.keys() == expected.keys() and any(g.abs().max() > 1e-4 for g in found.values())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)

"""Advantages of rollouts with several turns, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from audiorl.algos.advantages import process_relative, step_index_relative, time_index_relative
from audiorl.algos.experience import Experience
from audiorl.config import EstimatorConfig, KLConfig, RLConfig
from audiorl.train.rl.advantages import compute_advantages
from audiorl.types import Rollout, Sample, Score, Segment

R = math.sqrt(0.5)
"""Half the unbiased deviation's inverse of two rewards that differ by 1: their advantages are ±0.5 / √0.5 = ±√0.5."""


def test_time_index_by_hand() -> None:
    """Group a: three rollouts of 3, 2 and 1 turns. Group b: one rollout.

    Turn 0: rewards 1, 0, 2, mean 1, deviation 1: 0, -1, 1. Turn 1: rewards 4, 2: ±1 / √2. Turn 2: one rollout, 0.
    From each turn on: first 0 + 1/√2 + 0 | 1/√2 | 0; second -1 - 1/√2 | -1/√2; third 1.
    """
    rewards = torch.tensor([[1.0, 4.0, 7.0], [0.0, 2.0, 9.0], [2.0, 9.0, 9.0], [5.0, -3.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    groups = ["a", "a", "a", "b"]
    expected = torch.tensor([[R, R, 0], [-1 - R, -R, 0], [1, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(time_index_relative(rewards, mask, groups, eps=1e-9), expected)
    centred = torch.tensor([[1.0, 1, 0], [-2, -1, 0], [1, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(time_index_relative(rewards, mask, groups, std=False), centred)
    order = [2, 3, 0, 1]  # groups need not lie together
    mixed = time_index_relative(rewards[order], mask[order], [groups[i] for i in order], eps=1e-9)
    torch.testing.assert_close(mixed, expected[order])


def streamed(group: str, *turns: tuple[int, float]) -> Experience:
    """One turn per (sampled tokens, reward), two observed tokens before each."""
    segments = tuple(Segment(torch.arange(2), torch.arange(n), torch.zeros(n)) for n, _ in turns)
    rewards = tuple(reward for _, reward in turns)
    score = Score(sum(rewards), per_segment=rewards)
    return Experience.from_rollout(Rollout(Sample("s", ()), segments, group, score=score))


def test_time_index_on_the_tokens_of_each_turn() -> None:
    """`compute_advantages` gives each turn's advantage to all its sampled tokens."""
    experiences = [
        streamed("a", (1, 1.0), (2, 4.0), (1, 7.0)),
        streamed("a", (2, 0.0), (1, 2.0)),
        streamed("a", (3, 2.0)),
        streamed("b", (1, 5.0), (1, -3.0)),
    ]
    config = RLConfig(advantage="time-index", estimator=EstimatorConfig(eps=1e-9))
    found = [e.advantages.tolist() for e in compute_advantages(experiences, config, 0.0) if e.advantages is not None]
    z = [0.0, 0.0]
    assert found[0] == pytest.approx([*z, R, *z, R, R, *z, 0.0])
    assert found[1] == pytest.approx([*z, -1 - R, -1 - R, *z, -R])
    assert found[2] == pytest.approx([*z, 1.0, 1.0, 1.0])
    assert found[3] == pytest.approx([0.0] * 6)


def test_process_rewards_by_hand() -> None:
    """Group a: steps of 3, 0 and 1, and of 2 alone: mean 1.5, centred 1.5, -1.5, -0.5 and 0.5, squares 5 / 3.

    A token has the normalised rewards of its own step and of the later ones; the last token of b belongs to no step.
    """
    rewards = torch.tensor([[1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 2.0, 9.0], [5.0, 3.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]])
    ends = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]])
    groups, deviation = ["a", "a", "b"], math.sqrt(5 / 3)
    centred = torch.tensor([[-0.5, -0.5, -2, -0.5], [0.5, 0.5, 0.5, 0], [0, -1, 0, 0]])
    torch.testing.assert_close(process_relative(rewards, mask, ends, groups, std=False), centred)
    scale = torch.tensor([[deviation], [deviation], [math.sqrt(2)]])
    torch.testing.assert_close(process_relative(rewards, mask, ends, groups, eps=1e-9), centred / scale)


def with_steps(credit: Sequence[float], ends: Sequence[int] | None, kl: float = 0.0) -> Experience:
    """An answer of len(credit) tokens, each with a log ratio of `kl` to the reference."""
    segment = Segment(torch.arange(2), torch.arange(len(credit)), torch.zeros(len(credit)))
    score = Score(sum(credit), per_token=tuple(credit), step_ends=None if ends is None else tuple(ends))
    e = Experience.from_rollout(Rollout(Sample("s", ()), (segment,), "a", score=score))
    old = torch.where(e.loss_mask, kl, 0.0)
    return e.replace(old_logprobs=old, ref_logprobs=torch.zeros_like(old))


def sampled_advantages(batch: Sequence[Experience], config: RLConfig, beta: float = 0.0) -> list[list[float]]:
    found = compute_advantages(batch, config, beta)
    return [e.advantages[e.loss_mask].tolist() for e in found if e.advantages is not None]


def test_a_step_may_score_nothing() -> None:
    """Steps of 0.4 and 0, and of 0.6 and 0.2: mean 0.3. The k-th steps' means are 0.5 and 0.1."""
    batch = [with_steps((0, 0.4, 0), (1, 2)), with_steps((0.6, 0, 0.2), (0, 2))]
    options = EstimatorConfig(std=False)
    process = sampled_advantages(batch, RLConfig(advantage="process", estimator=options))
    assert process == [pytest.approx([-0.2, -0.2, -0.3], abs=1e-6), pytest.approx([0.2, -0.1, -0.1], abs=1e-6)]
    by_index = sampled_advantages(batch, RLConfig(advantage="step-index", estimator=options))
    assert by_index == [pytest.approx([-0.1, -0.1, -0.1], abs=1e-6), pytest.approx([0.1, 0.1, 0.1], abs=1e-6)]


def test_the_kl_in_the_reward_makes_no_steps() -> None:
    """β·KL is 0.1 on every token of the first answer, which has steps of two tokens and of one: 0.4 - 0.2, 0 - 0.1.

    The second has none of it: 0.6 and 0.2. All steps' mean is 0.225; the k-th steps' means are 0.4 and 0.05.
    """
    batch = [with_steps((0, 0.4, 0), (1, 2), kl=1.0), with_steps((0.6, 0, 0.2), (0, 2))]
    kl, options = KLConfig("k1", "reward"), EstimatorConfig(std=False)
    config = RLConfig(advantage="process", estimator=options, kl=kl)
    first, second = -0.025, -0.325
    process = sampled_advantages(batch, config, 0.1)
    assert process[0] == pytest.approx([first + second, first + second, second], abs=1e-6)
    assert process[1] == pytest.approx([0.375 - 0.025, -0.025, -0.025], abs=1e-6)
    by_index = sampled_advantages(batch, replace(config, advantage="step-index"), 0.1)
    assert by_index == [pytest.approx([-0.2, -0.2, -0.15], abs=1e-6), pytest.approx([0.2, 0.15, 0.15], abs=1e-6)]


@pytest.mark.parametrize("advantage", ["process", "step-index"])
def test_credit_per_token_that_knows_no_steps(advantage: str) -> None:
    with pytest.raises(ValueError, match=r"'s' .*this advantage compares steps, .* give Score\.step_ends"):
        compute_advantages([with_steps((0.1, 0.2), None)], RLConfig(advantage=advantage))


def test_step_index_by_hand() -> None:
    """Two rollouts of two words, on tokens 1 and 3 and on tokens 0 and 2 of four; the last token belongs to the last
    word. Word 0: rewards 1, 0.5; word 1: 0.25, 1. Two rewards that differ by d have deviation d / √2 and ±√½."""
    rewards = torch.tensor([[0, 1, 0, 0.25, 0], [0.5, 0, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    ends = rewards != 0
    own = torch.tensor([[R, R, -R, -R, -R], [-R, R, R, R, 0]])
    torch.testing.assert_close(step_index_relative(rewards, mask, ends, ["g", "g"], eps=1e-9), own)
    later = torch.tensor([[R / 2, R / 2, -R, -R, -R], [-R / 2, R, R, R, 0]])
    torch.testing.assert_close(step_index_relative(rewards, mask, ends, ["g", "g"], eps=1e-9, gamma=0.5), later)
    shifted = [torch.nn.functional.pad(x, (2, 0)) for x in (rewards, mask, ends)]
    torch.testing.assert_close(step_index_relative(*shifted, ["g", "g"], eps=1e-9)[:, 2:], own)

"""What becomes of rollouts that a reward skips: they take no part in a step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from audiorl.config import RLConfig
from audiorl.protocols import Request
from audiorl.train.rl.collect import collect, step_metrics
from audiorl.types import Message, Rollout, Sample, Score, Segment

SAMPLES = [Sample(f"q{i}", (Message("user", ("?",)),)) for i in range(4)]


def segment(text: str) -> Segment:
    return Segment(torch.arange(2), torch.arange(1), torch.zeros(1), text)


class Numbers:
    """Answers each prompt with the numbers from 0, greedily with the prompt's own number."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        return [
            Rollout(r.sample, (segment(r.sample.id[1:] if r.greedy else str(i)),), r.group_id, i)
            for r in requests
            for i in range(r.n)
        ]


def no_zeros(rollouts: Sequence[Rollout]) -> list[Score | None]:
    return [None if r.text == "0" or r.sample.id == "q1" else Score(float(r.text)) for r in rollouts]


def test_metrics_of_each_set_of_a_mix() -> None:
    mix = [replace(s, metadata={"data_set": "ab"[i > 0]}) for i, s in enumerate(SAMPLES)]
    config = RLConfig(prompts_per_step=4, group_size=3)
    metrics = step_metrics(collect(Numbers(), mix, no_zeros, 0, config, 0), 0, config)
    assert (metrics["data/a/share"], metrics["data/b/share"]) == pytest.approx((1 / 3, 2 / 3)), "q1 is skipped"
    assert metrics["data/a/reward"] == metrics["data/b/reward"] == 1.5


def test_skipped_rollouts_leave_their_group() -> None:
    config = RLConfig(prompts_per_step=4, group_size=3)
    batch = collect(Numbers(), SAMPLES, no_zeros, 0, config, 0)
    assert sorted((r.sample.id, r.text) for r in batch.rollouts) == [(q, t) for q in ("q0", "q2", "q3") for t in "12"]
    assert batch.skipped == 6 and step_metrics(batch, 0, config)["reward/skipped"] == 0.5
    assert step_metrics(batch, 0, config)["reward/mean"] == 1.5
    assert not any(name.startswith("data/") for name in step_metrics(batch, 0, config))
    whole = collect(Numbers(), SAMPLES, lambda rollouts: [Score(1.0)] * len(rollouts), 0, config, 0)
    assert whole.skipped == 0 and "reward/skipped" not in step_metrics(whole, 0, config)


def test_without_the_score_of_the_greedy_answer_a_group_is_skipped() -> None:
    config = RLConfig(prompts_per_step=4, group_size=3, advantage="remax")
    batch = collect(Numbers(), SAMPLES, no_zeros, 0, config, 0)
    assert sorted({r.sample.id for r in batch.rollouts}) == ["q2", "q3"] and batch.skipped == 8  # q0's answer is 0
    assert sorted(s.total for s in batch.greedy) == [2.0, 3.0]


def test_dynamic_sampling_asks_for_other_prompts_in_place_of_skipped_groups() -> None:
    config = RLConfig(prompts_per_step=2, group_size=3, dynamic_sampling=3)
    batch = collect(Numbers(), SAMPLES, no_zeros, 0, config, 0)
    assert len({r.group_id for r in batch.rollouts}) == 2 and "q1" not in {r.sample.id for r in batch.rollouts}


def test_a_step_in_which_all_are_skipped_is_an_error() -> None:
    config = RLConfig(prompts_per_step=4, group_size=3)
    with pytest.raises(ValueError, match="step 6: the reward skipped all of 12 rollouts"):
        collect(Numbers(), SAMPLES, lambda rollouts: [None] * len(rollouts), 5, config, 0)


def test_a_reward_that_writes_into_rollouts_changes_nothing() -> None:
    samples = [Sample("q0", (Message("user", ("?",)),), metadata={"level": 1})]

    def overwrites(rollouts: Sequence[Rollout]) -> list[Score]:
        for r in rollouts:
            r.segments[0].ids.fill_(7)
            r.segments[0].logprobs.fill_(-9.0)
            r.segments[0].prompt_ids.fill_(7)
            r.sample.metadata.clear()  # type: ignore[attr-defined]
        return [Score(float(r.text)) for r in rollouts]

    (first, *_) = collect(Numbers(), samples, overwrites, 0, RLConfig(prompts_per_step=1, group_size=3), 0).rollouts
    assert first.segments[0].ids.tolist() == [0] and first.segments[0].logprobs.tolist() == [0.0]
    assert first.segments[0].prompt_ids.tolist() == [0, 1] and first.sample.metadata == {"level": 1}

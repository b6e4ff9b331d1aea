"""What every GRPO recipe does around the loop: measure, train, measure again, report."""

from __future__ import annotations

from collections.abc import Sequence

from audiorl.config import GRPOConfig, OptimConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.rewards import Term, WeightedSum, load_reward
from audiorl.train.evaluate import evaluate_phase, probe
from audiorl.train.loop import grpo
from audiorl.train.run import Run
from audiorl.types import Reward, Sample


def grpo_with_evaluation(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    reward: Reward,
    run: Run,
    *,
    config: GRPOConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    seed: int,
    metric: str = "accuracy",
    eval_tokens: int | None = None,
) -> None:
    """Evaluate `before`, run GRPO with held-out probes, evaluate `after`. `eval_tokens`: length of greedy answers."""
    tokens = eval_tokens or sampling.max_new_tokens
    evaluate_phase(run, "before", policy, held_out, reward, tokens, metric)
    grpo(
        policy,
        samples,
        reward,
        run,
        config=config,
        optim=optim,
        sampling=sampling,
        seed=seed,
        evaluate=probe(policy, held_out, reward, tokens, metric),
    )
    evaluate_phase(run, "after", policy, held_out, reward, tokens, metric)


def with_reward_file(reward: WeightedSum, path: str | None, weight: float) -> WeightedSum:
    """The reward plus the one that a user's Python file defines, as the part `user`."""
    if path is None:
        return reward
    return WeightedSum((*reward.terms, Term("user", load_reward(path), weight)))


def steps_of(epochs: float, samples: int, prompts_per_step: int) -> int:
    """Steps that show each of `samples` prompts `epochs` times."""
    return max(round(epochs * samples / prompts_per_step), 1)

"""Iterative DPO: every round the policy answers, the reward picks its best and worst answer, and DPO learns from both.

    audiorl train dpo-online --out runs/online --path Qwen/Qwen2.5-Omni-3B \
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json

The reference of a round is the policy that wrote its answers. Any loss of `dpo-audio-qa` may be used; pairs are
made of answers whose rewards differ. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass

from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig, SamplingConfig
from audiorl.config.recipe import HeldOutOptions, RecipeConfig, RewardOptions
from audiorl.data.preferences import pairs_to_judged
from audiorl.data.schedule import batch_of_step
from audiorl.recipes._common import (
    answer_reward,
    evaluate_around_training,
    evaluation_of,
    policy_from,
    read_questions,
    with_user_reward,
)
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.preference import prefer, sampled_pairs


@dataclass(frozen=True)
class OnlineDPOConfig(HeldOutOptions, RewardOptions, RecipeConfig):
    think: bool = True
    """Ask for thoughts before the answer, and reward their format."""
    rounds: int = 3
    """Rounds of answering and learning."""
    prompts_per_round: int = 1024
    """Prompts that are answered in a round."""
    answers: int = 8
    """Answers sampled for each prompt."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32)
    """The loss. The steps of a round follow from its pairs, `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=5e-7)
    """The policy's optimizer."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)
    """How the answers of a round are sampled."""


def tiny() -> OnlineDPOConfig:
    return OnlineDPOConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        rounds=2,
        prompts_per_round=4,
        answers=3,
        max_steps=1,
        eval_tokens=8,
        reward_file="recipes/rewards/variety.py",
        model=ModelConfig(),
        dpo=PreferenceConfig(batch_size=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: OnlineDPOConfig, run: Run) -> None:
    samples, held_out = read_questions(config, think=config.think)
    policy = policy_from(config)
    reward = with_user_reward(config, answer_reward(config.think))
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, think=config.think)
    with evaluate_around_training(run, policy, evaluation):
        for k in range(1, config.rounds + 1):
            phase = f"round_{k}"
            if run.finished(phase):
                run.load_result(phase, policy)
            else:
                prompts = {s.id: s for s in batch_of_step(samples, k - 1, config.prompts_per_round, config.seed)}
                engine = HFEngine(policy, config.sampling)
                pairs = sampled_pairs(
                    run, phase, engine, list(prompts.values()), reward, config.answers, config.seed + k
                )
                items = pairs_to_judged(pairs) if config.dpo.loss == "kto" else pairs
                dpo = config.with_steps_for(config.dpo, len(items))
                prefer(policy, items, run, config=dpo, optim=config.optim, seed=config.seed, phase=phase)
            if k < config.rounds:
                evaluation.measure(run, f"after_{k}", policy)

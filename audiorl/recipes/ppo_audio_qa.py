"""PPO with a critic on audio question answering.

    audiorl train ppo-audio-qa --out runs/ppo --path Qwen/Qwen2.5-Omni-3B \
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json

The critic is a copy of the policy with one linear on top (`--ppo.critic.shared True`: on the policy's own trunk); in
its first steps it learns alone. The KL to the start is a penalty on every token's reward, held near a target by a
controller. `--reward-model runs/rm/checkpoints/reward_model/step_…` adds a trained reward model to accuracy and
format. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from audiorl.config import CriticConfig, KLConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.recipes._common import (
    OutsideOptions,
    PtxOptions,
    RecipeConfig,
    RewardOptions,
    answer_reward,
    evaluation_of,
    measured,
    policy_from,
    ptx_examples,
    read_questions,
)
from audiorl.rewards import ModelReward, Term, WeightedSum
from audiorl.run.folder import Run
from audiorl.train.rl.train import train_rl


@dataclass(frozen=True)
class Config(OutsideOptions, PtxOptions, RewardOptions, RecipeConfig):
    think: bool = True
    """Ask for thoughts before the answer, and reward their format."""
    reward_model: str | None = None
    """A reward model's folder, added to the reward as the part `model`; None adds none."""
    reward_model_weight: float = 1.0
    """Weight of `reward_model`."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    ppo: RLConfig = RLConfig(
        advantage="gae",
        prompts_per_step=64,
        group_size=1,
        mini_batches=4,
        aggregation="token-mean",
        kl=KLConfig(place="reward", kind="k1", control="log-space", target=0.02),
        kl_beta=0.02,
        critic=CriticConfig(warmup_steps=10, optim=OptimConfig(lr=5e-6)),
        eval_every=100,
        save_every=50,
    )
    """The estimator and its critic. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The policy's optimizer; `--ppo.critic.optim` is the critic's."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)
    """How answers are sampled in training."""


def tiny() -> Config:
    return Config(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        ppo=replace(
            Config().ppo,
            prompts_per_step=4,
            mini_batches=2,
            critic=CriticConfig(warmup_steps=1),
            save_every=1,
        ),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    samples, held_out = read_questions(config, think=config.think)
    policy = policy_from(config)
    reward = answer_reward(config.think)
    if config.reward_model is not None:
        model = ModelReward(config.reward_model, device=config.model.device)
        reward = WeightedSum((*reward.terms, Term("model", model, config.reward_model_weight)))
    reward = config.rewarded(reward)
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, think=config.think)
    with measured(run, policy, evaluation) as evaluate:
        train_rl(
            policy,
            samples,
            reward,
            run,
            config=config.scheduled(config.ppo, len(samples)),
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="ppo",
            evaluate=evaluate,
            supervised=ptx_examples(config, config.ptx_data, config.ppo),
        )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

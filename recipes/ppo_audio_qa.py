"""PPO with a critic on audio question answering.

    audiorl train recipes/ppo_audio_qa.py --out runs/ppo --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json

The critic is a copy of the policy with one linear on top (`--ppo.critic.shared True`: on the policy's own trunk); in
its first steps it learns alone. The KL to the start is a penalty on every token's reward, held near a target by a
controller. `--reward-model runs/rm/checkpoints/reward_model/step_…` adds a trained reward model to accuracy and
format. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from audiorl.config import CriticConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.data.bundled import bundled_set
from audiorl.data.manifest import read_samples
from audiorl.recipe.common import (
    RecipeConfig,
    answer_reward,
    measured,
    policy_from,
    read_sets,
    split_held_out,
    with_reward_file,
)
from audiorl.report import write_report
from audiorl.rewards import ModelReward, Term, WeightedSum
from audiorl.rl.train import Evaluate, train_rl
from audiorl.run.folder import Run
from audiorl.types import Sample


@dataclass(frozen=True)
class Config(RecipeConfig):
    think: bool = True
    reward_model: str | None = None
    """A reward model's folder, the part `model` of the reward."""
    reward_model_weight: float = 1.0
    reward_file: str | None = None
    reward_weight: float = 1.0
    eval_tokens: int = 256
    ppo: RLConfig = RLConfig(
        advantage="gae",
        prompts_per_step=64,
        group_size=1,
        mini_batches=4,
        aggregation="token-mean",
        kl_in="reward",
        kl_kind="k1",
        kl_beta=0.02,
        kl_control="log-space",
        kl_target=0.02,
        critic=CriticConfig(warmup_steps=10, optim=OptimConfig(lr=5e-6)),
        eval_every=100,
        save_every=50,
    )
    optim: OptimConfig = OptimConfig(lr=1e-6)
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)


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
    if not config.data:
        raise ValueError("name the questions to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    policy = policy_from(config)
    reward = answer_reward(config.think)
    if config.reward_model is not None:
        model = ModelReward(config.reward_model, device=config.model.device)
        reward = WeightedSum((*reward.terms, Term("model", model, config.reward_model_weight)))
    reward = with_reward_file(reward, config.reward_file, config.reward_weight)

    def train(evaluate: Evaluate) -> None:
        train_rl(
            policy,
            samples,
            reward,
            run,
            config=replace(config.ppo, steps=config.steps(len(samples), config.ppo.prompts_per_step)),
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="ppo",
            evaluate=evaluate,
        )

    measured(run, policy, held_out, reward, train, eval_tokens=config.eval_tokens)
    print(write_report(run.dir))


def read(paths: tuple[str, ...], config: Config) -> list[Sample]:
    return read_sets(
        paths, config, lambda name: bundled_set(name, config.think, config.seed), think=config.think, read=read_samples
    )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

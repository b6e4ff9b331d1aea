"""GRPO with think on audio question answering, with Ke-Omni-R's settings.

    audiorl train recipes/mmau_grpo.py --out runs/mmau --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl musicbench.jsonl --held-out mmau-test-mini.json

`--data` and `--held-out` take AVQA, MusicBench, MMAU, MMAR and native manifests. `--think False` asks for the answer
only. `--grpo.advantage leave-one-out` makes it RLOO; the other estimators are as near. `--path tiny --data bundled`
tries the recipe without any download. `--reward-file my.py` adds a reward of your own.
"""

from __future__ import annotations

from dataclasses import dataclass

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.recipe.common import (
    PtxOptions,
    RecipeConfig,
    RewardOptions,
    answer_reward,
    measured,
    policy_from,
    ptx_examples,
    read_questions,
)
from audiorl.rl.train import train_rl
from audiorl.run.folder import Run


@dataclass(frozen=True)
class Config(PtxOptions, RewardOptions, RecipeConfig):
    think: bool = True
    """Ask for thoughts before the answer, and reward their format."""
    epochs: float = 2.0
    """Passes over the training questions."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    grpo: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
    """The estimator. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The policy's optimizer."""
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
        grpo=RLConfig(group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    samples, held_out = read_questions(config, think=config.think)
    policy = policy_from(config)
    reward = config.rewarded(answer_reward(config.think))
    with measured(run, policy, held_out, reward, config.eval_tokens) as evaluate:
        train_rl(
            policy,
            samples,
            reward,
            run,
            config=config.scheduled(config.grpo, len(samples)),
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="grpo",
            evaluate=evaluate,
            supervised=ptx_examples(config, config.ptx_data, config.grpo),
        )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

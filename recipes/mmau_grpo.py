"""GRPO with think on audio question answering, with Ke-Omni-R's settings.

    audiorl train recipes/mmau_grpo.py --out runs/mmau --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl musicbench.jsonl --held-out mmau-test-mini.json

`--data` and `--held-out` take AVQA, MusicBench, MMAU, MMAR and native manifests. `--think False` asks for the answer
only. `--grpo.advantage leave-one-out` makes it RLOO; the other estimators are as near. `--path tiny --data bundled`
tries the recipe without any download. `--reward-file my.py` adds a reward of your own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
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
from audiorl.rl.train import Evaluate, train_rl
from audiorl.run.folder import Run
from audiorl.types import Sample


@dataclass(frozen=True)
class Config(RecipeConfig):
    think: bool = True
    epochs: float = 2.0
    reward_file: str | None = None
    reward_weight: float = 1.0
    eval_tokens: int = 256
    grpo: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
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
        grpo=RLConfig(group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the questions to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    policy = policy_from(config)
    reward = with_reward_file(answer_reward(config.think), config.reward_file, config.reward_weight)

    def train(evaluate: Evaluate) -> None:
        train_rl(
            policy,
            samples,
            reward,
            run,
            config=replace(config.grpo, steps=config.steps(len(samples), config.grpo.prompts_per_step)),
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="grpo",
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

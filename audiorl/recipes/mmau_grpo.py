"""GRPO with thinking on audio question answering, with Ke-Omni-R's settings.

    audiorl train mmau-grpo --out runs/mmau --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 \\
        --data avqa/train_qa.json:5000 musicbench/MusicBench_train.json:5000 --held-out mmau-test-mini.json

`--data` and `--held-out` take AVQA and MusicBench as published, MMAU, MMAR and native manifests. `FILE:x0.5` shows half
of a set's rows an epoch, `FILE:x2` all of them twice. `--think False` asks for the answer only. `--grpo.advantage
rloo` makes it RLOO; other estimators are other options of `--grpo`. `--reward-file my.py` adds a reward of
your own. `--control` also trains on the answers by SFT, without thoughts, for as much compute. `--path tiny --data
bundled` tries the recipe without any download.

As in Ke-Omni-R: 5,000 questions of AVQA without those that need the picture and 5,000 of MusicBench (key, tempo mark,
time signature), 2 epochs, 8 answers of at most 64 tokens to a prompt at temperature 1, accuracy and format rewarded 2
to 1, advantages divided by their standard deviation + 1e-4, token mean of each answer, k3 in the loss with β 0.01,
learning rate 1e-6. Different: the prompt asks for the same in other words, one option a line; an answer that names its
option by the letter is right, too; keys that sound the same are one option. Prompts are not limited to 512 tokens, as a
prompt that is cut lacks a part of its audio; these sets' clips of 10 s make 250 tokens. 8 prompts a step are our
choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.recipes._common import (
    ControlOptions,
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
    train_control,
)
from audiorl.run.folder import Run
from audiorl.train.rl.train import train_rl


@dataclass(frozen=True)
class Config(ControlOptions, OutsideOptions, PtxOptions, RewardOptions, RecipeConfig):
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
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, think=config.think)
    grpo = config.scheduled(config.grpo, len(samples))
    with measured(run, policy, evaluation) as evaluate:
        train_rl(
            policy,
            samples,
            reward,
            run,
            config=grpo,
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="grpo",
            evaluate=evaluate,
            supervised=ptx_examples(config, config.ptx_data, config.grpo),
        )
        train_control(config, run, "grpo", grpo, samples, evaluation)


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

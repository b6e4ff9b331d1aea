"""A reward model on audio prompts: a score for a whole answer, or (`--kind process`) a judgement of every step.

    audiorl train reward-model --out runs/rm --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data pairs.jsonl
    audiorl train reward-model --kind process --out runs/prm --data steps.jsonl …

Rows are pairs of answers, or answers in steps with labels (docs/reference/data.md). The result serves as a reward:
`ModelReward("runs/rm/checkpoints/reward_model/step_…")` and `ProcessModelReward(…)` in a recipe or a reward file, and
`--reward-model` of `audiorl train ppo-audio-qa`. `--path tiny --data bundled` tries the recipe without any
download.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from audiorl.config import ModelConfig, OptimConfig, ProcessRewardConfig, RewardModelConfig
from audiorl.config.recipe import RecipeConfig
from audiorl.data.bundled import bundled_pairs, bundled_steps
from audiorl.data.preferences import Steps, read_pairs, read_steps
from audiorl.eval._phases import measure_phase
from audiorl.models.examples import Example
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.models.value import ValueModel
from audiorl.recipes._common import RowCheck, read_split
from audiorl.report import write_report
from audiorl.run.folder import Run
from audiorl.train.preference import pair_examples
from audiorl.train.reward_model import judged_right, ranked_right, train_process_reward, train_reward_model


@dataclass(frozen=True)
class RewardModelRecipeConfig(RecipeConfig):
    kind: Literal["outcome", "process"] = "outcome"
    """A score for a whole answer, learned from pairs, or a judgement of every step, learned from labelled steps."""
    think: bool = False
    """Prompts ask for thoughts, and answers have them."""
    outcome: RewardModelConfig = RewardModelConfig(batch_size=32)
    """The loss of `--kind outcome`. Its steps follow from `epochs` and `max_steps`."""
    process: ProcessRewardConfig = ProcessRewardConfig(batch_size=32)
    """The loss of `--kind process`. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=5e-6, warmup_steps=20)
    """The model's optimizer."""


def tiny() -> RewardModelRecipeConfig:
    return RewardModelRecipeConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        model=ModelConfig(),
        outcome=RewardModelConfig(batch_size=4, save_every=1),
        process=ProcessRewardConfig(batch_size=4, save_every=1),
    )


def main(config: RewardModelRecipeConfig, run: Run) -> None:
    (outcome if config.kind == "outcome" else process)(config, run)
    print(write_report(run.dir))


def outcome(config: RewardModelRecipeConfig, run: Run) -> None:
    bundled = partial(bundled_pairs, think=config.think, seed=config.seed)
    check = RowCheck.of(config, trained=pair_examples, measured=pair_examples)
    pairs, held_out = read_split(config, bundled, read_pairs, check=check, think=config.think)
    policy = check.policy()
    torch.manual_seed(config.seed)
    model = ValueModel(policy, spread=1.0)
    training = config.with_steps_for(config.outcome, len(pairs))
    measure_phase(run, "before", lambda: ranked_right(model, held_out))
    train_reward_model(model, pairs, run, config=training, optim=config.optim, seed=config.seed)
    measure_phase(run, "after", lambda: ranked_right(model, held_out))


def process(config: RewardModelRecipeConfig, run: Run) -> None:
    bundled = partial(bundled_steps, seed=config.seed)

    def marked(item: Steps) -> list[Example]:
        return [Example(item.sample, "\n\n".join(item.steps))]

    check = RowCheck.of(config, trained=marked, measured=marked)
    answers, held_out = read_split(config, bundled, read_steps, check=check, think=config.think)
    policy = check.policy()
    judge = ProcessRewardModel(policy, config.process.marker, config.process.good, config.process.bad)
    training = config.with_steps_for(config.process, len(answers))
    measure_phase(run, "before", lambda: judged_right(judge, held_out))
    train_process_reward(policy, answers, run, config=training, optim=config.optim, seed=config.seed)
    measure_phase(run, "after", lambda: judged_right(judge, held_out))

"""Preference optimisation on audio prompts: DPO and its family from pairs of answers.

    audiorl train dpo-audio-qa --out runs/dpo --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data pairs.jsonl --held-out mmau-test-mini.json

A row of `--data` is a question with `chosen` and `rejected` answers (docs/reference/data.md). `--dpo.loss` takes dpo,
cdpo, ipo, r-dpo, sampo, ld-dpo, simpo, cpo, orpo and kto. kto sees a desirable and an undesirable answer in every pair,
and learns from single answers, too: rows with `completion` and `desirable`, as `audiorl view --label scores` writes
them.
Accuracy is measured on the questions of `--held-out`. `--path tiny --data bundled` tries the recipe without any
download. `audiorl/recipes/dpo_online.py` makes its pairs from the policy's own answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig
from audiorl.config.recipe import HeldOutOptions, RecipeConfig
from audiorl.data.bundled import bundled_pairs, bundled_set
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import Judged, Pair, pairs_to_judged, read_pairs, read_pairs_and_judged
from audiorl.data.sets import split_held_out
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_example
from audiorl.recipes._common import (
    NOTHING,
    Given,
    RowCheck,
    answer_reward,
    evaluate_around_training,
    evaluation_of,
    read_sets,
)
from audiorl.rewards import final_text
from audiorl.run.folder import Run
from audiorl.train.preference import prefer
from audiorl.types import Sample


@dataclass(frozen=True)
class DPOConfig(HeldOutOptions, RecipeConfig):
    think: bool = False
    """Prompts ask for thoughts, and answers have them."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32, eval_every=100)
    """The loss. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=5e-7, warmup_steps=20)
    """The policy's optimizer."""


def tiny() -> DPOConfig:
    return DPOConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        dpo=PreferenceConfig(batch_size=4, save_every=1),
    )


def main(config: DPOConfig, run: Run, given: Given = NOTHING) -> AudioPolicy:
    """Train on the pairs and return the policy."""
    reward = answer_reward(config.think)

    def trained(row: Pair | Judged) -> list[Example]:
        return [answer_example(judged.sample, judged.answer) for judged in pairs_to_judged([row])]

    check = RowCheck.of(config, reward, given.policy, eval_tokens=config.eval_tokens, trained=trained)
    rows, held_out = read(config, given, check)
    items: Any = pairs_to_judged(rows) if config.dpo.loss == "kto" else rows
    policy = check.policy()
    evaluation = evaluation_of(config, items, held_out, reward, config.eval_tokens, check=check, think=config.think)
    with evaluate_around_training(run, policy, evaluation) as evaluate:
        prefer(
            policy,
            items,
            run,
            config=config.with_steps_for(config.dpo, len(items)),
            optim=config.optim,
            seed=config.seed,
            phase=config.dpo.loss,
            evaluate=evaluate,
        )
    return policy


def read(config: DPOConfig, given: Given, check: RowCheck) -> tuple[list[Pair | Judged], list[Sample]]:
    """Return (training rows, held-out questions): those of held-out rows, where no set of questions is given.

    Of a row without a gold answer that is the chosen or desirable one; without any it cannot be measured on.
    """
    think, seed = config.think, config.seed
    pairs_of = partial(bundled_pairs, think=think, seed=seed)
    reader: Any = read_pairs_and_judged if config.dpo.loss == "kto" else read_pairs
    sets = read_sets(given.data or config.data, config, pairs_of, reader, check.train, think=think)
    bundled = partial(bundled_set, think=think, seed=seed)
    measured = given.held_out or config.held_out
    questions = read_sets(measured, config, bundled, read_samples, check.held_out, think=think)
    if questions:
        split: tuple[Any, Any] = split_held_out(sets, questions, None, config.data_seed)
        return split
    rows, held_out = split_held_out(sets, [], config.held_out_count, config.data_seed)
    asked = {sample.id: sample for row in held_out if (sample := _with_answer(row))}
    if not asked:
        raise ValueError("nothing to measure on: no held-out row has a right answer; give questions by --held-out")
    if len(asked) < len(held_out):
        print(f"held out: {len(asked)} questions of {len(held_out)} rows, once each, with a right answer", flush=True)
    return rows, [*asked.values()]


def _with_answer(row: Pair | Judged) -> Sample | None:
    sample, good = row.sample, next((judged.answer for judged in pairs_to_judged([row]) if judged.desirable), None)
    if sample.references or isinstance(good, AudioClip):
        return sample
    if good is None:
        return None
    return replace(sample, references=(final_text(good),), metadata={**sample.metadata, "last_turn": good})

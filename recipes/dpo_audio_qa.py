"""Preference optimisation on audio prompts: DPO and its family from pairs of answers.

    audiorl train recipes/dpo_audio_qa.py --out runs/dpo --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data pairs.jsonl --held-out mmau-test-mini.json

A row of `--data` is a question with `chosen` and `rejected` answers (see the README). `--dpo.loss` takes dpo, cdpo,
ipo, r-dpo, sampo, ld-dpo, simpo, cpo, orpo and kto, which sees a desirable and an undesirable answer in every pair.
Accuracy is measured on the questions of `--held-out`. `--path tiny --data bundled` tries the recipe without any
download. `recipes/dpo_online.py` makes its pairs from the policy's own answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig
from audiorl.data.bundled import bundled_pairs, bundled_set
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import Judged, Pair, pairs_to_judged, read_pairs
from audiorl.recipe.common import RecipeConfig, answer_reward, measured, policy_from, read_sets, split_held_out
from audiorl.report import write_report
from audiorl.rl.train import Evaluate
from audiorl.run.folder import Run
from audiorl.train.preference import prefer


@dataclass(frozen=True)
class Config(RecipeConfig):
    think: bool = False
    """Whether prompts and answers have thoughts."""
    eval_tokens: int = 256
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32, eval_every=100)
    optim: OptimConfig = OptimConfig(lr=5e-7, warmup_steps=20)


def tiny() -> Config:
    return Config(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        dpo=PreferenceConfig(batch_size=4, save_every=1),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the pairs to learn from: --data FILE … (or --data bundled)")
    pairs = read_sets(
        config.data,
        config,
        lambda name: bundled_pairs(name, config.think, config.seed),
        think=config.think,
        read=read_pairs,
    )
    if config.held_out:
        held_out = read_sets(
            config.held_out,
            config,
            lambda name: bundled_set(name, config.think, config.seed),
            think=config.think,
            read=read_samples,
        )
    else:
        pairs, kept = split_held_out(pairs, [], config.held_out_count)
        held_out = [p.sample for p in kept]
    policy = policy_from(config)
    items: list[Pair] | list[Judged] = pairs_to_judged(pairs) if config.dpo.loss == "kto" else pairs

    def train(evaluate: Evaluate) -> None:
        prefer(
            policy,
            items,
            run,
            config=replace(config.dpo, steps=config.steps(len(items), config.dpo.batch_size)),
            optim=config.optim,
            seed=config.seed,
            phase=config.dpo.loss,
            evaluate=evaluate,
        )

    measured(run, policy, held_out, answer_reward(config.think), train, eval_tokens=config.eval_tokens)
    print(write_report(run.dir))


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

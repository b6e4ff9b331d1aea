"""Iterative DPO: every round the policy answers, the reward picks its best and worst answer, and DPO learns from both.

    audiorl train recipes/dpo_online.py --out runs/online --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json

The reference of a round is the policy that wrote its answers. Any loss of `recipes/dpo_audio_qa.py` may be used; pairs
are made of answers whose rewards differ. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig, SamplingConfig
from audiorl.data.bundled import bundled_set
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import pairs_to_judged
from audiorl.data.schedule import batch_of_step
from audiorl.evaluation.phases import evaluate_phase
from audiorl.recipe.common import (
    RecipeConfig,
    answer_reward,
    policy_from,
    read_sets,
    split_held_out,
    with_reward_file,
)
from audiorl.report import write_report
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.answers import sampled_pairs
from audiorl.train.preference import prefer
from audiorl.types import Sample


@dataclass(frozen=True)
class Config(RecipeConfig):
    think: bool = True
    rounds: int = 3
    prompts_per_round: int = 1024
    answers: int = 8
    """Answers sampled for each prompt."""
    reward_file: str | None = None
    reward_weight: float = 1.0
    eval_tokens: int = 256
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32)
    """`steps` follow from the pairs of a round and `epochs`."""
    optim: OptimConfig = OptimConfig(lr=5e-7)
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)


def tiny() -> Config:
    return Config(
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


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the questions to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    policy = policy_from(config)
    reward = with_reward_file(answer_reward(config.think), config.reward_file, config.reward_weight)
    evaluate_phase(run, "before", policy, held_out, reward, config.eval_tokens)
    for k in range(1, config.rounds + 1):
        phase = f"round_{k}"
        if run.finished(phase):
            run.load_result(phase, policy)
        else:
            asked = batch_of_step(samples, k - 1, config.prompts_per_round, config.seed)
            asked = list({s.id: s for s in asked}.values())
            engine = HFEngine(policy, config.sampling)
            pairs = sampled_pairs(run, phase, engine, asked, reward, config.answers, config.seed + k)
            items = pairs_to_judged(pairs) if config.dpo.loss == "kto" else pairs
            dpo = replace(config.dpo, steps=config.steps(len(items), config.dpo.batch_size))
            prefer(policy, items, run, config=dpo, optim=config.optim, seed=config.seed, phase=phase)
        name = "after" if k == config.rounds else f"after_{k}"
        evaluate_phase(run, name, policy, held_out, reward, config.eval_tokens)
    print(write_report(run.dir))


def read(paths: tuple[str, ...], config: Config) -> list[Sample]:
    return read_sets(
        paths, config, lambda name: bundled_set(name, config.think, config.seed), think=config.think, read=read_samples
    )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

"""OPA-DPO: DPO on the policy's own answers and an expert's corrections of them (Yang et al. 2025, arXiv 2501.09695).

    audiorl train recipes/opa_dpo.py --out runs/opa --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json --expert my_expert.py

The policy answers every prompt; the expert revises the answer as little as it must; supervised fine-tuning on gold and
revised answers brings both onto the policy's own distribution; then DPO prefers them to the first answers, with the
fine-tuned model as start and reference. An expert is a Python file with `revise(sample, text) -> str`. Without one the
right answer replaces what the policy wrote between its <answer> tags. `--path tiny --data bundled` tries the recipe
without any download.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig, SamplingConfig, SFTConfig
from audiorl.data.bundled import bundled_set
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import Pair
from audiorl.evaluation.phases import evaluate_phase
from audiorl.models.examples import Example
from audiorl.recipe.common import RecipeConfig, answer_reward, policy_from, read_sets, split_held_out
from audiorl.report import write_report
from audiorl.rewards.files import load_function
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.answers import policy_answers
from audiorl.train.preference import prefer
from audiorl.train.sft import sft
from audiorl.types import Sample


@dataclass(frozen=True)
class Config(RecipeConfig):
    think: bool = False
    lora: bool = True
    expert: str | None = None
    """A Python file that defines revise(sample, text) -> str."""
    eval_tokens: int = 256
    sft: SFTConfig = SFTConfig(batch_size=32)
    sft_optim: OptimConfig = OptimConfig(lr=1e-5)
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32)
    dpo_optim: OptimConfig = OptimConfig(lr=1e-6)
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)


def tiny() -> Config:
    return Config(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        lora=False,
        eval_tokens=8,
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1),
        dpo=PreferenceConfig(batch_size=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8, max_batch_tokens=20_000),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the questions to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    if config.max_steps is not None:  # answers to what will not be trained on are not needed
        samples = samples[: config.max_steps * max(config.sft.batch_size, config.dpo.batch_size)]
    revise: Callable[[Sample, str], str] = correct if config.expert is None else load_function(config.expert, "revise")
    policy = policy_from(config)
    reward = answer_reward(config.think)
    evaluate_phase(run, "before", policy, held_out, reward, config.eval_tokens)

    answers = policy_answers(run, "own", HFEngine(policy, config.sampling), samples, config.seed)
    revised = [revise(s, text) for s, text in zip(samples, answers, strict=True)]
    gold = [f"<answer>{s.references[0]}</answer>" for s in samples]
    good = [list(dict.fromkeys(texts)) for texts in zip(gold, revised, strict=True)]
    examples = [Example(s, text) for s, texts in zip(samples, good, strict=True) for text in texts]
    pairs = [
        Pair(s, text, answer)
        for s, texts, answer in zip(samples, good, answers, strict=True)
        for text in texts
        if answer.strip() and text.strip() != answer.strip()
    ]
    print(f"{len(examples)} answers to learn, {len(pairs)} pairs", flush=True)
    steps = config.steps(len(examples), config.sft.batch_size)
    sft(policy, examples, run, config=replace(config.sft, steps=steps), optim=config.sft_optim, seed=config.seed)
    evaluate_phase(run, "after_sft", policy, held_out, reward, config.eval_tokens)
    steps = config.steps(len(pairs), config.dpo.batch_size)
    prefer(
        policy,
        pairs,
        run,
        config=replace(config.dpo, steps=steps),
        optim=config.dpo_optim,
        seed=config.seed,
        phase="dpo",
    )
    evaluate_phase(run, "after", policy, held_out, reward, config.eval_tokens)
    print(write_report(run.dir))


def correct(sample: Sample, text: str) -> str:
    """The policy's text with the right answer in its last <answer> tags; the right answer alone where it has none."""
    right = f"<answer>{sample.references[0]}</answer>"
    found = list(re.finditer(r"<answer>(?:(?!<answer>).)*?</answer>", text, re.DOTALL))
    return right if not found else text[: found[-1].start()] + right + text[found[-1].end() :]


def read(paths: tuple[str, ...], config: Config) -> list[Sample]:
    return read_sets(
        paths,
        config,
        lambda name: bundled_set(name, config.think, config.seed),
        think=config.think,
        read=read_samples,
    )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

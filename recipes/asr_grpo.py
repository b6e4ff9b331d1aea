"""GRPO on speech recognition, reward 1 - WER (or 1 - CER), with a gate on what must not be forgotten.

    audiorl train recipes/asr_grpo.py --out runs/asr --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data LibriSpeech/train-clean-100 --held-out LibriSpeech/test-other \
        --retention wenetspeech_test_meeting.json --unit char

After training the second set (`--retention`) is measured again; when its score has fallen by more than
`--retention-margin` the run says so and ends with an error, its checkpoints kept. `--path tiny --data bundled` tries
the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.evaluation.phases import evaluate_phase
from audiorl.recipe.common import RecipeConfig, measured, policy_from, read_sets, split_held_out, with_reward_file
from audiorl.report import write_report
from audiorl.rewards import CharAccuracy, Repetition, WeightedSum, WordAccuracy
from audiorl.rl.train import Evaluate, train_rl
from audiorl.run.folder import Run
from audiorl.types import Sample


@dataclass(frozen=True)
class Config(RecipeConfig):
    retention: tuple[str, ...] = ()
    """Sets on which the score must not fall: another language, another domain."""
    retention_margin: float = 0.01
    unit: Literal["word", "char"] = "word"
    normalizer: Literal["english", "basic", "none"] = "basic"
    reward_file: str | None = None
    reward_weight: float = 1.0
    grpo: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
    optim: OptimConfig = OptimConfig(lr=1e-6)
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=128)


def tiny() -> Config:
    return Config(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        retention=("bundled",),
        retention_margin=1.0,
        max_steps=2,
        model=ModelConfig(),
        grpo=RLConfig(group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the recordings to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    retained = read(config.retention, config)[-config.held_out_count :] if config.retention else []
    policy = policy_from(config)
    measure = WordAccuracy if config.unit == "word" else CharAccuracy
    reward = WeightedSum.of(
        accuracy=measure(normalizer=config.normalizer),
        repetition=(Repetition(), 0.2),
    )
    scored = with_reward_file(reward, config.reward_file, config.reward_weight)
    tokens = config.sampling.max_new_tokens

    def train(evaluate: Evaluate) -> None:
        train_rl(
            policy,
            samples,
            scored,
            run,
            config=replace(config.grpo, steps=config.steps(len(samples), config.grpo.prompts_per_step)),
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="grpo",
            evaluate=evaluate,
        )

    if retained:
        evaluate_phase(run, "retention_before", policy, retained, reward, tokens)
    measured(run, policy, held_out, scored, train, eval_tokens=tokens)
    if retained:
        after = evaluate_phase(run, "retention_after", policy, retained, reward, tokens)["accuracy"]
    print(write_report(run.dir))
    if retained and after < run.result("retention_before")["accuracy"] - config.retention_margin:
        before = run.result("retention_before")["accuracy"]
        raise ValueError(
            f"retention: accuracy fell from {before:.3f} to {after:.3f} on {', '.join(config.retention)}, more than "
            f"{config.retention_margin}; take an earlier checkpoint, a lower optim.lr or a higher grpo.kl_beta"
        )


def read(paths: tuple[str, ...], config: Config) -> list[Sample]:
    return read_sets(paths, config, lambda _: bundled_transcripts(), think=False, read=read_samples)


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

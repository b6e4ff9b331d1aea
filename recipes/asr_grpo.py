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

from audiorl.config import GRPOConfig, ModelConfig, OptimConfig, SamplingConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.report import write_report
from audiorl.rewards import CharAccuracy, Repetition, WeightedSum, WordAccuracy
from audiorl.train.evaluate import evaluate_phase
from audiorl.train.experiment import (
    grpo_with_evaluation,
    policy_from,
    read_sets,
    split_held_out,
    steps_of,
    with_reward_file,
)
from audiorl.train.run import Run
from audiorl.types import Sample


@dataclass(frozen=True)
class Config:
    path: str = "Qwen/Qwen2.5-Omni-3B"
    """A local folder, a hub id, or `tiny`."""
    data: tuple[str, ...] = ()
    """Manifests or LibriSpeech folders to train on, or `bundled`."""
    held_out: tuple[str, ...] = ()
    """Sets to measure on; without any, `held_out_count` training clips are held back."""
    held_out_count: int = 200
    retention: tuple[str, ...] = ()
    """Sets on which the score must not fall: another language, another domain."""
    retention_margin: float = 0.01
    unit: Literal["word", "char"] = "word"
    normalizer: Literal["english", "basic", "none"] = "basic"
    audio_root: str | None = None
    on_error: Literal["raise", "skip"] = "raise"
    """`skip` counts and lists unusable rows instead of stopping."""
    check_audio: bool = True
    """Decode every clip before training, so that a broken one does not stop a run in its third hour."""
    seed: int = 0
    epochs: float = 1.0
    max_steps: int | None = None
    reward_file: str | None = None
    reward_weight: float = 1.0
    lora: bool = False
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing=True)
    grpo: GRPOConfig = GRPOConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
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
        grpo=GRPOConfig(group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the recordings to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    retained = read(config.retention, config)[-config.held_out_count :] if config.retention else []
    policy = policy_from(config.path, config.model, config.lora, config.seed)
    measure = WordAccuracy if config.unit == "word" else CharAccuracy
    reward = WeightedSum.of(
        accuracy=measure(normalizer=config.normalizer),
        repetition=(Repetition(), 0.2),
    )
    tokens = config.sampling.max_new_tokens
    steps = steps_of(config.epochs, len(samples), config.grpo.prompts_per_step)
    if retained:
        evaluate_phase(run, "retention_before", policy, retained, reward, tokens)
    grpo_with_evaluation(
        policy,
        samples,
        held_out,
        with_reward_file(reward, config.reward_file, config.reward_weight),
        run,
        config=replace(config.grpo, steps=min(steps, config.max_steps or steps)),
        optim=config.optim,
        sampling=config.sampling,
        seed=config.seed,
    )
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
    return read_sets(
        paths,
        bundled_transcripts,
        think=False,
        audio_root=config.audio_root,
        on_error=config.on_error,
        check_audio=config.check_audio,
    )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

"""GRPO with think on audio question answering, with Ke-Omni-R's settings.

    audiorl train recipes/mmau_grpo.py --out runs/mmau --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl musicbench.jsonl --held-out mmau-test-mini.json

`--data` and `--held-out` take AVQA, MusicBench, MMAU, MMAR and native manifests. `--think False` asks for the answer
only. `--path tiny --data bundled` tries the recipe without any download. `--reward-file my.py` adds a reward of your
own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from audiorl.config import GRPOConfig, ModelConfig, OptimConfig, SamplingConfig
from audiorl.data.bundled import bundled_questions
from audiorl.report import write_report
from audiorl.rewards import AnswerAccuracy, AnswerFormat, ThinkFormat, WeightedSum
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
    """Manifests to train on, or `bundled`."""
    held_out: tuple[str, ...] = ()
    """Manifests to measure on; without any, `held_out_count` training questions are held back."""
    held_out_count: int = 200
    audio_root: str | None = None
    on_error: Literal["raise", "skip"] = "raise"
    """`skip` counts and lists unusable rows instead of stopping."""
    check_audio: bool = True
    """Decode every clip before training, so that a broken one does not stop a run in its third hour."""
    think: bool = True
    seed: int = 0
    epochs: float = 2.0
    max_steps: int | None = None
    reward_file: str | None = None
    reward_weight: float = 1.0
    eval_tokens: int = 256
    lora: bool = False
    """Train low-rank adapters (`--model.lora` sets their shape) instead of all decoder weights."""
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing=True)
    grpo: GRPOConfig = GRPOConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
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
        grpo=GRPOConfig(group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the questions to train on: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    policy = policy_from(config.path, config.model, config.lora, config.seed)
    reward = WeightedSum.of(
        accuracy=(AnswerAccuracy(), 2.0),
        format=(ThinkFormat() if config.think else AnswerFormat(), 1.0),
    )
    steps = steps_of(config.epochs, len(samples), config.grpo.prompts_per_step)
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
        eval_tokens=config.eval_tokens,
    )
    print(write_report(run.dir))


def read(paths: tuple[str, ...], config: Config) -> list[Sample]:
    return read_sets(
        paths,
        lambda: bundled_questions(config.think, seed=config.seed),
        think=config.think,
        audio_root=config.audio_root,
        on_error=config.on_error,
        check_audio=config.check_audio,
    )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

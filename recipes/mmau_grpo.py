"""GRPO with think on audio question answering, with Ke-Omni-R's settings.

    audiorl train recipes/mmau_grpo.py --out runs/mmau --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl musicbench.jsonl --held-out mmau-test-mini.json

`--data` and `--held-out` take AVQA, MusicBench, MMAU, MMAR and native manifests. `--think False` asks for the answer
only. `--path tiny --data bundled` tries the recipe without any download. `--reward-file my.py` adds a reward of your
own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from audiorl.config import GRPOConfig, LoraConfig, ModelConfig, OptimConfig, SamplingConfig
from audiorl.data.bundled import bundled_questions
from audiorl.data.manifest import read_samples
from audiorl.models import load_policy
from audiorl.models.qwen_omni import tiny as tiny_qwen_omni
from audiorl.report import write_report
from audiorl.rewards import AnswerAccuracy, AnswerFormat, ThinkFormat, WeightedSum
from audiorl.train.experiment import grpo_with_evaluation, steps_of, with_reward_file
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
    on_error: str = "raise"
    """`skip` counts and lists unusable rows instead of stopping."""
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
    samples = read(config.data, config)
    if config.held_out:
        held_out = read(config.held_out, config)
    else:
        held_out, samples = samples[: config.held_out_count], samples[config.held_out_count :]
    model = replace(config.model, lora=config.model.lora or LoraConfig()) if config.lora else config.model
    torch.manual_seed(config.seed)  # adapters start at random
    policy = tiny_qwen_omni(whisper=False, config=model) if config.path == "tiny" else load_policy(config.path, model)
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
    if not paths:
        raise ValueError("name the questions to train on: --data FILE … (or --data bundled)")
    samples: list[Sample] = []
    for path in paths:
        if path == "bundled":
            samples += bundled_questions(config.think, seed=config.seed)
            continue
        loaded = read_samples(path, think=config.think, audio_root=config.audio_root, on_error=config.on_error)
        print(loaded.summary())
        samples += loaded.samples
    return samples


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

"""Supervised fine-tuning on audio prompts: questions with their answers, or speech with its transcripts.

    audiorl train recipes/sft_audio.py --out runs/sft --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json
    audiorl train recipes/sft_audio.py --out runs/asr --data LibriSpeech/train-clean-100 --task transcripts …

What is learned: the first reference, inside <answer> tags for questions; `--thought reasoning` puts the row's field
`reasoning` before it in <think> tags. `--sft.sort True --sft.weighting sequence` are LongAlign's sorted batches and
loss weighting. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from audiorl.config import ModelConfig, OptimConfig, SFTConfig
from audiorl.data.bundled import bundled_set, bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.evaluation.phases import evaluate_phase
from audiorl.models.examples import Example
from audiorl.recipe.common import RecipeConfig, answer_reward, policy_from, read_sets, split_held_out
from audiorl.report import write_report
from audiorl.rewards import WeightedSum, WordAccuracy
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.types import Sample


@dataclass(frozen=True)
class Config(RecipeConfig):
    task: Literal["questions", "transcripts"] = "questions"
    thought: str | None = None
    """The field of a row that holds its thought."""
    eval_tokens: int = 256
    sft: SFTConfig = SFTConfig(batch_size=32)
    optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")


def tiny() -> Config:
    return Config(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1, sort=True, weighting="sequence"),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the rows to learn from: --data FILE … (or --data bundled)")
    samples, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    policy = policy_from(config)
    examples = [Example(s, target(s, config)) for s in samples]
    if config.task == "questions":
        reward = answer_reward(config.thought is not None)
    else:
        reward = WeightedSum.of(accuracy=WordAccuracy(normalizer="basic"))
    steps = config.steps(len(examples), config.sft.batch_size)
    evaluate_phase(run, "before", policy, held_out, reward, config.eval_tokens)
    sft(policy, examples, run, config=replace(config.sft, steps=steps), optim=config.optim, seed=config.seed)
    evaluate_phase(run, "after", policy, held_out, reward, config.eval_tokens)
    print(write_report(run.dir))


def target(sample: Sample, config: Config) -> str:
    """The turn to learn. Raises ValueError naming a sample without a reference or a thought."""
    if not sample.references:
        raise ValueError(f"sample {sample.id!r}: no reference to learn")
    if config.task == "transcripts":
        return sample.references[0]
    answer = f"<answer>{sample.references[0]}</answer>"
    if config.thought is None:
        return answer
    thought = sample.metadata.get(config.thought)
    if not isinstance(thought, str) or not thought.strip():
        raise ValueError(f"sample {sample.id!r}: its row has no text in the field {config.thought!r}")
    return f"<think>{thought.strip()}</think>{answer}"


def read(paths: tuple[str, ...], config: Config) -> list[Sample]:
    think = config.thought is not None

    def bundled(name: str) -> list[Sample]:
        return bundled_set(name, think, config.seed) if config.task == "questions" else bundled_transcripts()

    return read_sets(paths, config, bundled, think=think, read=read_samples)


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

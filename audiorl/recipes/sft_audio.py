"""Supervised fine-tuning on audio prompts: questions with their answers, or speech with its transcripts.

    audiorl train sft-audio --out runs/sft --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json
    audiorl train sft-audio --out runs/asr --data LibriSpeech/train-clean-100 --task transcripts …

What is learned: the first reference, inside <answer> tags for questions; `--thought reasoning` puts the row's field
`reasoning` before it in <think> tags. Of a conversation (`messages`, `conversations`) every turn of the assistant is
learned as it is written, each after the turns before it; of TRL's `prompt` with `completion` the completion alone.
`--sft.sort True --sft.weighting sequence` are LongAlign's sorted batches and loss weighting. `--path tiny --data
bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from audiorl.config import ModelConfig, OptimConfig, SFTConfig
from audiorl.config.recipe import HeldOutOptions, RecipeConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.eval._phases import ErrorRate
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.recipes._common import (
    NOTHING,
    Given,
    RowCheck,
    answer_reward,
    evaluate_around_training,
    evaluation_of,
    read_questions,
    read_split,
    supervised_turns,
)
from audiorl.rewards import WeightedSum, WordAccuracy
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.types import Sample


@dataclass(frozen=True)
class SFTAudioConfig(HeldOutOptions, RecipeConfig):
    task: Literal["questions", "transcripts"] = "questions"
    """Learn the answers to questions, in <answer> tags, or the transcripts of speech."""
    thought: str | None = None
    """The field of a row that holds its thought, learned before the answer in <think> tags; None: no thoughts."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out row."""
    sft: SFTConfig = SFTConfig(batch_size=32)
    """Batches and loss. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")
    """The model's optimizer."""


def tiny() -> SFTAudioConfig:
    return SFTAudioConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1, sort=True, weighting="sequence"),
    )


def main(config: SFTAudioConfig, run: Run, given: Given = NOTHING) -> AudioPolicy:
    """Train on the rows and return the policy."""
    if config.task == "questions":
        thinks = config.thought is not None
        source: dict[str, Any] = {"think": thinks, "keep_conversations": not thinks}
        read: Any = partial(read_questions, config, given=given, **source)
        reward = answer_reward(thinks)
    elif config.thought is not None:
        raise ValueError("--thought: belongs to --task questions; transcripts are learned without thoughts")
    else:
        source = {"bundled": lambda _: bundled_transcripts(), "think": False, "keep_conversations": True}
        read = partial(read_split, config, read=read_samples, given=given, **source)
        reward = WeightedSum.of(accuracy=WordAccuracy(normalizer="basic"))

    def learned(sample: Sample) -> list[Example]:
        return supervised_turns(sample, config.task == "questions", config.thought)

    check = RowCheck.of(config, reward, given.policy, eval_tokens=config.eval_tokens, trained=learned)
    samples, held_out = read(check=check)
    examples = [example for sample in samples for example in learned(sample)]
    policy = check.policy()
    errors = ErrorRate() if config.task == "transcripts" else None
    evaluation = evaluation_of(
        config, samples, held_out, reward, config.eval_tokens, check=check, errors=errors, **source
    )
    with evaluate_around_training(run, policy, evaluation):
        training = config.with_steps_for(config.sft, len(examples))
        sft(policy, examples, run, config=training, optim=config.optim, seed=config.seed)
    return policy

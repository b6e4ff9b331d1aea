"""What recipes do around a trainer: read data, load the policy, measure, train, measure again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from audiorl.config import LoraConfig, ModelConfig
from audiorl.data.manifest import Loaded
from audiorl.evaluation.phases import evaluate_phase, probe
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.dual_branch import dualize
from audiorl.models.qwen_omni import tiny as tiny_qwen_omni
from audiorl.rewards import AnswerAccuracy, AnswerFormat, Term, ThinkFormat, WeightedSum, load_reward
from audiorl.rl.train import Evaluate
from audiorl.rollout.speech_decoder import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.types import Reward, Sample
from tokenizers_audio import load as load_codec

T = TypeVar("T")


@dataclass(frozen=True)
class RecipeConfig:
    """The options that all recipes on a user's own model and data share."""

    path: str = "Qwen/Qwen2.5-Omni-3B"
    """A local folder, a hub id, or `tiny`."""
    data: tuple[str, ...] = ()
    """What to train on: files, folders, or the bundled speech by name."""
    held_out: tuple[str, ...] = ()
    """Sets to measure on; without any, `held_out_count` training rows are held back."""
    held_out_count: int = 200
    audio_root: str | None = None
    on_error: Literal["raise", "skip"] = "raise"
    """`skip` counts and lists unusable rows instead of stopping."""
    check_audio: bool = True
    """Decode every clip before training, so that a broken one does not stop a run in its third hour."""
    seed: int = 0
    epochs: float = 1.0
    max_steps: int | None = None
    lora: bool = False
    """Train low-rank adapters (`--model.lora` sets their shape) instead of all decoder weights."""
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing=True)

    def steps(self, items: int, per_step: int) -> int:
        """Steps that show each of `items` `epochs` times, at most `max_steps`."""
        steps = max(round(self.epochs * items / per_step), 1)
        return min(steps, self.max_steps or steps)


def read_sets(
    paths: Sequence[str],
    config: RecipeConfig,
    bundled: Callable[[str], Sequence[T]],
    *,
    think: bool,
    read: Callable[..., Loaded[T]],
) -> list[T]:
    """The rows of several files in order, `bundled(name)` for a name that begins with `bundled`.

    `read` is `read_samples`, `read_pairs` or another reader with their options. Says what was read and skipped.
    """
    items: list[T] = []
    for path in paths:
        if path.startswith("bundled"):
            items += bundled(path)
            continue
        loaded = read(
            path, think=think, audio_root=config.audio_root, on_error=config.on_error, check_audio=config.check_audio
        )
        print(loaded.summary(), flush=True)
        if loaded.skipped:
            print(loaded.listing(), flush=True)
        items += loaded.samples
    return items


def split_held_out(items: Sequence[T], held_out: Sequence[T], count: int) -> tuple[list[T], list[T]]:
    """(training items, held-out items): where no set is held out, the first `count` training items are."""
    split = (list(items), list(held_out)) if held_out else (list(items[count:]), list(items[:count]))
    for name, part in zip(("train on", "measure on"), split, strict=True):
        if not part:
            raise ValueError(f"nothing left to {name}: {len(items)} rows read, {count} of them held out")
    return split


def policy_from(config: RecipeConfig) -> AudioPolicy:
    """The policy of a local folder or hub id, `tiny` for a small random one; `lora` adds adapters if none are asked."""
    if config.path == "tiny" and (config.lora or config.model.lora):
        raise ValueError("the random model `tiny` is in no folder that an adapter could name; save one, or leave lora")
    model = replace(config.model, lora=config.model.lora or LoraConfig()) if config.lora else config.model
    torch.manual_seed(config.seed)  # adapters and value heads start at random
    return tiny_qwen_omni(whisper=False, config=model) if config.path == "tiny" else load_policy(config.path, model)


def with_voice(policy: AudioPolicy, codec: str | Path, seed: int = 0) -> CodecSpeechDecoder:
    """The policy's voice in the codec at `codec`; a policy that writes text only is dualized first."""
    loaded = load_codec(codec)
    if policy.speech is None:
        dualize(policy, loaded.num_codebooks, loaded.codebook_size, seed)
    policy.set_codec(loaded)
    return CodecSpeechDecoder.of(policy)


def measured(
    run: Run,
    policy: AudioPolicy,
    held_out: Sequence[Sample],
    reward: Reward,
    train: Callable[[Evaluate], None],
    *,
    eval_tokens: int,
    metric: str = "accuracy",
) -> None:
    """Evaluate `before`, train with held-out probes, evaluate `after`. `eval_tokens`: length of greedy answers."""
    evaluate_phase(run, "before", policy, held_out, reward, eval_tokens, metric)
    train(probe(policy, held_out, reward, eval_tokens, metric))
    evaluate_phase(run, "after", policy, held_out, reward, eval_tokens, metric)


def answer_reward(think: bool) -> WeightedSum:
    """Two to one for the right answer and the format, as Ke-Omni-R."""
    return WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=(ThinkFormat() if think else AnswerFormat(), 1.0))


def with_reward_file(reward: WeightedSum, path: str | None, weight: float) -> WeightedSum:
    """The reward plus the one that a user's Python file defines, as the part `user`."""
    if path is None:
        return reward
    return WeightedSum((*reward.terms, Term("user", load_reward(path), weight)))

"""What every GRPO recipe does around the loop: read data, load the policy, measure, train, measure again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from audiorl.config import GRPOConfig, LoraConfig, ModelConfig, OptimConfig, SamplingConfig
from audiorl.data.manifest import read_samples
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.qwen_omni import tiny as tiny_qwen_omni
from audiorl.rewards import Term, WeightedSum, load_reward
from audiorl.train.evaluate import evaluate_phase, probe
from audiorl.train.loop import grpo
from audiorl.train.run import Run
from audiorl.types import Reward, Sample


def read_sets(
    paths: Sequence[str],
    bundled: Callable[[], Sequence[Sample]],
    *,
    think: bool,
    audio_root: str | None,
    on_error: Literal["raise", "skip"],
    check_audio: bool,
) -> list[Sample]:
    """The samples of several manifests in order, `bundled()` for the name `bundled`; says what was read and skipped."""
    samples: list[Sample] = []
    for path in paths:
        if path == "bundled":
            samples += bundled()
            continue
        loaded = read_samples(path, think=think, audio_root=audio_root, on_error=on_error, check_audio=check_audio)
        print(loaded.summary(), flush=True)
        if loaded.skipped:
            print(loaded.listing(), flush=True)
        samples += loaded.samples
    return samples


def split_held_out(
    samples: Sequence[Sample], held_out: Sequence[Sample], count: int
) -> tuple[list[Sample], list[Sample]]:
    """(training samples, held-out samples): where no set is held out, the first `count` training samples are."""
    split = (list(samples), list(held_out)) if held_out else (list(samples[count:]), list(samples[:count]))
    for name, part in zip(("train on", "measure on"), split, strict=True):
        if not part:
            raise ValueError(f"nothing left to {name}: {len(samples)} samples read, {count} of them held out")
    return split


def policy_from(path: str, config: ModelConfig, lora: bool, seed: int) -> AudioPolicy:
    """The policy of a local folder or hub id, `tiny` for a small random one; `lora` adds adapters if none are asked."""
    if lora:
        config = replace(config, lora=config.lora or LoraConfig())
    torch.manual_seed(seed)  # adapters start at random
    return tiny_qwen_omni(whisper=False, config=config) if path == "tiny" else load_policy(path, config)


def grpo_with_evaluation(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    reward: Reward,
    run: Run,
    *,
    config: GRPOConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    seed: int,
    metric: str = "accuracy",
    eval_tokens: int | None = None,
) -> None:
    """Evaluate `before`, run GRPO with held-out probes, evaluate `after`. `eval_tokens`: length of greedy answers."""
    tokens = eval_tokens or sampling.max_new_tokens
    evaluate_phase(run, "before", policy, held_out, reward, tokens, metric)
    grpo(
        policy,
        samples,
        reward,
        run,
        config=config,
        optim=optim,
        sampling=sampling,
        seed=seed,
        evaluate=probe(policy, held_out, reward, tokens, metric),
    )
    evaluate_phase(run, "after", policy, held_out, reward, tokens, metric)


def with_reward_file(reward: WeightedSum, path: str | None, weight: float) -> WeightedSum:
    """The reward plus the one that a user's Python file defines, as the part `user`."""
    if path is None:
        return reward
    return WeightedSum((*reward.terms, Term("user", load_reward(path), weight)))


def steps_of(epochs: float, samples: int, prompts_per_step: int) -> int:
    """Steps that show each of `samples` prompts `epochs` times."""
    return max(round(epochs * samples / prompts_per_step), 1)

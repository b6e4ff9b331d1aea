"""A recipe for tests of runtimes: a few supervised and policy gradient steps of a tiny Qwen2.5-Omni on real speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from audiorl.config import (
    CriticConfig,
    DistillConfig,
    EstimatorConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    PtxConfig,
    RLConfig,
    SamplingConfig,
    SFTConfig,
)
from audiorl.data.corpus import bundled_speech
from audiorl.models.examples import Example
from audiorl.models.families import qwen_omni
from audiorl.rewards import RemoteReward
from audiorl.run.folder import Run
from audiorl.train.rl.train import train_rl
from audiorl.train.sft import sft
from audiorl.types import Message, Rollout, Sample, Score

OPTIM = OptimConfig(lr=2e-3, warmup_steps=2)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    threads: int = 1
    steps: int = 5
    kind: Literal["grpo", "ppo", "distill"] = "grpo"
    audio: Literal["frozen", "projector", "full"] = "full"
    prompts: int = 3
    rewards: tuple[str, ...] = ()
    """Addresses of servers that give the reward in place of this process."""


def tiny() -> Config:
    return Config()


def vowels(rollouts: Sequence[Rollout]) -> list[Score]:
    """Something that a model with random weights has more and less of."""
    return [Score(sum(r.text.lower().count(v) for v in "aeiou") / (1 + len(r.text))) for r in rollouts]


def served(servers: tuple[str, ...]) -> RemoteReward:
    """In small requests, and for as long as it takes."""
    return RemoteReward(servers, batch_size=3, tries=1000, backoff=0.1, max_backoff=1.0, cooldown=1.0)


def grpo(config: Config) -> RLConfig:
    return RLConfig(
        steps=config.steps, prompts_per_step=config.prompts, group_size=4, mini_batches=2, kl_beta=0.1,
        kl=KLConfig(control="log-space"), estimator=EstimatorConfig(std=False), micro_batch_tokens=250, ema_decay=0.5,
        save_every=2, rollouts_every=1,
    )  # fmt: skip


def ppo(config: Config) -> RLConfig:
    return RLConfig(
        steps=config.steps, prompts_per_step=config.prompts, group_size=2, epochs=2, advantage="gae",
        kl=KLConfig(place="reward", kind="k1"), kl_beta=0.1, critic=CriticConfig(optim=OPTIM, warmup_steps=1),
        ptx=PtxConfig(coef=0.1, batch=3), aggregation="token-mean", micro_batch_tokens=250, save_every=2,
    )  # fmt: skip


def distill(config: Config) -> RLConfig:
    return RLConfig(
        steps=config.steps, prompts_per_step=config.prompts + 1, group_size=2, kl_beta=0.1,
        estimator=EstimatorConfig(std=False),
        distill=DistillConfig(coef=1.0, divergence="jsd", top_k=20, off_policy=0.25), micro_batch_tokens=250,
        save_every=2,
    )  # fmt: skip


def main(config: Config, run: Run) -> None:
    torch.set_num_threads(config.threads)
    spoken = bundled_speech(min_seconds=0.8, max_seconds=2.0)[:40]
    questions = ("What is said?", "Which language is it, and who speaks?", "Why?")
    samples = [
        Sample(u.id, (Message("user", (u.clip, questions[i % 3])),), (u.text,), (), "qa", {"text": u.text})
        for i, u in enumerate(spoken)
    ]
    policy = qwen_omni.tiny(
        [u.text for u in spoken], hidden=32, layers=2, vocab_size=300, whisper=False,
        config=ModelConfig(audio=config.audio),
    )  # fmt: skip
    examples = [Example(s, s.references[0]) for s in samples]
    sft(policy, examples, run, config=SFTConfig(steps=2, batch_size=5, save_every=1), optim=OPTIM, seed=config.seed)
    train_rl(
        policy, samples, served(config.rewards) if config.rewards else vowels, run,
        config={"grpo": grpo, "ppo": ppo, "distill": distill}[config.kind](config), optim=OPTIM,
        sampling=SamplingConfig(max_new_tokens=8), seed=config.seed, supervised=examples,
        answers=examples if config.kind == "distill" else (),
    )  # fmt: skip

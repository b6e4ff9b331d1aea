"""A recipe for tests of runtimes: what learns from data as it lies, a few steps each, of tiny models on real speech."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig, ProcessRewardConfig, RewardModelConfig
from audiorl.data.bundled import bundled_pairs, bundled_steps
from audiorl.data.preferences import pairs_to_judged
from audiorl.models import AudioPolicy
from audiorl.models.families import qwen_omni
from audiorl.models.value import ValueModel
from audiorl.run.folder import Run
from audiorl.train.preference import prefer
from audiorl.train.reward_model import train_process_reward, train_reward_model

OPTIM = OptimConfig(lr=1e-3, eps=1e-4, warmup_steps=1)
"""Two answers nearly cancel each other out in some weights, and a small eps would learn from what rounding leaves."""
PHASES = ("dpo", "sampo", "kto", "reward_model", "process_reward")


@dataclass(frozen=True)
class Config:
    seed: int = 0
    threads: int = 1


def tiny() -> Config:
    return Config()


def model() -> AudioPolicy:
    config = ModelConfig(audio="full")
    return qwen_omni.tiny(["a few words"], hidden=32, layers=2, vocab_size=300, whisper=False, config=config)


def main(config: Config, run: Run) -> None:
    """Batches of five: ranks have unequal parts and unequally many micro-batches."""
    torch.set_num_threads(config.threads)
    pairs = bundled_pairs("bundled", False, config.seed)[:12]
    small = {"steps": 2, "batch_size": 5, "micro_batch_tokens": 150, "save_every": 1}
    policy = model()
    prefer(policy, pairs, run, config=PreferenceConfig(sft_coef=0.2, **small), optim=OPTIM, phase="dpo")
    prefer(policy, pairs, run, config=PreferenceConfig(loss="sampo", **small), optim=OPTIM, phase="sampo")
    prefer(policy, pairs_to_judged(pairs), run, config=PreferenceConfig(loss="kto", **small), optim=OPTIM, phase="kto")
    torch.manual_seed(config.seed)
    judge = ValueModel(policy, spread=1.0)
    train_reward_model(judge, pairs, run, config=RewardModelConfig(regulariser=0.1, **small), optim=OPTIM)
    steps = bundled_steps("bundled", config.seed)[:12]
    train_process_reward(model(), steps, run, config=ProcessRewardConfig(**small), optim=OPTIM)

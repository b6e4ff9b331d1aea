"""Short runs with a reward that a random model can improve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from audiorl.config import GenerationConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.types import Rollout, Score

CONFIG = RLConfig(
    steps=5, prompts_per_step=2, group_size=4, kl_beta=0.0, tis_cap=2.0, generation=GenerationConfig(overlap=True),
    save_every=3, rollouts_every=1,
)  # fmt: skip


OPTIM = OptimConfig(lr=3e-3)


SAMPLING = SamplingConfig(max_new_tokens=8)


def even(rollouts: Sequence[Rollout]) -> list[Score]:
    """The share of even token ids."""
    return [Score(float((r.segments[0].ids % 2 == 0).float().mean())) for r in rollouts]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, name: str) -> list[float]:
    return [row[name] for row in rows(folder)]


def assert_same(one: AudioPolicy, two: AudioPolicy, tolerance: float = 0.0) -> None:
    others = two.weights()
    for name, tensor in one.weights().items():
        torch.testing.assert_close(others[name], tensor, atol=tolerance, rtol=0)

"""A short RL run of a tiny policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiorl.config import CriticConfig, KLConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.train.rl.train import train_rl
from audiorl.types import Rollout, Sample, Score
from tests.conftest import make_omni


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second one, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CONFIG = RLConfig(
    steps=4, prompts_per_step=2, group_size=3, save_every=1, advantage="gae",
    kl=KLConfig(place="reward", control="log-space"), ema_decay=0.8,
    critic=CriticConfig(warmup_steps=1, optim=OptimConfig(lr=1e-3)),
)  # fmt: skip


OPTIM = OptimConfig(lr=3e-3, schedule="linear")


class Even:
    """The share of even token ids; in its third call one total is `value`."""

    def __init__(self, value: float | None = None):
        self.value = value
        self.calls = 0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.calls += 1
        scores = [Score(float((r.segments[0].ids % 2 == 0).float().mean())) for r in rollouts]
        if self.calls == 3 and self.value is not None:
            scores[4] = Score(self.value)
        return scores


def train(run: Run, samples: Sequence[Sample], reward: Even, optim: OptimConfig = OPTIM) -> dict[str, Tensor]:
    policy = make_omni()
    sampling = SamplingConfig(max_new_tokens=6)
    with run:
        train_rl(policy, samples, reward, run, config=CONFIG, optim=optim, sampling=sampling, seed=3)
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def rows(run: Path) -> list[dict[str, object]]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time") and k != "tokens_per_s"}
        for row in read_metrics(run / "metrics.jsonl")
    ]

"""Trainer steps on experiences with given advantages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.models import AudioPolicy
from audiorl.train.rl.trainer import TrainBatch, Trainer
from tests.support.gradients import gradients_of


def learn(learner: Trainer, batch: Sequence[Experience]) -> dict[str, float]:
    """A step on experiences whose advantages are given."""
    return learner.step(TrainBatch(learner.prepare(batch))).metrics


def gradients(policy: AudioPolicy) -> dict[str, Tensor]:
    return gradients_of(policy.trainable())

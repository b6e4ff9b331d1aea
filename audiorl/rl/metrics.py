"""The metrics of one step of reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from audiorl.config import RLConfig
from audiorl.rl.collect import RolloutBatch
from audiorl.rl.trainer import TrainOutput


def step_metrics(batch: RolloutBatch, outputs: Sequence[TrainOutput], step: int, config: RLConfig) -> dict[str, float]:
    """The trainers' metrics, averaged over them, and those of the rollouts."""
    rows = [output.metrics for output in outputs]
    trained = {name: _mean([row[name] for row in rows]) for name in rows[0]}
    return trained | rollout_metrics(batch, config) | {"rollout/staleness": staleness(batch, step)}


def rollout_metrics(batch: RolloutBatch, config: RLConfig) -> dict[str, float]:
    """Means over the rollouts of a step: reward/mean, reward/std, reward/PART, response/*, group/*."""
    scores = [r.score for r in batch.rollouts if r.score]
    totals = np.array([s.total for s in scores])
    out = {"reward/mean": float(totals.mean()), "reward/std": float(totals.std())}
    for name in scores[0].parts:
        out[f"reward/{name}"] = _mean([s.parts[name] for s in scores if name in s.parts])
    groups: dict[str, list[float]] = {}
    for r, total in zip(batch.rollouts, totals.tolist(), strict=True):
        groups.setdefault(r.group_id, []).append(total)
    out["response/length"] = _mean([r.num_sampled for r in batch.rollouts])
    out["response/cut"] = _mean([r.segments[-1].stop_reason == "length" for r in batch.rollouts])
    out["group/without_signal"] = _mean([max(values) - min(values) < 1e-6 for values in groups.values()])
    if batch.skipped:
        out["reward/skipped"] = batch.skipped / (batch.skipped + len(batch.rollouts))
    if config.dynamic_sampling:
        out |= {"group/dropped": batch.dropped, "group/refilled": batch.refilled, "group/trained": len(groups)}
    return out


def staleness(batch: RolloutBatch, step: int) -> float:
    """By how many steps the weights that sampled a segment are older than those trained on it; the mean."""
    return _mean([step - s.policy_version for r in batch.rollouts for s in r.segments if len(s.ids)])


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values)) / max(len(values), 1)

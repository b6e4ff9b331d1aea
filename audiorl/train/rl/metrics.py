"""The metrics of one step of reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from audiorl.config import RLConfig
from audiorl.data.sets import SET
from audiorl.rollout.hf import token_versions
from audiorl.train.rl.collect import RolloutBatch
from audiorl.train.rl.partial import partial_metrics


def step_metrics(batch: RolloutBatch, step: int, config: RLConfig) -> dict[str, float]:
    """Return the metrics of a step's rollouts: what they scored, how long they are, and how old their weights."""
    out = rollout_metrics(batch, config) | {"rollout/staleness": staleness(batch, step)}
    if config.generation.partial_tokens is not None:
        out |= partial_metrics(batch.rollouts, batch.unfinished, step)
    return out


def rollout_metrics(batch: RolloutBatch, config: RLConfig) -> dict[str, float]:
    """Means over the rollouts of a step: reward/mean, reward/std, reward/PART, response/*, group/*, and for each set of
    a mix data/SET/*."""
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
    of_set: dict[str, list[float]] = {}
    for r, total in zip(batch.rollouts, totals.tolist(), strict=True):
        if SET in r.sample.metadata:
            of_set.setdefault(str(r.sample.metadata[SET]), []).append(total)
    for name, values in of_set.items():
        out |= {f"data/{name}/share": len(values) / len(totals), f"data/{name}/reward": _mean(values)}
    if batch.skipped:
        out["reward/skipped"] = batch.skipped / (batch.skipped + len(batch.rollouts))
    if config.dynamic_sampling:
        out |= {"group/dropped": batch.dropped, "group/refilled": batch.refilled, "group/trained": len(groups)}
    return out


def staleness(batch: RolloutBatch, step: int) -> float:
    """By how many steps the weights that sampled a segment are older than those trained on it; the mean. Of a segment
    that several versions sampled it is the mean over its tokens."""
    segments = [s for r in batch.rollouts for s in r.segments if len(s.ids)]
    return _mean([step - float(token_versions(s).double().mean()) for s in segments])


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values)) / max(len(values), 1)

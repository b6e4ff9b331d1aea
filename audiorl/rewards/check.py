"""What every reward must return: one finite Score, or None, per rollout. It is checked wherever rewards are combined or
used, so that an error names the reward and the sample and no NaN reaches the advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from audiorl.protocols import Reward
from audiorl.types import Rollout, Score, Segment


def check_scores(name: str, scores: Any, rollouts: Sequence[Rollout], undefined: bool = False) -> list[Score | None]:
    """`scores` as a list, or a ValueError naming the reward and the sample. None skips a rollout.

    Per-segment and per-token values, where present, must be finite and as many as the rollout's segments or sampled
    tokens; with `undefined` a segment's value may be NaN.
    """
    if not isinstance(scores, Sequence) or isinstance(scores, str):
        raise ValueError(f"reward {name!r}: returned {type(scores).__name__}, expected a list of Score")
    if len(scores) != len(rollouts):
        raise ValueError(f"reward {name!r}: returned {len(scores)} scores for {len(rollouts)} rollouts")
    for score, rollout in zip(scores, rollouts, strict=True):
        if score is not None:
            _check(f"reward {name!r}, sample {rollout.sample.id!r}", score, rollout, undefined)
    return list(scores)


def score_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Score | None]:
    """The reward's scores, checked. It gets copies of tokens, log-probs and metadata: writing to them has no effect."""
    return check_scores("reward", reward([copied(r) for r in rollouts]), rollouts)


def scored_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts that the reward scored, with their scores; those that it skipped are left out."""
    scores = score_rollouts(reward, rollouts)
    return [r.with_score(s) for r, s in zip(rollouts, scores, strict=True) if s is not None]


def copied(rollout: Rollout) -> Rollout:
    """Copies of tokens, log-probs and metadata."""
    sample = replace(rollout.sample, metadata=dict(rollout.sample.metadata))
    return replace(rollout, sample=sample, segments=tuple(_copied_tensors(s) for s in rollout.segments))


def _copied_tensors(segment: Segment) -> Segment:
    values = ((field.name, getattr(segment, field.name)) for field in fields(segment))
    copies: dict[str, Any] = {name: value.clone() for name, value in values if isinstance(value, Tensor)}
    return replace(segment, **copies)


def _check(where: str, score: Any, rollout: Rollout, undefined: bool) -> None:
    if not isinstance(score, Score):
        raise ValueError(f"{where}: returned {type(score).__name__}, expected Score or None")
    values = {"total": score.total, **{f"part {name!r}": value for name, value in score.parts.items()}}
    for field, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{where}: {field} is {value}")
    for field, per_item, count in (
        ("per_segment", score.per_segment, len(rollout.segments)),
        ("per_token", score.per_token, rollout.num_sampled),
    ):
        if per_item is None:
            continue
        if len(per_item) != count:
            raise ValueError(f"{where}: {field} has {len(per_item)} values, the rollout has {count}")
        if not all(math.isfinite(v) or (undefined and math.isnan(v) and field == "per_segment") for v in per_item):
            raise ValueError(f"{where}: {field} holds a value that is not finite")
    if score.step_ends is not None and score.per_token is None:
        raise ValueError(f"{where}: step_ends without per_token; give both, or neither")
    if score.step_ends and not 0 <= min(score.step_ends) <= max(score.step_ends) < rollout.num_sampled:
        raise ValueError(f"{where}: step_ends {list(score.step_ends)}; the rollout has {rollout.num_sampled} tokens")

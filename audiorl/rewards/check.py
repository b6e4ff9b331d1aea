"""What every reward must return: one finite Score per rollout. Checked where rewards meet, so that a mistake in one of
them names itself instead of reaching the advantages as a NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from audiorl.types import Rollout, Score


def check_scores(name: str, scores: Any, rollouts: Sequence[Rollout], undefined: bool = False) -> list[Score]:
    """`scores` as a list, or a ValueError naming the reward and the sample.

    Per-segment and per-token values, where present, must be finite and as many as the rollout's segments or sampled
    tokens; with `undefined` a segment's value may be NaN.
    """
    if not isinstance(scores, Sequence) or isinstance(scores, str):
        raise ValueError(f"reward {name!r}: returned {type(scores).__name__}, expected a list of Score")
    if len(scores) != len(rollouts):
        raise ValueError(f"reward {name!r}: returned {len(scores)} scores for {len(rollouts)} rollouts")
    for score, rollout in zip(scores, rollouts, strict=True):
        _check(f"reward {name!r}, sample {rollout.sample.id!r}", score, rollout, undefined)
    return list(scores)


def _check(where: str, score: Any, rollout: Rollout, undefined: bool) -> None:
    if not isinstance(score, Score):
        raise ValueError(f"{where}: returned {type(score).__name__}, expected Score")
    values = {"total": score.total, **{f"part {name!r}": value for name, value in score.parts.items()}}
    for field, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{where}: {field} is {value}")
    for field, fine, count in (
        ("per_segment", score.per_segment, len(rollout.segments)),
        ("per_token", score.per_token, rollout.num_sampled),
    ):
        if fine is None:
            continue
        if len(fine) != count:
            raise ValueError(f"{where}: {field} has {len(fine)} values, the rollout has {count}")
        if not all(math.isfinite(v) or (undefined and math.isnan(v) and field == "per_segment") for v in fine):
            raise ValueError(f"{where}: {field} holds a value that is not finite")

"""Scores as JSON, without loss: the answer of a reward server, and the field `score` of a run's rollout files.

`audiorl.data.serialization` shows an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from audiorl.data.schema import check
from audiorl.data.schema.rollouts import ScoreDocument, ScoresDocument
from audiorl.data.serialization import check_version, naming_fields
from audiorl.types import Score


def serialize_scores(scores: Sequence[Score | None]) -> list[dict[str, Any] | None]:
    """The `scores` of an answer; they must have passed `check_scores`."""
    return [None if s is None else score_row(s) for s in scores]


def score_row(score: Score) -> dict[str, Any]:
    """One score, with null for NaN."""
    return {
        **({"weights": {name: float(value) for name, value in score.weights.items()}} if score.weights else {}),
        "total": float(score.total),
        "parts": {name: float(value) for name, value in score.parts.items()},
        "per_segment": None if score.per_segment is None else _defined(score.per_segment),
        "per_token": None if score.per_token is None else [float(x) for x in score.per_token],
        "segment_parts": {name: _defined(values) for name, values in score.segment_parts.items()},
    }


def _defined(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(x) else float(x) for x in values]


def deserialize_scores(answer: Any) -> list[Score | None]:
    """The scores of a parsed answer. Raises SerializationError; `check_scores` compares them with the rollouts."""
    with naming_fields():
        check_version(answer, "expected")
        return [None if row is None else _score(row) for row in check(answer, ScoresDocument).scores]


def read_score(row: Any, where: str) -> Score:
    """What `score_row` wrote. Raises FieldError."""
    return _score(check(row, ScoreDocument, where))


def _score(row: ScoreDocument) -> Score:
    return Score(
        total=row.total,
        parts=row.parts,
        per_segment=None if row.per_segment is None else _values(row.per_segment),
        per_token=None if row.per_token is None else tuple(row.per_token),
        segment_parts={name: _values(values) for name, values in row.segment_parts.items()},
        weights=row.weights,
    )


def _values(values: Sequence[float | None]) -> tuple[float, ...]:
    """One a segment, null where not defined."""
    return tuple(math.nan if x is None else x for x in values)

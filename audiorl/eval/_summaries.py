"""How results sum up: means, with how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.eval.metrics.prosody import MEASURES
from audiorl.types import Rollout


def summarize(
    values: Sequence[float], name: str = "mean", others: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Any]:
    """{name: mean, n, low, high, **means of `others`}; `low` and `high` are the 95% bootstrap interval of the mean.

    Raises ValueError without values.
    """
    if not len(values):
        raise ValueError("nothing to evaluate: there is no held-out data, or the reward skipped all of it")
    low, high = bootstrap_interval(values)
    means = {other: float(np.mean(column)) for other, column in (others or {}).items()}
    return {name: float(np.mean(values)), "n": len(values), "low": low, "high": high, **means}


def summarize_answers(rollouts: Sequence[Rollout], metric: str = "accuracy") -> dict[str, Any]:
    """`summarize` of the reward's part `metric`, means of its other parts, and by_task: {task: {metric, n}}."""
    parts = [dict(r.score.parts) for r in rollouts if r.score]
    if parts and metric not in parts[0]:
        raise ValueError(f"the reward has no part {metric!r}; it has {', '.join(sorted(parts[0]))}")
    values = [p[metric] for p in parts]
    others = {name: [p[name] for p in parts] for name in (parts[0] if parts else ()) if name != metric}
    by_task: dict[str, list[float]] = {}
    for r, value in zip(rollouts, values, strict=True):
        by_task.setdefault(r.sample.task or "all", []).append(value)
    tasks = {task: {metric: float(np.mean(v)), "n": len(v)} for task, v in sorted(by_task.items())}
    return summarize(values, metric, others) | {"by_task": tasks}


def summarize_outside(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """{measure: mean, …, outside: {measure: [low, high]}} of measures that no phase optimises; {} without any.

    A row without a measure, which could not be judged, does not count.
    """
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    if not columns:
        return {}
    means = {name: float(np.mean(column)) for name, column in columns.items()}
    return means | {"outside": {name: list(bootstrap_interval(column)) for name, column in columns.items()}}


def paired_changes(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, list[float]]:
    """{measure: [mean, low, high]} of the differences, after - before, of the samples that both name by id."""
    differences: dict[str, list[float]] = {}
    for id, measures in after.items():
        for name in measures.keys() & before.get(id, {}).keys():
            differences.setdefault(name, []).append(measures[name] - before[id][name])
    return {name: [float(np.mean(column)), *bootstrap_interval(column)] for name, column in sorted(differences.items())}


def speech_measures(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row of `measure_speech` tells about its text, error rates at most 1."""
    measures = {name: min(row[name], 1.0) for name in ("wer", "cer")} | {"accuracy": 1 - min(row["cer"], 1.0)}
    return measures | {name: row[name] for name in ("similarity", *MEASURES) if name in row}


def summarize_speech(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`summarize` of the share of characters understood, with means of the other columns of `measure_speech`.

    Error rates count as 1 at most, so that babble is not worse than silence. `intervals` are the 95% bootstrap
    intervals of prosody, of the rows that have voice; `reference_prosody` has the means of the reference recordings.
    """
    columns = {name: [min(row[name], 1.0) for row in rows] for name in ("wer", "cer")}
    columns |= {name: [row[name] for row in rows] for name in ("seconds", "cut")}
    for name in ("similarity", *MEASURES):
        if values := [row[name] for row in rows if name in row]:
            columns[name] = values
    result = summarize([1 - cer for cer in columns["cer"]], "accuracy", columns)
    intervals = {name: list(bootstrap_interval(columns[name])) for name in MEASURES if name in columns}
    recordings = [row["reference_prosody"] for row in rows if row.get("reference_prosody")]
    if recordings:
        result["reference_prosody"] = mean_prosody(recordings)
    return result | ({"intervals": intervals} if intervals else {})


def mean_prosody(recordings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure of prosody over recordings."""
    return {name: float(np.mean([r[name] for r in recordings])) for name in MEASURES}

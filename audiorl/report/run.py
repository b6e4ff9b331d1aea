"""Reading a run folder. Whatever is absent is empty here and named in `Run.missing`, in words for the page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiorl.run.metrics_log import read_jsonl, read_metrics

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    config: config.json. metrics: the lines of metrics.jsonl. evals: eval.json, entries in the file's order.
    answers: eval/NAME.jsonl by NAME, in that order. rollouts: (step, rows) of the first and the last recorded step.
    """

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Row, ...] = ()
    evals: Mapping[str, Row] = field(default_factory=dict)
    answers: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    rollouts: tuple[tuple[int, tuple[Row, ...]], ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe(self) -> str:
        """The recipe's short name: ``recipes/think_qa.py`` is ``think_qa``."""
        return Path(str(self.config.get("recipe") or self.name)).stem


def load_run(folder: str | Path) -> Run:
    """Read `folder`. Only a folder that does not exist, or a file with damage other than a torn end, is an error."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path}: no such run folder")
    missing: list[str] = []

    config = read_json_object(path / "config.json")
    if config is None:
        missing.append("config.json: the resolved configuration is unknown")
    metrics: list[Row] = []
    if (path / "metrics.jsonl").exists():
        metrics = read_metrics(path / "metrics.jsonl")
    if not metrics:
        missing.append("metrics.jsonl: no step has been recorded, so there are no curves")
    evals = read_json_object(path / "eval.json")
    if evals is None:
        missing.append("eval.json: no held-out evaluation has finished")
    else:
        absent = [name for name in ("before", "after") if name not in evals]
        if absent:
            missing.append(f"eval.json: no {' and no '.join(repr(a) for a in absent)} entry yet")
    written = {f.stem: f for f in sorted((path / "eval").glob("*.jsonl"))}
    in_order = [*(name for name in evals or {} if name in written), *written]
    answers = {name: tuple(read_jsonl(written[name])) for name in dict.fromkeys(in_order)}
    if not {"before", "after"} <= answers.keys():
        missing.append("eval/before.jsonl and eval/after.jsonl: changed answers cannot be shown")
    rollouts = _first_and_last(path / "rollouts")
    if not rollouts:
        missing.append("rollouts/: no rollouts were recorded")
    return Run(path, config or {}, tuple(metrics), evals or {}, answers, rollouts, tuple(missing))


def read_json_object(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _first_and_last(folder: Path) -> tuple[tuple[int, tuple[Row, ...]], ...]:
    """The rows of the first and the last step that hold any; a single step is given once."""
    found = ((re.fullmatch(r"step_(\d+)\.jsonl", f.name), f) for f in folder.glob("step_*.jsonl"))
    files = sorted((int(match[1]), f) for match, f in found if match)

    def first_with_rows(order: list[tuple[int, Path]]) -> tuple[int, tuple[Row, ...]] | None:
        return next(((step, rows) for step, f in order if (rows := tuple(read_jsonl(f)))), None)

    first, last = first_with_rows(files), first_with_rows(files[::-1])
    if first is None or last is None:
        return ()
    return (first,) if first[0] == last[0] else (first, last)

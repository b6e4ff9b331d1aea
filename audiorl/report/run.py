"""Reading a run folder. Whatever is absent is empty here and named in `Run.missing`, in words for the page."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiorl.report.schema import Answer, Evaluation, Rollout, Value, check
from audiorl.run.metrics_log import numbered_rows, read_metrics
from audiorl.run.records import RunConfig

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The contents of a run folder, filled by `load_run`.

    config: config.json. metrics: the lines of metrics.jsonl. evals: eval.json, entries in the file's order.
    answers: eval/NAME.jsonl by NAME, in that order. rollout_files: (step, rollouts/step_*.jsonl) by step.
    missing: what is not there, in words for the page.
    """

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Row, ...] = ()
    evals: Mapping[str, Row] = field(default_factory=dict)
    answers: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    rollout_files: tuple[tuple[int, Path], ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe(self) -> str:
        """The recipe's short name: ``recipes/think_qa.py`` is ``think_qa``."""
        return Path(str(self.config.get("recipe") or self.name)).stem

    @property
    def command(self) -> str:
        """The command that started the run, quoted for a shell; "" where config.json does not tell it."""
        if "recipe" not in self.config:
            return ""
        options = map(str, self.config.get("argv") or ())
        return shlex.join(["audiorl", "train", str(self.config["recipe"]), *options, "--out", str(self.path)])

    def rollouts(self, step: int) -> list[Row]:
        """The rows that were recorded at a step, read from its file."""
        return checked_rows(dict(self.rollout_files)[step], Rollout)


def load_run(folder: str | Path) -> Run:
    """Read `folder`. Only a folder that does not exist, or a file with damage other than a torn end, is an error."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path}: no such run folder")
    missing: list[str] = []

    config = read_json_object(path / "config.json")
    if config is not None:
        check(config, RunConfig, str(path / "config.json"))
    else:
        missing.append("config.json: the resolved configuration is unknown")
    metrics: list[Row] = []
    if (path / "metrics.jsonl").exists():
        metrics = read_metrics(path / "metrics.jsonl")
    if not metrics:
        missing.append("metrics.jsonl: no step has been recorded, so there are no curves")
    evals = read_json_object(path / "eval.json")
    for name, entry in (evals or {}).items():
        where = f"{path / 'eval.json'}: {name!r}"
        check(entry, Evaluation, where)
        for numbers in (entry, *(entry.get("by_task") or {}).values()):
            check(numbers, dict[str, Value], where)
    if evals is None:
        missing.append("eval.json: no held-out evaluation has finished")
    else:
        absent = [name for name in ("before", "after") if name not in evals]
        if absent:
            missing.append(f"eval.json: no {' and no '.join(repr(a) for a in absent)} entry yet")
    answer_files = {f.stem: f for f in sorted((path / "eval").glob("*.jsonl"))}
    in_order = [*(name for name in evals or {} if name in answer_files), *answer_files]
    answers = {name: tuple(checked_rows(answer_files[name], Answer)) for name in dict.fromkeys(in_order)}
    if not {"before", "after"} <= answers.keys():
        missing.append("eval/before.jsonl and eval/after.jsonl: changed answers cannot be shown")
    matches = ((re.fullmatch(r"step_(\d+)\.jsonl", f.name), f) for f in (path / "rollouts").glob("step_*.jsonl"))
    rollout_files = tuple(sorted((int(match[1]), f) for match, f in matches if match and f.stat().st_size))
    learns_from_rollouts = not metrics or any("reward/mean" in row for row in metrics)
    if not rollout_files and learns_from_rollouts:
        missing.append("rollouts/: no rollouts were recorded")
    return Run(path, config or {}, tuple(metrics), evals or {}, answers, rollout_files, tuple(missing))


def checked_rows(path: Path, schema: Any) -> list[Row]:
    """The rows of a JSON-lines file. ValueError names the row and the field that is not what `schema` says."""
    rows = []
    for number, row in numbered_rows(path):
        check(row, schema, f"{path}: row {number}")
        rows.append(row)
    return rows


def read_json_object(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value

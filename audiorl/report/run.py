"""Reading a run folder. Whatever is absent is empty and named in `RunContents.missing`, in words for the page.

The structs say what is drawn, and so checked when a folder is loaded; other fields are only shown and may hold
anything. A field may be null.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from audiorl.data.schema.types import Channel, Finite
from audiorl.report.summary import Row, read_json_object
from audiorl.run.metrics_log import numbered_rows, read_metrics
from audiorl.run.records import FROM_PYTHON, IN_MEMORY, RunConfig

_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Label = str | Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Value = float | bool | str | list[Any] | dict[str, Any] | None


class ShownClip(Struct):
    path: str | None = None
    start: _Seconds | None = None
    duration: _Seconds | None = None
    channel: Channel | None = None


class ShownTurn(Struct):
    end: _Seconds | None = None
    reference: str | None = None
    source: str | None = None
    reference_seconds: _Seconds | None = None


class ShownSample(Struct):
    id: _Label | None = None
    prompt: str | None = None
    references: list[_Value] | None = None
    choices: list[_Value] | None = None
    task: str | None = None
    audio: list[ShownClip] | None = None
    turns: list[ShownTurn] | None = None


class ShownSegment(Struct):
    text: str | None = None
    stop_reason: str | None = None
    num_tokens: _Count | None = None
    source_time: _Seconds | None = None
    emit_time: float | None = None


class ShownScore(Struct):
    total: float | None = None
    parts: dict[str, float] | None = None
    per_segment: list[float | None] | None = None
    segment_parts: dict[str, list[float | None]] | None = None


class ShownEvent(Struct):
    name: str
    start: Finite
    end: Finite
    azimuth: Finite | None = None


class ShownScene(Struct):
    """A silent video, and where and when its objects are heard."""

    video: str
    events: list[ShownEvent]


class ShownRow(ShownSample):
    """A line of rollouts/step_N.jsonl (`audiorl.data.rollout_rows`), or of eval/NAME.jsonl: a question with its answer,
    a stream, a spoken text, or a recording after a codec."""

    group_id: _Label | None = None
    index: _Label | None = None
    sample: ShownSample | None = None
    segments: list[ShownSegment] | None = None
    text: str | None = None
    score: ShownScore | None = None
    advantage: float | None = None
    correct: bool | float | None = None
    parts: dict[str, float] | None = None
    spoken_audio: ShownClip | None = None
    original: ShownClip | None = None
    decoded: ShownClip | None = None
    reference_audio: ShownClip | None = None
    transcript: str | None = None
    cer: float | None = None
    seconds: float | None = None
    f0_range: float | None = None
    energy_range: float | None = None
    pauses: float | None = None
    reference_prosody: dict[str, float] | None = None
    mel_distance: float | None = None
    stft_distance: float | None = None
    scene: ShownScene | None = None


class _Measured(Struct):
    n: _Count | None = None
    accuracy: _Share | None = None
    low: Finite | None = None
    high: Finite | None = None
    changes: dict[str, tuple[Finite, Finite, Finite]] = {}
    outside: dict[str, _Value] | list[str] = []


class _Entry(_Measured):
    by_task: dict[str, _Measured] | None = None


@dataclass(frozen=True)
class RunContents:
    """Contents of a run folder, filled by `load_run`.

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
        """Short name of the recipe: ``recipes/think_qa.py`` is ``think_qa``."""
        return Path(str(self.config.get("recipe") or self.name)).stem

    @property
    def command(self) -> str:
        """Command that started the run, quoted for a shell; "" where config.json does not tell it, or Python did."""
        options = list(map(str, self.config.get("argv") or ()))
        if "recipe" not in self.config or options[:1] in ([FROM_PYTHON], [IN_MEMORY]):
            return ""
        return shlex.join(["audiorl", "train", str(self.config["recipe"]), *options, "--out", str(self.path)])


def load_run(folder: str | Path) -> RunContents:
    """Read `folder`. Only a folder that does not exist, or a file with damage other than a torn end, is an error."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path}: no such run folder")
    config, evals = read_json_object(path / "config.json"), checked_evals(path)
    if config is not None:
        _check(config, RunConfig, str(path / "config.json"))
    metrics = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
    answer_files = {f.stem: f for f in sorted((path / "eval").glob("*.jsonl"))}
    in_order = dict.fromkeys([*(name for name in evals or {} if name in answer_files), *answer_files])
    answers = {name: tuple(checked_rows(answer_files[name])) for name in in_order}
    matches = ((re.fullmatch(r"step_(\d+)\.jsonl", f.name), f) for f in (path / "rollouts").glob("step_*.jsonl"))
    rollout_files = tuple(sorted((int(match[1]), f) for match, f in matches if match and f.stat().st_size))
    absent = [repr(name) for name in ("before", "after") if name not in (evals or {})]
    both = {"before", "after"} <= answers.keys()
    learns_from_rollouts = not metrics or any("reward/mean" in row for row in metrics)
    missing = {
        "config.json: the resolved configuration is unknown": config is None,
        "metrics.jsonl: no step has been recorded, so there are no curves": not metrics,
        "eval.json: no held-out evaluation has finished": evals is None,
        f"eval.json: no {' and no '.join(absent)} entry yet": evals is not None and absent,
        "eval/before.jsonl and eval/after.jsonl: changed answers cannot be shown": not both,
        "rollouts/: no rollouts were recorded": not rollout_files and learns_from_rollouts,
    }
    said = tuple(text for text, holds in missing.items() if holds)
    return RunContents(path, config or {}, tuple(metrics), evals or {}, answers, rollout_files, said)


def checked_evals(run_folder: Path) -> dict[str, Row] | None:
    """Return eval.json; None where there is none. ValueError names the entry and the field that is damaged."""
    evals = read_json_object(run_folder / "eval.json")
    for name, entry in (evals or {}).items():
        where = f"{run_folder / 'eval.json'}: {name!r}"
        _check(entry, _Entry, where)
        for numbers in (entry, *(entry.get("by_task") or {}).values()):
            _check(numbers, dict[str, _Value], where)
    return evals


def checked_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON-lines file. ValueError names the row and the field that is not as in `ShownRow`."""
    rows = []
    for number, row in numbered_rows(path):
        _check(row, ShownRow, f"{path}: row {number}")
        rows.append(row)
    return rows


def _check(value: Any, schema: Any, where: str) -> None:
    try:
        msgspec.convert(value, schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character is no text
        raise ValueError(f"{where}: edited or damaged: {error}") from error

"""Inference over a whole data set: batches, a progress display, and a results file from which a run can go on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from audiorl.config import ModelConfig, torch_device
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.results import ResultRow
from audiorl.protocols import Request, RolloutEngine
from audiorl.types import Rollout, Sample

T = TypeVar("T")
Row = dict[str, Any]


def generate_all(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    out_path: str | Path,
    batch_size: int = 8,
    seed: int = 0,
    describe: Callable[[Rollout], Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> list[Row]:
    """One rollout per sample as a row {id, text, tokens, stop_reason, **describe(rollout)}, in the order of `samples`.

    Rows are appended to `out_path` (JSON lines) batch by batch and flushed, so a killed run loses one batch at most; a
    later call generates only what is missing. A torn last line, the trace of a kill, is cut off. Rows of other samples
    stay in the file and are not returned. Raises ValueError for ids that repeat and for a file damaged elsewhere.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    repeated = [id for id, count in Counter(s.id for s in samples).items() if count > 1]
    if repeated:
        raise ValueError(f"sample ids must be unique to tell results apart; repeated: {', '.join(repeated[:5])}")

    def evaluate(batch: Sequence[Sample]) -> list[Row]:
        rollouts = engine.generate([Request(sample, n=1, seed=seed) for sample in batch])
        assert [r.sample.id for r in rollouts] == [s.id for s in batch], "one rollout per request, in order"
        return [_row(rollout, describe) for rollout in rollouts]

    rows = complete_rows(out_path, {s.id: s for s in samples}, evaluate, batch_size, progress=progress)
    return [rows[s.id] for s in samples]


def complete_rows(
    out_path: str | Path,
    items: Mapping[str, T],
    evaluate: Callable[[Sequence[T]], Sequence[Row]],
    batch_size: int,
    *,
    is_current: Callable[[T, Row], bool] = lambda item, row: True,
    progress: bool = True,
) -> dict[str, Row]:
    """The row of every item by id: from `out_path` (JSON lines) where it is there, else from `evaluate`.

    Rows are appended batch by batch and flushed, so a killed run loses one batch at most; a later call evaluates only
    what is missing, and what `is_current(item, row)` calls outdated. `evaluate` gives rows with the key "id"; one with
    a "problem" is not written, so that a later call tries again. Rows of other items stay in the file.
    """
    path = Path(out_path)
    rows = finished_rows(path)
    missing = [item for id, item in items.items() if id not in rows or not is_current(item, rows[id])]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, progress_display(progress) as display:
        bar = display.add_task(path.name, total=len(items), completed=len(items) - len(missing))
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            for row in evaluate(batch):
                rows[row["id"]] = row
                if "problem" not in row:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            display.advance(bar, len(batch))
    return {id: rows[id] for id in items}


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a results file. A last line that is incomplete is left out; any other damage is a ValueError."""
    return _parse(Path(path))[0]


def check_settings(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write `settings` to `path` (JSON), or check that a run which goes on there has the same ones.

    Raises ValueError naming the settings that differ: results of two models must not mix in one file.
    """
    path = Path(path)
    new = json.loads(json.dumps(settings))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    try:
        old = check(parse_json(path.read_bytes()), dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); choose another output folder") from error
    different = sorted(key for key in new.keys() | old.keys() if new.get(key) != old.get(key))
    if different:
        changes = ", ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in different)
        raise ValueError(f"{path} belongs to a run with other settings ({changes}); choose another output folder")


def _row(rollout: Rollout, describe: Callable[[Rollout], Mapping[str, Any]] | None) -> Row:
    row: Row = {
        "id": rollout.sample.id,
        "text": rollout.text,
        "tokens": rollout.num_sampled,
        "stop_reason": rollout.segments[-1].stop_reason,
    }
    return {**row, **describe(rollout)} if describe else row


def finished_rows(path: Path) -> dict[str, Row]:
    """The complete rows of a results file by id; the file is left so that appending to it starts a fresh line."""
    if not path.exists():
        return {}
    rows, intact = _parse(path)
    with path.open("r+b") as file:
        file.truncate(intact)
        if intact:
            file.seek(intact - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return {row["id"]: row for row in rows}


def _parse(path: Path) -> tuple[list[Row], int]:
    """The complete rows of a file, and how many bytes they fill."""
    rows: list[Row] = []
    intact = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.strip():
            try:
                row = parse_json(line)
                check(row, ResultRow)
            except FieldError as error:
                field = f"{error.field}: " if error.field else ""
                raise ValueError(f"{path}, line {number}: not a result row ({field}{error.message})") from error
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break  # torn: the beginning of an object is never JSON itself
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            rows.append(row)
        intact += len(line)
    return rows, intact


def progress_display(enabled: bool) -> Progress:
    """A bar on stderr with the count, the time taken and the time left; nothing where it is not `enabled`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )


def greedy_engine(model: str | Path, max_new_tokens: int = 256, device: str = "auto") -> RolloutEngine:
    """The model as a greedy engine for evaluation; see `evaluation_config`."""
    from audiorl.config import SamplingConfig
    from audiorl.models import load_policy
    from audiorl.rollout.hf import HFEngine

    policy = load_policy(model, evaluation_config(device))
    return HFEngine(policy, SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens))


def evaluation_config(device: str = "auto") -> ModelConfig:
    """bfloat16 on a GPU, where `auto` finds one, else float32 on the CPU."""
    device = torch_device(device)
    return ModelConfig(device=device, dtype="float32" if device == "cpu" else "bfloat16")

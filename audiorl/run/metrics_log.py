"""The metrics log, metrics.jsonl: writing it, reading it back, and cutting it where a run resumes.

One line of metrics.jsonl is one JSON object: "seq" (an integer that grows by one per line, over all phases), "step",
"phase", "time" (seconds since the run started) and any number of named values. Values that JSON cannot hold (nan, inf)
are written as the strings "nan", "inf" and "-inf"; `read_metrics` turns them back into floats.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TextIO

import msgspec

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut off while being written is left out.

    Any other line that is not a JSON object is a ValueError with file and row.
    """
    return [row for _, row in numbered_rows(path)]


def numbered_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, object) of each object that `read_jsonl` reads."""
    return ((number, row) for number, _, row in _rows(Path(path)))


class MetricsLine(msgspec.Struct):
    """What every line of a metrics.jsonl may hold; all other fields are numbers or texts."""

    seq: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    step: Annotated[float, msgspec.Meta(ge=0, le=2**53)] | None = None
    time: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    phase: str | None = None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, oldest first, with nan and inf as floats again.

    ValueError names file, row and field for a value that is neither a number nor a text.
    """
    return [
        {k: _NOT_FINITE.get(v, v) if isinstance(v, str) and k != "phase" else v for k, v in row.items()}
        for _, _, row in _metrics_rows(Path(path))
    ]


def _metrics_rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, line, row in _rows(path):
        try:
            msgspec.convert(row, MetricsLine)
            msgspec.convert(row, dict[str, float | bool | str | None])
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character is no text
            raise ValueError(f"{path}:{number}: edited or damaged: {error}") from error
        yield number, line, row


def truncate_from(path: str | Path, seq: int) -> int:
    """Drop the lines with "seq" >= `seq`, which a resumed run writes again. Returns how many were dropped.

    The file is replaced in one move, so a crash leaves either the old or the new one. No `MetricsLog` may have it open.
    Raises ValueError for a file that lacks one of the lines 0 … seq - 1; a file that is not there lacks nothing.
    """
    path = Path(path)
    if not path.exists():
        return 0
    lines: list[str] = []
    dropped = 0
    for number, line, row in _metrics_rows(path):
        if not isinstance(row.get("seq"), int):
            raise ValueError(f'{path}:{number}: no integer "seq", cannot tell whether to keep this line')
        if row["seq"] < seq:
            if row["seq"] != len(lines):
                raise ValueError(f"{path}:{number}: damaged: seq is {row['seq']} where {len(lines)} belongs")
            lines.append(line)
        else:
            dropped += 1
    if len(lines) != seq:
        raise ValueError(
            f"{path}: damaged: {len(lines)} of the {seq} lines that the run has logged are there; restore the file, or "
            "remove it to go on without its history"
        )
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return dropped


def _rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number from 1, line, object). Only an unterminated last line may be broken; it is skipped."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        incomplete = number == len(lines)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if incomplete:
                return
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            if incomplete:
                return
            raise ValueError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        yield number, line, row


class MetricsLog:
    """Appends to metrics.jsonl, flushed line by line.

    Opening an existing file removes an incomplete last line and continues its clock: "time" counts on from there.

        with MetricsLog(run / "metrics.jsonl") as log:
            log.write({"seq": 0, "phase": "grpo", "step": 1, "reward/mean": 0.25})
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = 0.0
        if self.path.exists():
            _repair_tail(self.path)
            earlier = max((float(r.get("time", 0.0)) for r in read_metrics(self.path)), default=0.0)
        self._started = time.monotonic() - earlier
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line and return its values: "time" is added, one-element tensors and NumPy numbers are floats."""
        plain = {key: _plain(key, value) for key, value in row.items()}
        plain.setdefault("time", round(time.monotonic() - self._started, 3))
        encoded = {key: _encode(value) for key, value in plain.items()}
        self._file.write(json.dumps(encoded, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        return plain

    def sync(self) -> None:
        """Flush to disk, so that a power failure takes no line that was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _plain(key: str, value: Any) -> str | int | float | bool | None:
    if hasattr(value, "item"):
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"metric {key!r}: expected one number, got shape {shape}")
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"metric {key!r}: expected a number or a string, got {type(value).__name__}")


def _encode(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _repair_tail(path: Path) -> None:
    """Remove an incomplete last line, and end the file with a newline."""
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        whole = isinstance(json.loads(content[start:]), dict)
    except (ValueError, RecursionError):
        whole = False
    with path.open("r+b") as file:
        if whole:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)

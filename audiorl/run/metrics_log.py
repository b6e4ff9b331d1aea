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
from typing import Annotated, Any

import msgspec

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLine(msgspec.Struct):
    """What every line of a metrics.jsonl may hold; all other fields are numbers or texts."""

    seq: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    step: Annotated[float, msgspec.Meta(ge=0, le=2**53)] | None = None
    time: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    phase: str | None = None


def numbered_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the line, object) of a JSON-lines file, without a last line that was cut while being written."""
    return ((number, row) for number, _, row in _lines(Path(path)))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, oldest first, with nan and inf as floats again."""
    return [
        {k: _NOT_FINITE.get(v, v) if isinstance(v, str) and k != "phase" else v for k, v in row.items()}
        for _, _, row in _metrics_lines(Path(path))
    ]


def _metrics_lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, line, row in _lines(path):
        try:
            msgspec.convert(row, MetricsLine)
            msgspec.convert(row, dict[str, float | bool | str | None])
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character is no text
            raise ValueError(f"{path}:{number}: edited or damaged: {error}") from error
        yield number, line, row


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number from 1, line, object). Only an unterminated last line may be broken; it is skipped."""
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = "" if isinstance(row, dict) else f"expected a JSON object, found {type(row).__name__}"
        except (ValueError, RecursionError) as error:
            problem = f"not JSON: {error}"
        if problem and number < len(lines):
            raise ValueError(f"{path}:{number}: {problem}")
        if not problem:
            yield number, line, row


class MetricsLog:
    """Appends to metrics.jsonl, flushed line by line.

    Opening an existing file drops the lines from `seq` on, which a resumed run writes again, and an incomplete last
    line; "time" counts on from the last one that stays. Raises ValueError for a file that lacks lines between its first
    one and `seq`; it may begin later than 0, where an earlier file was removed.
    """

    def __init__(self, path: str | Path, seq: int):
        self.path = Path(path)
        earlier = _truncate(self.path, seq) if self.path.exists() else 0.0
        self._started = time.monotonic() - earlier
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line and return its values: "time" is added, one-element tensors and NumPy numbers are floats."""
        plain = {key: _plain(key, value) for key, value in row.items()}
        plain.setdefault("time", round(time.monotonic() - self._started, 3))
        encoded = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}
        self._file.write(json.dumps(encoded, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        return plain

    def sync(self) -> None:
        """Flush to disk: a power failure then takes no line that was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _truncate(path: Path, seq: int) -> float:
    """Drop the lines from `seq` on. Returns the latest "time" of those that stay."""
    kept: list[str] = []
    first: int | None = None
    latest = 0.0
    for number, line, row in _metrics_lines(path):
        if not isinstance(row.get("seq"), int):
            raise ValueError(f'{path}:{number}: no integer "seq", cannot tell whether to keep this line')
        first = row["seq"] if first is None else first
        if row["seq"] < seq:
            if row["seq"] != first + len(kept):
                raise ValueError(f"{path}:{number}: damaged: seq is {row['seq']} where {first + len(kept)} belongs")
            kept.append(line)
            latest = max(latest, float(row.get("time", 0.0)))
    if (first or 0) + len(kept) < seq:
        damage = f"damaged: {len(kept)} of the {seq} lines that the run has logged are there"
        raise ValueError(f"{path}: {damage}; restore the file, or remove it to go on without its history")
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return latest


def _plain(key: str, value: Any) -> str | int | float | bool | None:
    if hasattr(value, "item"):
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"metric {key!r}: expected one number, got shape {shape}")
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"metric {key!r}: expected a number or a string, got {type(value).__name__}")

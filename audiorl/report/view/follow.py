"""Following a run folder: the lines that a run adds to metrics.jsonl, and the rollout files that it writes."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from audiorl.report.run import Row, read_json_object

_TAIL = 200
"""Bytes before the place that was read last; when they differ, the file is another one."""
_LIVE_SECONDS = 120
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a line that is damaged."""
_line = msgspec.json.Decoder(dict[str, float | bool | str | None]).decode


class MetricsFile:
    """The lines of a metrics.jsonl while a run writes it.

    A last line without its newline is read when it is complete. When the file was replaced, cut or removed (a run that
    was resumed from an older step), `rows` begins again and `epoch` grows.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = []
        self.epoch = 0
        self.problem = ""
        self._at = self._lines = 0
        self._tail = b""

    def poll(self) -> bool:
        """Read what is new; whether `rows` has changed."""
        try:
            with self.path.open("rb") as file:
                restarted = not self._continues(file.fileno())
                if restarted:
                    self._restart()
                file.seek(self._at)
                added = file.read()
        except OSError:  # not there yet, or deleted
            if not self._at:
                return False
            self._restart()
            return True
        added = added[: added.rfind(b"\n") + 1]
        for line in added.splitlines():
            self._lines += 1
            try:
                if line.strip():
                    self.rows.append(_line(line))
            except UNREADABLE as error:
                self.problem = f"{self.path}:{self._lines}: not a line of metrics: {error}"
        self._at += len(added)
        self._tail = (self._tail + added)[-_TAIL:]
        return bool(added) or restarted

    def _continues(self, file: int) -> bool:
        """Whether the file is still the one of which `_at` bytes were read."""
        return os.pread(file, len(self._tail), self._at - len(self._tail)) == self._tail

    def _restart(self) -> None:
        self.rows, self.epoch, self.problem = [], self.epoch + 1, ""
        self._at, self._lines, self._tail = 0, 0, b""


class FollowedRun:
    """A run folder that may grow, be resumed, or be deleted while it is looked at."""

    def __init__(self, path: Path, name: str):
        if not path.is_dir():
            raise ValueError(f"view: {path}: no such folder")
        if not any((path / part).exists() for part in ("metrics.jsonl", "rollouts", "config.json")):
            raise ValueError(f"view: {path}: not a run folder (no metrics.jsonl, rollouts/ or config.json)")
        self.path, self.name = path, name
        self.metrics = MetricsFile(path / "metrics.jsonl")

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    @property
    def is_live(self) -> bool:
        """Whether a step was logged a short time ago and the run has not written its report since."""
        times = {name: _modified(self.path / name) for name in ("metrics.jsonl", "report.html")}
        return times["report.html"] <= times["metrics.jsonl"] > time.time() - _LIVE_SECONDS

    @property
    def recipe(self) -> str:
        return Path(str(_json(self.path / "config.json").get("recipe") or "")).stem

    def phase(self, step: int) -> str:
        """The phase that recorded rollouts/step_N: the last one that began before it."""
        offsets = _json(self.path / "state.json").get("rollout_offsets")
        began = {k: v for k, v in offsets.items() if isinstance(v, int)} if isinstance(offsets, dict) else {}
        earlier = [phase for phase, offset in began.items() if offset < step]
        return max(earlier, key=lambda phase: began[phase], default="")

    def rollout_files(self) -> Iterator[tuple[int, Path, tuple[int, int]]]:
        """(step, file, its time and size), in order of the steps."""
        files = []
        try:
            for entry in os.scandir(self.path / "rollouts"):
                if match := re.fullmatch(r"step_(\d{1,15})\.jsonl", entry.name):
                    stat = entry.stat()
                    files.append((int(match[1]), Path(entry.path), (stat.st_mtime_ns, stat.st_size)))
        except OSError:
            return  # none yet, or deleted while it was read
        yield from sorted(files)

    def evaluations(self) -> list[str]:
        """Names of eval/NAME.jsonl: in the order of eval.json, others last."""
        names = sorted(file.stem for file in (self.path / "eval").glob("*.jsonl"))
        order = list(_json(self.path / "eval.json"))
        return sorted(names, key=lambda n: order.index(n) if n in order else len(order))


def names_of(paths: list[Path]) -> list[str]:
    """The folders' names, with as much of the path before them as tells them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"view: a run is named twice: {next(str(p) for p in paths if paths.count(p) > 1 or True)}")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) or {}
    except (OSError, ValueError, json.JSONDecodeError):
        return {}  # half written

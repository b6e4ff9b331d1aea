"""Following run folders, and their recorded rollouts in SQLite.

The index holds numbers and the folded text to search in; a rollout itself stays in its file and is read from there when
it is shown. Text is searched by `instr` over all rows: 50,000 rollouts take a few tenths of a second, less than writing
a trigram index would cost (`bench/view.py` measures both).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from audiorl.report.run import ShownRow, checked_evals
from audiorl.report.summary import Row, read_json_object

PAGE_SIZE = 40
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a line that is damaged."""
_TAIL = 200
"""Bytes before the place that was read last; when they differ, the file is another one."""
_LIVE_SECONDS = 120
_metrics_line = msgspec.json.Decoder(dict[str, float | bool | str | None]).decode
_rollout_line = msgspec.json.Decoder(ShownRow).decode


# -- run folders -------------------------------------------------------------------------------------------------------


class MetricsFile:
    """Lines of a metrics.jsonl while a run writes it.

    A last line without its newline is read when it is complete. When the file was replaced, cut or removed (a run that
    was resumed from an older step), `rows` begins again and `epoch` grows.
    """

    def __init__(self, path: Path):
        self.path = path
        self.epoch = -1
        self._restart()

    def _restart(self) -> None:
        self.rows: list[Row] = []
        self.epoch, self.problem = self.epoch + 1, ""
        self._at, self._lines, self._tail = 0, 0, b""

    def poll(self) -> bool:
        """Read what is new; return whether `rows` has changed."""
        epoch = self.epoch
        try:
            if not self.path.is_file():  # a FIFO would be waited for
                raise FileNotFoundError(self.path)
            with self.path.open("rb") as file:
                if os.pread(file.fileno(), len(self._tail), self._at - len(self._tail)) != self._tail:
                    self._restart()
                file.seek(self._at)
                added = file.read()
        except OSError:  # not there yet, or deleted
            if self._at:
                self._restart()
            added = b""
        added = added[: added.rfind(b"\n") + 1]
        for line in added.splitlines():
            self._lines += 1
            try:
                if line.strip():
                    self.rows.append(_metrics_line(line))
            except UNREADABLE as error:
                self.problem = f"{self.path}:{self._lines}: not a line of metrics: {error}"
        self._at += len(added)
        self._tail = (self._tail + added)[-_TAIL:]
        return bool(added) or self.epoch > epoch


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
    def is_live(self) -> bool:
        """True if a step was logged a short time ago and the run has not written its report since."""
        files = (self.path / name for name in ("report.html", "metrics.jsonl"))
        report, metrics = (file.stat().st_mtime if file.exists() else 0.0 for file in files)
        return report <= metrics > time.time() - _LIVE_SECONDS

    @property
    def recipe(self) -> str:
        return Path(str(self._json("config.json").get("recipe") or "")).stem

    @property
    def is_flow(self) -> bool:
        """True if the run has a checkpoint of a flow, which makes sound."""
        return self.recipe.startswith("sound_") and any(self.path.glob("checkpoints/*/*/config.json"))

    def phase(self, step: int) -> str:
        """Return the phase that recorded rollouts/step_N: the last one that began before it."""
        offsets = self._json("state.json").get("rollout_offsets")
        began = {k: v for k, v in offsets.items() if isinstance(v, int)} if isinstance(offsets, dict) else {}
        return max((phase for phase, at in began.items() if at < step), key=lambda phase: began[phase], default="")

    def rollout_files(self) -> list[tuple[int, Path, tuple[int, int]]]:
        """Return (step, file, its time and size), in order of the steps."""
        files = []
        try:
            for entry in os.scandir(self.path / "rollouts"):
                if (match := re.fullmatch(r"step_(\d{1,15})\.jsonl", entry.name)) and entry.is_file():
                    stat = entry.stat()
                    files.append((int(match[1]), Path(entry.path), (stat.st_mtime_ns, stat.st_size)))
        except OSError:
            return []  # none yet, or deleted while it was read
        return sorted(files)

    def evaluations(self) -> list[str]:
        """Return the names of eval/NAME.jsonl: in the order of eval.json, others last."""
        names = sorted(file.stem for file in (self.path / "eval").glob("*.jsonl") if file.is_file())
        order = list(self.evals())
        return sorted(names, key=lambda n: order.index(n) if n in order else len(order))

    def evals(self) -> dict[str, Row]:
        """Return eval.json; {} before the first evaluation, and for a file that is damaged."""
        try:
            return checked_evals(self.path) or {}
        except (OSError, ValueError):
            return {}

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return read_json_object(self.path / name) or {}
        except (OSError, ValueError):
            return {}


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as much of the path before them as tells them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"view: a run is named twice: {paths[0]}")


# -- the search box ----------------------------------------------------------------------------------------------------

NUMBERS = ("step", "reward", "advantage", "tokens", "index")
TEXTS = ("run", "phase", "task", "group", "sample", "stop", "prompt")
ORDERS = {
    "newest": "step DESC, run, row",
    "oldest": "step, run, row",
    "reward ↓": "reward DESC, step DESC, run, row",
    "reward ↑": "reward, step DESC, run, row",
    "advantage ↓": "advantage DESC, step DESC, run, row",
    "advantage ↑": "advantage, step DESC, run, row",
    "longest": "tokens DESC, step DESC, run, row",
    "shortest": "tokens, step DESC, run, row",
}
_TERM = re.compile(r'(-?)(?:"([^"]*)"|([^\s"<>=:]+)(<=|>=|<|>|=|:)("[^"]*"|\S+)|(\S+))')
_COLUMN = {"index": "member", "group": "group_id"}


def conditions(text: str, parts: Sequence[str], runs: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Return SQL conditions and their values of what a person types into the search box::

        menor "o igual" reward>0.5 accuracy=1 task:asr step<=40 -sil prompt:spanish

    finds rollouts whose text holds "menor" and "o igual" and not "sil", with these numbers; `prompt:WORD` looks into
    prompts and gold answers. Fields are those of `NUMBERS` and `TEXTS` and the reward parts `parts`; `runs` are the
    names of the runs. Raises ValueError for a field that does not exist and for a number that is none.
    """
    where: list[str] = []
    values: list[Any] = []
    fields = (*NUMBERS, *TEXTS, *parts)
    for term in _TERM.finditer(text):
        negative, quoted, name, relation, value, word = term.groups()
        column, value = _COLUMN.get(name, name), (value or "").strip('"')
        if name is None or (relation == ":" and name not in fields):
            value = (quoted if quoted is not None else word or term[0].removeprefix("-").replace('"', "")).casefold()
            condition = "instr(folded, ?) > 0" if value else ""
        elif name in TEXTS and relation not in ":=":
            raise ValueError(f"{name} is a text: write {name}:{value}")
        elif name == "prompt":
            condition, value = "instr(asks, ?) > 0", value.casefold()
        elif name == "run":
            matching = [str(i) for i, run in enumerate(runs) if run == value or run.endswith(f"/{value}")]
            if not matching:
                raise ValueError(f"no run is called {value}; there are {', '.join(runs)}")
            condition, value = "instr(?, ',' || run || ',') > 0", f",{','.join(matching)},"
        elif name in TEXTS:
            condition = f"{column} = ?"
        elif name not in fields:
            known = ", ".join(fields)
            raise ValueError(f'no field or reward part is called {name}; there are {known}. A text: "{term[0]}"')
        else:
            if name not in NUMBERS:
                column = "json_extract(parts, '$.\"" + name.replace("'", "''") + "\"')"
            condition = f"{column} {'=' if relation == ':' else relation} ?"
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"{term[0]}: {value} is not a number") from None
        if condition:
            where.append(f"NOT ({condition})" if negative else f"({condition})")
            values.append(value)
    return where, values


# -- the index ---------------------------------------------------------------------------------------------------------

_PRAGMAS = "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA page_size=32768; PRAGMA mmap_size=1073741824;"
_TABLES = """
CREATE TABLE files (run INTEGER, step INTEGER, time INTEGER, size INTEGER, rows INTEGER, problem TEXT,
  PRIMARY KEY (run, step));
CREATE TABLE rollouts (run INTEGER, step INTEGER, row INTEGER, start INTEGER, length INTEGER, phase TEXT, task TEXT,
  group_id TEXT, member TEXT, sample TEXT, stop TEXT, tokens INTEGER, reward REAL, advantage REAL, answer TEXT,
  parts TEXT, folded TEXT, asks TEXT, PRIMARY KEY (run, step, row));
"""


@dataclass(frozen=True, order=True)
class RolloutPlace:
    """Where a rollout is recorded: the number of its run, the step of its file and its row there from 0."""

    run: int
    step: int
    row: int

    def __str__(self) -> str:
        return f"{self.run}/{self.step}/{self.row}"


@dataclass(frozen=True)
class Matches:
    """One page of a search, and what all pages hold."""

    places: tuple[RolloutPlace, ...]
    count: int
    mean_reward: float | None


class RolloutIndex:
    """Filled and refreshed by `update`; thread-safe. `file`: where SQLite puts it, by default in memory."""

    def __init__(self, runs: Sequence[FollowedRun], file: str | Path = ":memory:"):
        self.runs = runs
        self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._db.executescript(_PRAGMAS + _TABLES)
        self._lock = threading.Lock()
        self.values: dict[str, set[str]] = {"task": set(), "phase": set(), "parts": set()}
        """Every task, phase and reward part that was read."""

    def update(self, number: int) -> bool:
        """Index the files of a run that are new or were written again, drop those that are gone; whether any was."""
        run, changed = self.runs[number], False
        stamps = self._all("SELECT step, time, size FROM files WHERE run = ?", number)
        indexed = {step: (time, size) for step, time, size in stamps}
        for step, file, stamp in run.rollout_files():
            if indexed.pop(step, None) != stamp:
                changed = self._add(number, step, file, stamp, run.phase(step)) or changed
        for step in indexed:
            self._replace(number, step, [])
        return changed or bool(indexed)

    def _add(self, run: int, step: int, file: Path, stamp: tuple[int, int], phase: str) -> bool:
        try:
            content = file.read_bytes()
        except OSError:
            return False  # deleted meanwhile
        rows, problem, start = [], "", 0
        for number, line in enumerate(content.split(b"\n")):
            complete = start + len(line) < len(content)  # a last line without its newline is still being written
            if complete and line.strip():
                try:
                    rollout = _rollout_line(line)
                    rows.append((run, step, number, start, len(line), phase, *_columns(rollout)))
                    self.values["task"].add((rollout.sample and rollout.sample.task) or "")
                    self.values["parts"].update((rollout.score and rollout.score.parts) or ())
                except UNREADABLE as error:
                    problem = problem or f"{file}: row {number + 1}: not a rollout: {error}"
            start += len(line) + 1
        self.values["phase"].add(phase)
        self._replace(run, step, rows, (run, step, *stamp, len(rows), problem))
        return True

    def _replace(self, run: int, step: int, rows: Sequence[tuple[Any, ...]], file: tuple[Any, ...] = ()) -> None:
        with self._lock:
            self._db.execute("BEGIN")
            for table in ("rollouts", "files"):
                self._db.execute(f"DELETE FROM {table} WHERE run = ? AND step = ?", (run, step))
            self._db.executemany(f"INSERT INTO rollouts VALUES ({','.join('?' * 18)})", rows)
            if file:
                self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", file)
            self._db.execute("COMMIT")

    def search(
        self,
        text: str = "",
        *,
        order: str = "newest",
        page: int = 0,
        runs: Sequence[int] | None = None,
        equal: Mapping[str, Any] | None = None,
    ) -> Matches:
        """Return the page of rollouts that match the search box, in `runs`, with columns `equal` to values.

        Raises ValueError for what the box cannot mean.
        """
        where, values = conditions(text, sorted(self.values["parts"]), [run.name for run in self.runs])
        if runs is not None:
            where.append(f"run IN ({','.join(str(int(r)) for r in runs)})")
        where += [f"{column} = ?" for column in equal or {}]
        values += (equal or {}).values()
        if order not in ORDERS:
            raise ValueError(f"no order is called {order}; there are {', '.join(ORDERS)}")
        found = self.select(
            "run, step, row, reward", f"WHERE {' AND '.join(where) or '1'} ORDER BY {ORDERS[order]}", *values
        )
        rewards = [row[3] for row in found if row[3] is not None]
        shown = tuple(RolloutPlace(*row[:3]) for row in found[PAGE_SIZE * page : PAGE_SIZE * (page + 1)])
        return Matches(shown, len(found), sum(rewards) / len(rewards) if rewards else None)

    def group(self, place: RolloutPlace) -> list[RolloutPlace]:
        """Return the rollouts of the same prompt at the same step, in the order of the file."""
        same = "SELECT b.run, b.step, b.row FROM rollouts a JOIN rollouts b USING (run, step, group_id)"
        at = (place.run, place.step, place.row)
        rows = self._all(f"{same} WHERE a.run = ? AND a.step = ? AND a.row = ? ORDER BY b.row", *at)
        return [RolloutPlace(*row) for row in rows]

    def row(self, place: RolloutPlace) -> Row | None:
        """Return the rollout as its file holds it; None when it is no longer there."""
        at = (place.run, place.step, place.row)
        spot = self.select("start, length", "WHERE run = ? AND step = ? AND row = ?", *at)
        try:
            with self.file(place).open("rb") as file:
                file.seek(spot[0][0])
                row = json.loads(file.read(spot[0][1]))
        except (OSError, ValueError, IndexError, RecursionError):
            return None  # deleted, or written again a moment ago: the next update has it
        return row if isinstance(row, dict) else None

    def file(self, place: RolloutPlace) -> Path:
        return self.runs[place.run].path / "rollouts" / f"step_{place.step:06d}.jsonl"

    def steps(self) -> list[int]:
        """Return the recorded steps of all runs."""
        return [step for (step,) in self._all("SELECT DISTINCT step FROM files ORDER BY step")]

    def problems(self) -> list[str]:
        """Return the first damaged row of each file."""
        return [problem for (problem,) in self._all("SELECT problem FROM files WHERE problem != ''")]

    def count(self, run: int) -> int:
        """Return how many rollouts of a run were read."""
        return int(self._all("SELECT ifnull(sum(rows), 0) FROM files WHERE run = ?", run)[0][0])

    def select(self, columns: str, clause: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._all(f"SELECT {columns} FROM rollouts {clause}", *values)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()


def answer_key(sample: object, text: str) -> str:
    """Return what identifies an answer to a prompt, at whatever step it was sampled."""
    return hashlib.sha256(f"{sample}\0{text}".encode("utf-8", "replace")).hexdigest()[:16]


def _columns(row: ShownRow) -> tuple[Any, ...]:
    """Return what the index holds. `answer` is "" where there is nothing to label: no text, no audio, streams."""
    sample, score, segments = row.sample or ShownRow(), row.score, row.segments or []
    text = row.text or "".join(segment.text or "" for segment in segments)
    can_label = text.strip() and sample.audio and not sample.turns
    references = [turn.reference or "" for turn in sample.turns or ()]
    return (
        sample.task or "",
        "" if row.group_id is None else str(row.group_id),
        "" if row.index is None else row.index,
        "" if sample.id is None else str(sample.id),
        (segments[-1].stop_reason if segments else None) or "",
        sum(segment.num_tokens or 0 for segment in segments),
        score.total if score else None,
        row.advantage,
        answer_key(sample.id, text) if can_label else "",
        json.dumps((score and score.parts) or {}),
        _folded(text),
        _folded("\n".join([sample.prompt or "", *map(str, sample.references or ()), *references])),
    )


def _folded(text: str) -> str:
    """For searching without regard to case; half a character, which SQLite has no bytes for, is a question mark."""
    return text.casefold().encode("utf-8", "replace").decode()

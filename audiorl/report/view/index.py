"""The recorded rollouts of all runs in SQLite.

The index holds numbers and the folded text to search in; a rollout itself stays in its file and is read from there when
it is shown. Text is searched by `instr` over all rows: 50,000 rollouts take a few hundredths of a second, less than
writing a trigram index would cost (`bench/view.py` measures both).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from audiorl.report.run import Row
from audiorl.report.schema import Rollout
from audiorl.report.view.follow import UNREADABLE, FollowedRun
from audiorl.report.view.query import ORDERS, conditions

PAGE = 40
_PRAGMAS = "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA page_size=32768; PRAGMA mmap_size=1073741824;"
_rollout = msgspec.json.Decoder(Rollout).decode
_SCHEMA = """
CREATE TABLE files (run INTEGER, step INTEGER, time INTEGER, size INTEGER, rows INTEGER, problem TEXT,
  PRIMARY KEY (run, step));
CREATE TABLE rollouts (run INTEGER, step INTEGER, row INTEGER, start INTEGER, length INTEGER, phase TEXT, task TEXT,
  group_id TEXT, member TEXT, sample TEXT, stop TEXT, tokens INTEGER, reward REAL, advantage REAL, answer TEXT,
  parts TEXT, folded TEXT, asks TEXT, PRIMARY KEY (run, step, row));
"""


@dataclass(frozen=True, order=True)
class Place:
    """Where a rollout is recorded: the number of its run, the step of its file and its row there from 0."""

    run: int
    step: int
    row: int

    def __str__(self) -> str:
        return f"{self.run}/{self.step}/{self.row}"


@dataclass(frozen=True)
class Matches:
    """One page of a search, and what all pages hold."""

    places: tuple[Place, ...]
    count: int
    mean_reward: float | None


class RolloutIndex:
    """Filled and refreshed by `update`; thread-safe. `file`: where SQLite puts it, by default in memory."""

    def __init__(self, runs: Sequence[FollowedRun], file: str | Path = ":memory:"):
        self.runs = runs
        self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._db.executescript(_PRAGMAS + _SCHEMA)
        self._lock = threading.Lock()
        self.values: dict[str, set[str]] = {"task": set(), "phase": set(), "parts": set()}
        """Every task, phase and reward part that was read."""
        self._matching = lru_cache(maxsize=8)(self._all_matching)
        self.version = 0
        """Grows with every change."""

    def update(self, number: int) -> bool:
        """Index the files of a run that are new or were written again, drop those that are gone; whether any was."""
        run = self.runs[number]
        indexed = {
            step: (time, size)
            for step, time, size in self._all("SELECT step, time, size FROM files WHERE run = ?", number)
        }
        changed = False
        for step, file, stamp in run.rollout_files():
            if indexed.pop(step, None) != stamp:
                self._add(number, step, file, stamp, run.phase(step))
                changed = True
        for step in indexed:
            self._drop(number, step)
            changed = True
        return changed

    def _add(self, run: int, step: int, file: Path, stamp: tuple[int, int], phase: str) -> None:
        try:
            content = file.read_bytes()
        except OSError:
            return  # deleted meanwhile
        rows, problem, start = [], "", 0
        for number, line in enumerate(content.split(b"\n")):
            complete = start + len(line) < len(content)  # a last line without its newline is still being written
            if complete and line.strip():
                try:
                    rollout = _rollout(line)
                    rows.append((run, step, number, start, len(line), phase, *_columns(rollout)))
                    self.values["task"].add((rollout.sample and rollout.sample.task) or "")
                    self.values["parts"].update((rollout.score and rollout.score.parts) or ())
                except UNREADABLE as error:
                    problem = problem or f"{file}: row {number + 1}: not a rollout: {error}"
            start += len(line) + 1
        self.values["phase"].add(phase)
        file_row = (run, step, *stamp, len(rows), problem)
        with self._lock:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM rollouts WHERE run = ? AND step = ?", (run, step))
            self._db.executemany(f"INSERT INTO rollouts VALUES ({','.join('?' * 18)})", rows)
            self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", file_row)
            self._db.execute("COMMIT")
            self.version += 1

    def _drop(self, run: int, step: int) -> None:
        with self._lock:
            for table in ("rollouts", "files"):
                self._db.execute(f"DELETE FROM {table} WHERE run = ? AND step = ?", (run, step))
            self.version += 1

    def search(
        self,
        text: str = "",
        *,
        order: str = "newest",
        page: int = 0,
        runs: Sequence[int] | None = None,
        equal: Mapping[str, Any] | None = None,
    ) -> Matches:
        """The page of rollouts that match the search box, in `runs`, with columns `equal` to values.

        Raises ValueError for what the box cannot mean.
        """
        where, values = conditions(text, sorted(self.values["parts"]), [run.name for run in self.runs])
        if runs is not None:
            where.append(f"run IN ({','.join(str(int(r)) for r in runs)})")
        for column, value in (equal or {}).items():
            where.append(f"{column} = ?")
            values.append(value)
        if order not in ORDERS:
            raise ValueError(f"no order is called {order}; there are {', '.join(ORDERS)}")
        clause = f"WHERE {' AND '.join(where) or '1'} ORDER BY {ORDERS[order]}"
        places, mean = self._matching(clause, tuple(values), self.version)
        return Matches(tuple(Place(*place) for place in places[PAGE * page : PAGE * (page + 1)]), len(places), mean)

    def _all_matching(
        self, clause: str, values: tuple[object, ...], version: int
    ) -> tuple[list[tuple[int, int, int]], float | None]:
        """(places, mean reward) of all matches: one pass over the texts serves all pages."""
        rows = self._all(f"SELECT run, step, row, reward FROM rollouts {clause}", *values)
        rewards = [row[3] for row in rows if row[3] is not None]
        return [row[:3] for row in rows], sum(rewards) / len(rewards) if rewards else None

    def group(self, place: Place) -> list[Place]:
        """The rollouts of the same prompt at the same step, in the order of the file; empty where there is none."""
        same = "SELECT b.run, b.step, b.row FROM rollouts a JOIN rollouts b USING (run, step, group_id)"
        rows = self._all(f"{same} WHERE a.run = ? AND a.step = ? AND a.row = ? ORDER BY b.row", *_tuple(place))
        return [Place(*row) for row in rows]

    def row(self, place: Place) -> Row | None:
        """The rollout as its file holds it; None when it is no longer there."""
        spot = self._all("SELECT start, length FROM rollouts WHERE run = ? AND step = ? AND row = ?", *_tuple(place))
        if not spot:
            return None
        ((start, length),) = spot
        try:
            with self.file(place).open("rb") as file:
                file.seek(start)
                row = json.loads(file.read(length))
        except (OSError, ValueError, RecursionError):
            return None  # deleted, or written again a moment ago: the next update has it
        return row if isinstance(row, dict) else None

    def file(self, place: Place) -> Path:
        return self.runs[place.run].path / "rollouts" / f"step_{place.step:06d}.jsonl"

    def steps(self) -> list[int]:
        """The recorded steps of all runs."""
        return [step for (step,) in self._all("SELECT DISTINCT step FROM files ORDER BY step")]

    def problems(self) -> list[str]:
        """The first damaged row of each file."""
        return [problem for (problem,) in self._all("SELECT problem FROM files WHERE problem != ''")]

    def counts(self, run: int) -> tuple[int, int]:
        """(rollouts, recorded steps) of a run."""
        ((rollouts, steps),) = self._all("SELECT ifnull(sum(rows), 0), count(*) FROM files WHERE run = ?", run)
        return rollouts, steps

    def select(self, columns: str, clause: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._all(f"SELECT {columns} FROM rollouts {clause}", *values)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()


def _tuple(place: Place) -> tuple[int, int, int]:
    return place.run, place.step, place.row


def answer_key(sample: object, text: str) -> str:
    """Identifies an answer to a prompt, at whatever step it was sampled."""
    return hashlib.sha256(f"{sample}\0{text}".encode("utf-8", "replace")).hexdigest()[:16]


def _columns(row: Rollout) -> tuple[Any, ...]:
    """What the index holds of a rollout. `answer` is "" where there is nothing to label: no text, no audio, streams."""
    sample, score, segments = row.sample, row.score, row.segments or []
    text = row.text or "".join(segment.text or "" for segment in segments)
    can_label = bool(text.strip() and sample and sample.audio and not sample.turns)
    asks = [sample.prompt or "", *map(str, sample.references or ())] if sample else []
    asks += [turn.reference or "" for turn in (sample and sample.turns) or ()]
    return (
        (sample.task if sample else None) or "",
        str("" if row.group_id is None else row.group_id),
        "" if row.index is None else row.index,
        str(sample.id) if sample and sample.id is not None else "",
        (segments[-1].stop_reason if segments else None) or "",
        sum(segment.num_tokens or 0 for segment in segments),
        score.total if score else None,
        row.advantage,
        answer_key(sample.id, text) if can_label and sample else "",
        json.dumps(score.parts or {}) if score else "{}",
        _folded(text),
        _folded("\n".join(asks)),
    )


def _folded(text: str) -> str:
    """For searching without regard to case; half a character, which SQLite has no bytes for, is a question mark."""
    return text.casefold().encode("utf-8", "replace").decode()

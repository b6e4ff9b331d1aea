"""Labels that a person gives: which of two answers is better, or a score from 1 to 5.

The file is JSON lines, to which each label is appended at once. Its rows are those that the rest of audiorl reads::

    pairs     a row of `read_pairs`: prompt, chosen, rejected
    scores    a recorded rollout with `label` 1 to 5, which `audiorl rewards study` reads, and with prompt, completion
              and desirable (4 or 5), which `read_judged` reads

`label_of` names the answers of a row, so that nobody is asked twice. Ties and skipped questions go to
FILE.undecided.jsonl, because no reader of preferences has a use for them.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from filelock import FileLock

from audiorl.data.preferences import Pair, pair_row, part_row
from audiorl.data.rollout_rows import rollout_from_row, rollout_row
from audiorl.report.rollouts import written_text
from audiorl.report.summary import Row
from audiorl.report.view.index import UNREADABLE, RolloutIndex, RolloutPlace, answer_key
from audiorl.types import Rollout

Mode = Literal["scores", "pairs"]
SCORES = tuple("12345")
DESIRABLE = 4
"""The lowest score of a desirable answer."""
VERDICTS: dict[Mode, tuple[str, ...]] = {"scores": (*SCORES, "skip"), "pairs": ("a", "b", "tie", "skip")}


class _Label(msgspec.Struct):
    """Fields of a label that are read again."""

    label_of: list[str]


@dataclass(frozen=True)
class LabelQuestion:
    """One answer to score or two to compare, in the order in which they are shown."""

    places: tuple[RolloutPlace, ...]
    rows: tuple[Row, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(sorted(answer_key((row.get("sample") or {}).get("id"), written_text(row)) for row in self.rows))


class LabelFile:
    """Appends labels, each flushed to the disk before `add` returns; several processes may label into one file."""

    def __init__(self, path: Path, mode: Mode):
        self.path, self.mode = path, mode
        self.undecided = path.with_name(f"{path.stem}.undecided.jsonl")
        for file in (path, self.undecided):
            if file.exists() and not file.is_file():
                kind = "a folder" if file.is_dir() else "no regular file"
                raise ValueError(f"view: --labels {file}: {kind}; name a file, such as labels.jsonl")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"view: --labels {path}: there is no folder {path.absolute().parent}")
        self.labelled: dict[Path, set[tuple[str, ...]]] = {}
        self.problem = ""
        self._stamps: dict[Path, tuple[int, int] | None] = {}
        self.read()
        other = "pairs" if mode == "scores" else "scores"
        if any(len(keys) != (2 if mode == "pairs" else 1) for keys in self.labelled[path]):
            raise ValueError(f"view: --labels {path}: it holds {other}; name another file, or give --label {other}")

    @property
    def count(self) -> int:
        return len(self.labelled[self.path])

    def is_labelled(self, keys: tuple[str, ...]) -> bool:
        return any(keys in labels for labels in self.labelled.values())

    def read(self) -> None:
        """Read the files again where they have changed: another labeller or an editor may have written to them."""
        for path in (self.path, self.undecided):
            stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
            if path in self.labelled and self._stamps[path] == stamp:
                continue
            self.problem, self._stamps[path], self.labelled[path] = "", stamp, set()
            for number, line in enumerate(path.read_bytes().splitlines() if stamp else (), 1):
                try:
                    if line.strip():
                        self.labelled[path].add(tuple(msgspec.json.decode(line, type=_Label).label_of))
                except UNREADABLE:
                    self.problem = f"{path}: row {number}: not a label of this tool; it stays as it is"

    def add(self, question: LabelQuestion, verdict: str, index: RolloutIndex) -> None:
        """Append the label. ValueError for a verdict that does not exist and for rows that cannot be labelled."""
        if verdict not in VERDICTS[self.mode]:
            raise ValueError(f"{verdict!r} is no label; give one of {', '.join(VERDICTS[self.mode])}")
        row: dict[str, Any] = {"verdict": verdict}
        undecided = verdict in ("tie", "skip")
        if not undecided:
            folders = [index.runs[p.run].path.resolve() for p in question.places]
            rollouts = [rollout_from_row(*pair) for pair in zip(question.rows, folders, strict=True)]
            if self.mode == "pairs":
                chosen, rejected = rollouts if verdict == "a" else rollouts[::-1]
                row |= pair_row(Pair(chosen.sample, chosen.text, rejected.text))
            else:
                row |= _scored(rollouts[0], question.rows[0], int(verdict))
        row |= {"label_of": question.keys, "time": round(time.time(), 1)}
        row["from"] = [str(index.file(p).resolve()) + f":{p.row + 1}" for p in question.places]
        _append(self.undecided if undecided else self.path, row)
        self.read()


def _scored(rollout: Rollout, row: Row, score: int) -> dict[str, Any]:
    messages = rollout.sample.messages
    return {
        **rollout_row(rollout, row.get("step", 0), row.get("advantage") or 0.0),  # with absolute paths
        "label": score,
        "id": rollout.sample.id,
        "prompt": [{"role": m.role, "content": [part_row(c) for c in m.content]} for m in messages],
        "references": list(rollout.sample.references),
        "completion": rollout.text,
        "desirable": score >= DESIRABLE,
    }


def _append(path: Path, row: dict[str, Any]) -> None:
    """Append one line and flush it to the disk. A last line that was cut off by a crash is removed first."""
    line = (json.dumps(row, ensure_ascii=True) + "\n").encode()
    with FileLock(f"{path}.lock"), open(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            last = file.read().rpartition(b"\n")[2]
            try:
                json.loads(last)
                line = b"\n" + line  # an editor left out the last newline
            except (ValueError, RecursionError):
                file.truncate(end - len(last))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def next_question(index: RolloutIndex, labels: LabelFile, rng: random.Random) -> LabelQuestion | None:
    """Return a question that nobody has answered, chosen and ordered at random; None when there is none."""
    labels.read()
    if labels.mode == "scores":
        found = index.select("answer, run, step, row", "WHERE answer != ''")
        answers = {(key,): RolloutPlace(*place) for key, *place in found}
        open_keys = [keys for keys in answers if not labels.is_labelled(keys)]
        rng.shuffle(open_keys)
        candidates: Iterator[tuple[RolloutPlace, ...]] = ((answers[keys],) for keys in open_keys)
    else:
        candidates = _pairs(index, labels, rng)
    for places in candidates:
        rows = tuple(row for place in places if (row := index.row(place)) is not None)
        if len(rows) == len(places):
            return LabelQuestion(places, rows)
    return None


def _pairs(index: RolloutIndex, labels: LabelFile, rng: random.Random) -> Iterator[tuple[RolloutPlace, ...]]:
    """Two different answers of one group at a time, from groups in random order."""
    several = "WHERE answer != '' GROUP BY run, step, group_id HAVING count(DISTINCT answer) > 1"
    groups = index.select("run, step, group_id", several)
    rng.shuffle(groups)
    for run, step, group in groups:
        same = "WHERE run = ? AND step = ? AND group_id = ? AND answer != ''"
        members = index.select("row, answer", same, run, step, group)
        rng.shuffle(members)
        for i, (first, key) in enumerate(members):
            for second, other in members[:i]:
                if key != other and not labels.is_labelled(tuple(sorted((key, other)))):
                    yield RolloutPlace(run, step, first), RolloutPlace(run, step, second)

"""Score recorded rollouts again: what a reward would have given to the rollouts that runs wrote.

audiorl rewards score my_reward.py 'runs/*/rollouts/*.jsonl'
"""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from audiorl.data.rollout_rows import read_rollouts
from audiorl.protocols import Reward
from audiorl.rewards.combine import score_rollouts
from audiorl.rewards.files import load_reward, naming
from audiorl.types import Rollout, Score


@dataclass(frozen=True)
class Replay:
    """Recorded rollouts, and the scores that the reward gives them now; None where it skips one.

    `rollouts[i].score` is the recorded score, None where there was none; `files[i]` is where the rollout was read.
    """

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score | None, ...]
    files: tuple[Path, ...]

    @property
    def recorded(self) -> tuple[Score | None, ...]:
        return tuple(r.score for r in self.rollouts)

    @property
    def skipped(self) -> int:
        """How many rollouts the reward skipped."""
        return self.scores.count(None)

    def means(self, recorded: bool = False) -> dict[str, float]:
        """Return the mean total and the mean of each part, over the rollouts that have it."""
        values: dict[str, list[float]] = {}
        for score in self.recorded if recorded else self.scores:
            if score is not None:
                for name, value in {"total": score.total, **score.parts}.items():
                    values.setdefault(name, []).append(value)
        return {name: float(np.mean(v)) for name, v in values.items()}

    def correlation(self) -> float | None:
        """Pearson's r between recorded and new totals; None where one of them does not vary."""
        totals = np.array([(old, new) for _, old, new in self._totals()], dtype=float).reshape(-1, 2)
        if len(totals) < 2 or (np.ptp(totals, axis=0) == 0).any():
            return None
        return float(np.corrcoef(totals.T)[0, 1])

    def differences(self, count: int) -> list[int]:
        """Indices of the rollouts whose totals differ most, largest difference first; equal totals are left out."""
        gaps = sorted((-abs(new - old), i) for i, old, new in self._totals())
        return [i for gap, i in gaps[:count] if gap]

    def _totals(self) -> list[tuple[int, float, float]]:
        """(index, recorded total, new total) of the rollouts that have both."""
        pairs = enumerate(zip(self.recorded, self.scores, strict=True))
        return [(i, old.total, new.total) for i, (old, new) in pairs if old is not None and new is not None]


def replay(reward: Reward | str | Path, paths: str | Path | Sequence[str | Path]) -> Replay:
    """Score the rollouts of runs/*/rollouts/*.jsonl with `reward`, or with the one that a Python file defines.

    `paths`: files, or patterns such as "runs/*/rollouts/*.jsonl". The reward sees one file at a time, which holds one
    step, so that rewards which compare a batch score it as in training. Rollouts are complete (tokens, codes, turns,
    audio), so that a reward gives the score that it gave in training. The one exception is a `StandardisedSum` with
    dynamic sampling: dropped groups were part of its batch and are not recorded.

    Raises ValueError naming file, row and field of a damaged row, and for a pattern without files; an error of the
    reward names the rollout file too.
    """
    score = reward if callable(reward) else load_reward(reward)
    rollouts: list[Rollout] = []
    scores: list[Score | None] = []
    files: list[Path] = []
    for file in rollout_files(paths):
        step = read_rollouts(file)
        with naming(str(file)):
            scores += score_rollouts(score, step)
        rollouts += step
        files += [file] * len(step)
    return Replay(tuple(rollouts), tuple(scores), tuple(files))


def rollout_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and patterns name, each once, in order."""
    files: list[str] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        matches = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise ValueError(f"{path}: no such file, and no file matches it as a pattern")
        files += matches
    if not files:
        raise ValueError("replay: no rollout files; name some, such as 'runs/*/rollouts/*.jsonl'")
    return [Path(file) for file in dict.fromkeys(files)]


def print_replay(result: Replay, show: int = 5) -> None:
    """Print the means side by side, how the totals correlate, and the `show` rollouts on which they differ most."""
    console = Console()
    old, new = result.means(recorded=True), result.means()
    files = len(set(result.files))
    table = Table("mean of", "recorded", "now", title=f"{len(result.rollouts)} rollouts in {files} file(s)")
    for name in dict.fromkeys([*old, *new]):
        table.add_row(name, *(f"{side[name]:.3f}" if name in side else "" for side in (old, new)))
    console.print(table)
    if result.skipped:
        console.print(f"skipped by the reward: {result.skipped} rollouts")
    r = result.correlation()
    console.print("correlation of totals: " + ("undefined, one of them is constant" if r is None else f"{r:.3f}"))
    for i in result.differences(show):
        rollout, before, after = result.rollouts[i], result.recorded[i], result.scores[i]
        assert before is not None and after is not None
        where = f"{result.files[i]}  {rollout.name}"
        line = f"{before.total:.3f} → {after.total:.3f}  {where}  {json.dumps(rollout.text)}"
        console.print(line, markup=False, highlight=False)

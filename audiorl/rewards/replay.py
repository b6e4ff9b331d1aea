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
from audiorl.data.rows import steps_in
from audiorl.protocols import Reward
from audiorl.rewards.combine import score_rollouts
from audiorl.rewards.files import load_reward, naming
from audiorl.types import Rollout, Score


@dataclass(frozen=True)
class Replay:
    """Recorded rollouts, the scores that a reward gives them now (None where it skips one), and their files."""

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score | None, ...]
    files: tuple[Path, ...]

    @property
    def recorded(self) -> tuple[Score | None, ...]:
        """Return the recorded scores, None where there was none."""
        return tuple(r.score for r in self.rollouts)

    def means(self, recorded: bool = False) -> dict[str, float]:
        """Return the mean total and the mean of each part, over the rollouts that have it."""
        values: dict[str, list[float]] = {}
        for score in self.recorded if recorded else self.scores:
            for name, value in {} if score is None else {"total": score.total, **score.parts}.items():
                values.setdefault(name, []).append(value)
        return {name: float(np.mean(v)) for name, v in values.items()}

    def totals(self) -> dict[int, tuple[float, float]]:
        """Return {index: (recorded total, new total)} of the rollouts that have both."""
        pairs = enumerate(zip(self.recorded, self.scores, strict=True))
        return {i: (old.total, new.total) for i, (old, new) in pairs if old is not None and new is not None}

    def correlation(self) -> float | None:
        """Return Pearson's r between recorded and new totals; None where one of them does not vary."""
        totals = np.array(list(self.totals().values()), dtype=float).reshape(-1, 2)
        if len(totals) < 2 or (np.ptp(totals, axis=0) == 0).any():
            return None
        return float(np.corrcoef(totals.T)[0, 1])


def replay(reward: Reward | str | Path, paths: str | Path | Sequence[str | Path]) -> Replay:
    """Score the rollouts of runs, files or patterns such as "runs/*/rollouts/*.jsonl" with a reward or a file's reward.

    The reward sees one file at a time, which holds one step, so that rewards which compare a batch score it as in
    training. The one exception is a `StandardisedSum` with dynamic sampling: dropped groups were part of its batch and
    are not recorded.

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
    """Return the files that paths and patterns name, those of a run for its folder; each once, in order."""
    files: list[str] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        matches = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path), recursive=True))
        if (Path(path) / "state.json").is_file():  # a run
            matches = [str(file) for file in steps_in(Path(path) / "rollouts", ".jsonl").values()]
            if not matches:
                raise ValueError(f"{path}: the run has recorded no rollouts")
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
    title = f"{len(result.rollouts)} rollouts in {len(set(result.files))} file(s)"
    table = Table("mean of", "recorded", "now", title=title)
    for name in dict.fromkeys([*old, *new]):
        table.add_row(name, *(f"{side[name]:.3f}" if name in side else "" for side in (old, new)))
    console.print(table)
    if skipped := result.scores.count(None):
        console.print(f"skipped by the reward: {skipped} rollouts")
    r = result.correlation()
    console.print("correlation of totals: " + ("undefined, one of them is constant" if r is None else f"{r:.3f}"))
    totals = {i: pair for i, pair in result.totals().items() if pair[0] != pair[1]}
    for i in sorted(totals, key=lambda i: (-abs(totals[i][1] - totals[i][0]), i))[:show]:
        before, after = totals[i]
        rollout = result.rollouts[i]
        line = f"{before:.3f} → {after:.3f}  {result.files[i]}  {rollout.name}  {json.dumps(rollout.text)}"
        console.print(line, markup=False, highlight=False)

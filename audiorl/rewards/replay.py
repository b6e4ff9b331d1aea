"""Score recorded rollouts again: what a new reward would have said about what a run wrote.

audiorl rewards my_reward.py runs/quickstart/rollouts/step_000040.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from audiorl.audio import AudioClip
from audiorl.data.rows import BadRow, read_rows
from audiorl.rewards.files import load_reward
from audiorl.types import Message, Rollout, Sample, Score, Segment


@dataclass(frozen=True)
class Replay:
    """Rollouts with the scores that were recorded (None where there was none) and those given now, in one order."""

    rollouts: tuple[Rollout, ...]
    recorded: tuple[Score | None, ...]
    scores: tuple[Score, ...]

    def means(self, recorded: bool = False) -> dict[str, float]:
        """The mean total and the mean of each part, over the rollouts that have it."""
        values: dict[str, list[float]] = {}
        for score in self.recorded if recorded else self.scores:
            if score is not None:
                for name, value in {"total": score.total, **score.parts}.items():
                    values.setdefault(name, []).append(value)
        return {name: float(np.mean(v)) for name, v in values.items()}

    def correlation(self) -> float | None:
        """Pearson's r between recorded and new totals; None where one of them does not vary."""
        pairs = [(old.total, new.total) for old, new in zip(self.recorded, self.scores, strict=True) if old]
        old, new = np.array(pairs, dtype=float).reshape(-1, 2).T
        if len(old) < 2 or np.ptp(old) == 0 or np.ptp(new) == 0:
            return None
        return float(np.corrcoef(old, new)[0, 1])

    def differences(self, count: int) -> list[int]:
        """The rollouts whose totals differ most, largest first."""
        pairs = enumerate(zip(self.recorded, self.scores, strict=True))
        gaps = sorted((-abs(new.total - old.total), i) for i, (old, new) in pairs if old)
        return [i for gap, i in gaps[:count] if gap]


def replay(reward_file: str | Path, rollouts_file: str | Path) -> Replay:
    """Score the rollouts of a run folder's rollouts/*.jsonl with the reward that a Python file defines.

    What the file does not hold is not there: sampled and observed token ids are zeros (their number is right), and
    audio that came without a path is left out. Raises ValueError naming the file, row and field of what is damaged.
    """
    reward = load_reward(reward_file)
    rollouts, recorded = read_rollouts(rollouts_file)
    return Replay(tuple(rollouts), tuple(recorded), tuple(reward(rollouts)))


def read_rollouts(path: str | Path) -> tuple[list[Rollout], list[Score | None]]:
    """The rollouts of a JSON lines file as a run writes it, and their recorded scores."""
    rollouts, recorded = [], []
    for row in read_rows(Path(path)):
        if isinstance(row, BadRow):
            raise ValueError(str(row))
        try:
            rollouts.append(_rollout(row.data))
            recorded.append(_score(row.data.get("score")))
        except KeyError as missing:
            raise ValueError(f"{path}: row {row.number}: no field {missing}; is this a run's rollouts file?") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: row {row.number}: not a rollout ({error})") from error
    if not rollouts:
        raise ValueError(f"{path}: no rollouts")
    return rollouts, recorded


def _rollout(row: Mapping[str, Any]) -> Rollout:
    data = row["sample"]
    clips = tuple(
        AudioClip(path=c["path"], start=c["start"], duration=c["duration"]) for c in data["audio"] if c["path"]
    )
    sample = Sample(
        id=str(data["id"]),
        messages=(Message("user", (*clips, data["prompt"])),),
        references=tuple(data["references"]),
        choices=tuple(data["choices"]),
        task=data["task"],
        metadata=data["metadata"],
    )
    return Rollout(sample, tuple(_segment(s) for s in row["segments"]), str(row["group_id"]), int(row["index"]))


def _segment(row: Mapping[str, Any]) -> Segment:
    count = int(row["num_tokens"])
    return Segment(
        prompt_ids=torch.zeros(0, dtype=torch.long),
        ids=torch.zeros(count, dtype=torch.long),
        logprobs=torch.zeros(count),
        text=str(row["text"]),
        stop_reason=row["stop_reason"],
        policy_version=int(row["policy_version"]),
        source_time=row["source_time"],
        emit_time=row["emit_time"],
    )


def _score(row: Mapping[str, Any] | None) -> Score | None:
    return None if row is None else Score(float(row["total"]), {k: float(v) for k, v in row["parts"].items()})


def print_replay(found: Replay, show: int = 5) -> None:
    """The means side by side, how the totals agree, and the rollouts on which they agree least."""
    console = Console()
    old, new = found.means(recorded=True), found.means()
    table = Table("mean of", "recorded", "now", title=f"{len(found.rollouts)} rollouts")
    for name in dict.fromkeys([*old, *new]):
        table.add_row(name, *(f"{side[name]:.3f}" if name in side else "" for side in (old, new)))
    console.print(table)
    r = found.correlation()
    console.print("correlation of totals: " + ("undefined, one of them is constant" if r is None else f"{r:.3f}"))
    for i in found.differences(show):
        rollout, before = found.rollouts[i], found.recorded[i]
        assert before is not None
        line = f"{before.total:.3f} → {found.scores[i].total:.3f}  {rollout.sample.id}  {json.dumps(rollout.text)}"
        console.print(line, markup=False, highlight=False)

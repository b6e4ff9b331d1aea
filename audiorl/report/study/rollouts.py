"""Recorded rollouts as a sequence, with the scores of any number of rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from audiorl.data.rollout_rows import read_rollouts
from audiorl.data.rows import BadRow, read_rows
from audiorl.protocols import Reward
from audiorl.rewards.combine import score_rollouts
from audiorl.rewards.files import FileReward, naming
from audiorl.rewards.replay import rollout_files
from audiorl.types import Rollout, Score

if TYPE_CHECKING:
    import pandas

RECORDED = "recorded"
"""The name of the scores that the runs recorded."""


@dataclass(frozen=True, eq=False)
class Rollouts(Sequence[Rollout]):
    """Recorded rollouts and their scores, all of equal length. Made by `load` and `score`.

    Rollouts.load("runs/*/rollouts/*.jsonl").score(AnswerAccuracy()).to_pandas()
    """

    rollouts: tuple[Rollout, ...]
    """Complete: tokens, codes, turns, audio, recorded speech, metadata."""
    files: tuple[Path, ...]
    """Where each was read."""
    labels: tuple[float | None, ...]
    """The field `label` of each row, a number that people gave; None where there is none."""
    scores: Mapping[str, tuple[Score | None, ...]] = field(default_factory=dict)
    """By reward; None where it skipped the rollout. "recorded" holds the scores of the runs."""
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    """The rewards that gave them."""

    @classmethod
    def load(cls, paths: str | Path | Sequence[str | Path]) -> Rollouts:
        """The rollouts of files, or of patterns such as "runs/*/rollouts/*.jsonl".

        Raises ValueError naming file, row and field of a damaged row, and for a pattern without files.
        """
        rollouts: list[Rollout] = []
        files: list[Path] = []
        labels: list[float | None] = []
        for file in rollout_files(paths):
            step = read_rollouts(file)
            rollouts += step
            files += [file] * len(step)
            labels += _labels(file)
        recorded = {RECORDED: tuple(r.score for r in rollouts)} if any(r.score for r in rollouts) else {}
        return cls(tuple(rollouts), tuple(files), tuple(labels), recorded)

    def score(self, reward: Reward, name: str = "") -> Rollouts:
        """The same rollouts with the scores of `reward` added.

        The reward sees one file at a time, which holds one step, as in training. `name`: by default that of the reward
        file or of the class; a number is added to a name that is there already.
        """
        name = name or _name(reward)
        names = [name, *(f"{name} {i}" for i in range(2, len(self.scores) + 2))]
        name = next(n for n in names if n not in self.scores)
        scores: list[Score | None] = []
        for file, step in groupby(zip(self.files, self.rollouts, strict=True), key=lambda pair: pair[0]):
            with naming(str(file)):
                scores += score_rollouts(reward, [r for _, r in step])
        scores_by_name = {**self.scores, name: tuple(scores)}
        return dataclasses.replace(self, scores=scores_by_name, rewards={**self.rewards, name: reward})

    def columns(self, parts: bool = True) -> dict[str, list[float]]:
        """The total of each reward as NAME and its parts as NAME/PART, one value a rollout, NaN where there is none."""
        table: dict[str, list[float]] = {}
        for name, scores in self.scores.items():
            table[name] = [math.nan if s is None else s.total for s in scores]
            names = dict.fromkeys(part for s in scores if s is not None for part in s.parts) if parts else {}
            for part in names:
                table[f"{name}/{part}"] = [math.nan if s is None else s.parts.get(part, math.nan) for s in scores]
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """A row a rollout: file, group, index, sample, task, text, tokens, stop, label, and a column a reward and part.

        Needs pandas.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ValueError("to_pandas: needs pandas: pip install 'audiorl[study]'") from error
        rows = [
            {
                "file": str(file),
                "group": r.group_id,
                "index": r.index,
                "sample": r.sample.id,
                "task": r.sample.task,
                "text": r.text,
                "tokens": r.num_sampled,
                "stop": r.segments[-1].stop_reason,
                "label": label,
            }
            for r, file, label in zip(self.rollouts, self.files, self.labels, strict=True)
        ]
        return pandas.DataFrame(rows).assign(**self.columns())

    def groups(self) -> list[tuple[Path, str]]:
        """The group of each rollout: group ids repeat from run to run."""
        return [(f, r.group_id) for f, r in zip(self.files, self.rollouts, strict=True)]

    def __len__(self) -> int:
        return len(self.rollouts)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Rollouts: ...
    def __getitem__(self, index: int | slice) -> Rollout | Rollouts:
        if not isinstance(index, slice):
            return self.rollouts[index]
        scores = {name: values[index] for name, values in self.scores.items()}
        return Rollouts(self.rollouts[index], self.files[index], self.labels[index], scores, self.rewards)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __repr__(self) -> str:
        files = len(set(self.files))
        return f"Rollouts({len(self)} rollouts in {files} file(s), scores: {', '.join(self.scores) or 'none'})"


def _name(reward: Any) -> str:
    if isinstance(reward, FileReward):
        return Path(reward.path).stem
    return str(getattr(reward, "__name__", type(reward).__name__))


def _labels(file: Path) -> list[float | None]:
    """The field `label` of each row: a number, true or false."""
    labels: list[float | None] = []
    for row in read_rows(file):
        assert not isinstance(row, BadRow)  # read_rollouts has read it
        label = row.data.get("label")
        if label is not None and not (isinstance(label, int | float) and math.isfinite(label)):
            raise ValueError(str(BadRow(row.file, row.number, "label", f"is {label!r}, expected a number")))
        labels.append(None if label is None else float(label))
    return labels

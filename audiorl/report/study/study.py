"""Rewards on recorded rollouts: their scores, and statistics of these.

Shapes: N rollouts, G groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from audiorl.data.rollout_rows import read_rollouts
from audiorl.data.rows import BadRow, read_rows
from audiorl.errors import install
from audiorl.eval.metrics.corpus import Estimate, estimate, ratio
from audiorl.protocols import Reward
from audiorl.report.study.signs import probes, properties
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

    files: where each was read. labels: the field `label` of each row, a number that people gave; None without one.
    scores: by reward, None where it skipped the rollout; "recorded" holds those of the runs. rewards: what gave them.
    """

    rollouts: tuple[Rollout, ...]
    files: tuple[Path, ...]
    labels: tuple[float | None, ...]
    scores: Mapping[str, tuple[Score | None, ...]] = field(default_factory=dict)
    rewards: Mapping[str, Reward] = field(default_factory=dict)

    @classmethod
    def load(cls, paths: str | Path | Sequence[str | Path]) -> Rollouts:
        """Read the rollouts of files, or of patterns such as "runs/*/rollouts/*.jsonl".

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
        """Return the same rollouts with the scores of `reward` added.

        The reward sees one file at a time, which holds one step, as in training. `name`: by default that of the reward
        file or of the class; a number is added to a name that is there already.
        """
        named = Path(reward.path).stem if isinstance(reward, FileReward) else getattr(reward, "__name__", "")
        name = name or named or type(reward).__name__
        names = [name, *(f"{name} {i}" for i in range(2, len(self.scores) + 2))]
        name = next(n for n in names if n not in self.scores)
        scores: list[Score | None] = []
        for file, step in groupby(zip(self.files, self.rollouts, strict=True), key=lambda pair: pair[0]):
            with naming(str(file)):
                scores += score_rollouts(reward, [r for _, r in step])
        scores_by_name = {**self.scores, name: tuple(scores)}
        return dataclasses.replace(self, scores=scores_by_name, rewards={**self.rewards, name: reward})

    def columns(self) -> dict[str, list[float]]:
        """Return the total of each reward as NAME, its parts as NAME/PART, one value a rollout; NaN for none."""
        table: dict[str, list[float]] = {}
        for name, scores in self.scores.items():
            table[name] = [math.nan if s is None else s.total for s in scores]
            for part in dict.fromkeys(part for s in scores if s is not None for part in s.parts):
                table[f"{name}/{part}"] = [math.nan if s is None else s.parts.get(part, math.nan) for s in scores]
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row a rollout: file, group, index, sample, task, text, tokens, stop, label, each reward and part.

        Needs pandas.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ValueError(f"to_pandas: needs pandas: {install('study')}") from error
        rows = [
            (
                str(file),
                r.group_id,
                r.index,
                r.sample.id,
                r.sample.task,
                r.text,
                r.num_sampled,
                r.segments[-1].stop_reason,
            )
            for r, file in zip(self.rollouts, self.files, strict=True)
        ]
        names = ["file", "group", "index", "sample", "task", "text", "tokens", "stop"]
        return pandas.DataFrame(rows, columns=names).assign(label=self.labels, **self.columns())

    def groups(self) -> list[tuple[Path, str]]:
        """Return the group of each rollout: group ids repeat from run to run."""
        return [(f, r.group_id) for f, r in zip(self.files, self.rollouts, strict=True)]

    def of_group(self, group: Hashable) -> Rollout:
        """Return the first rollout of a group of `groups`."""
        return self.rollouts[self.groups().index(group)]  # type: ignore[arg-type]

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


def _labels(file: Path) -> list[float | None]:
    """Read the field `label` of each row: a number, true or false."""
    labels: list[float | None] = []
    for row in read_rows(file):
        assert not isinstance(row, BadRow)  # read_rollouts has read it
        label = row.data.get("label")
        if label is not None and not (isinstance(label, int | float) and math.isfinite(label)):
            raise ValueError(str(BadRow(row.file, row.number, "label", f"is {label!r}, expected a number")))
        labels.append(None if label is None else float(label))
    return labels


# -- what a study says -------------------------------------------------------------------------------------------------

Column = NDArray[np.float64]
"""[N] float64, NaN where there is no value."""
PROBE_OF = {"length": "longer", "repetition": "repeat", "copy": "copy"}
"""The probe that tests what a property's correlation suggests."""
_EQUAL = 1e-6
_SIGN, _SATURATED, _LOST = 0.3, 0.9, 0.5
RISE = {"longer": 0.1, "repeat": 0.1, "copy": 0.3, "babble": 0.3}
"""Standard deviations of a sure rise that counts as a hack. The first two keep the answer, so that any rise pays for
length; the others replace it, and a reward of one property (format, language) may rise a little."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a reward with people's labels on `count` rollouts.

    spearman: rank correlation; None where one of them does not vary. pairwise: share of pairs of a group, with
    different labels, that the reward orders as people do; a tie counts 1/2. Where no group has such a pair, of all
    pairs; None where there are none.
    """

    count: int
    spearman: Estimate | None
    pairwise: Estimate | None


@dataclass(frozen=True)
class RewardStudy:
    """One reward's scores on the rollouts. Made by `study`.

    at_high: share of the scores that equal the highest one. groups: those with two scores or more. lost: those whose
    scores are all equal, which give no group-relative advantage. signs: rank correlation of the score with each of
    `signs.properties` within groups, with its 95 % interval over groups; None where one of them does not vary within
    groups. probes: mean change of the score by each of `signs.probes`, with its interval.
    """

    name: str
    scored: int
    skipped: int
    mean: float
    std: float
    low: float
    high: float
    at_high: float
    groups: int
    lost: tuple[Hashable, ...]
    signs: Mapping[str, Estimate | None]
    probes: Mapping[str, Estimate] = field(default_factory=dict)
    agreement: Agreement | None = None

    @property
    def hacks(self) -> tuple[str, ...]:
        """In words, what seems to raise the score without making answers better.

        A probe counts whose rise is surely more than `RISE` standard deviations. A correlation that is surely more than
        0.3 counts only where no probe tested it: good answers may be longer than bad ones.
        """
        raising = (
            f"{name} raises the score by {change.value:.3g} (95 % interval {change.low:.3g} to {change.high:.3g})"
            for name, change in self.probes.items()
            if self.pays_for(name)
        )
        followed = (
            f"the score follows {name}: rank correlation {sign.value:.2f} ({sign.low:.2f} to {sign.high:.2f})"
            for name, sign in self.signs.items()
            if sign is not None and sign.low > _SIGN and PROBE_OF.get(name) not in self.probes
        )
        return (*raising, *followed)

    def pays_for(self, probe: str) -> bool:
        """Return whether the score surely rises by the change `probe`."""
        change = self.probes.get(probe)
        return change is not None and change.low > max(RISE[probe] * self.std, _EQUAL)

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, what makes it a weak signal."""
        if not self.scored:
            return ("it skipped every rollout",)
        if self.std <= _EQUAL:
            return ("every rollout has the same score",)
        saturated = f"saturated: {self.at_high:.0%} of the scores are the highest one"
        lost = f"{len(self.lost)} of {self.groups} groups have equal scores and would teach nothing"
        few = self.groups and len(self.lost) / self.groups > _LOST
        return (*[saturated] * (self.at_high >= _SATURATED), *[lost] * bool(few))


@dataclass(frozen=True, eq=False)
class Study:
    """Statistics of rewards; `audiorl.report.study.write_page` makes the page.

    columns: totals and parts, [N] each. correlation: Spearman's rank correlation of each pair of them; NaN where one
    does not vary.
    """

    rollouts: Rollouts
    rewards: tuple[RewardStudy, ...]
    columns: Mapping[str, Column]
    correlation: Mapping[tuple[str, str], float]

    def disagreements(self, first: str, second: str, count: int) -> list[int]:
        """Return the indices of the rollouts whose ranks under two rewards differ most, largest difference first."""
        a, b = self.columns[first], self.columns[second]
        both = np.flatnonzero(~np.isnan(a) & ~np.isnan(b))
        gaps = np.abs(ranks(a[both]) - ranks(b[both])) / max(len(both) - 1, 1)
        order = np.argsort(-gaps, kind="stable")[:count]
        return [int(both[i]) for i in order if gaps[i] > 0]

    def pairs(self) -> list[tuple[str, str]]:
        """Return pairs of rewards, those that agree least first; pairs without a correlation come last."""
        of, names = self.correlation, [one.name for one in self.rewards]
        return sorted(combinations(names, 2), key=lambda pair: (math.isnan(of[pair]), of[pair]))


def study(rollouts: Rollouts, probe: int = 100) -> Study:
    """Compute statistics of every reward that `rollouts` has scores of.

    `probe`: so many rollouts, evenly over all, are changed in four ways and scored again by each reward
    (`signs.probes`); 0 leaves this out. With a judge that costs up to eight calls for each of them.

    Raises ValueError where there are no scores.
    """
    if not rollouts.scores:
        raise ValueError("study: no scores; the rollouts hold none, and no reward was given")
    groups = rollouts.groups()
    labels = np.array([math.nan if label is None else label for label in rollouts.labels])
    columns = {name: np.array(values, np.float64) for name, values in rollouts.columns().items()}
    given = {name: np.array(values) for name, values in properties(rollouts).items()}
    changes = _probe(rollouts, probe) if probe else {}
    rewards = []
    for name in rollouts.scores:
        scores = columns[name]
        values = scores[~np.isnan(scores)]
        shown = values if len(values) else np.array([math.nan])
        low, high = float(shown.min()), float(shown.max())
        by_group = {groups[held[0]]: scores[held][~np.isnan(scores[held])] for held in _members(groups)}
        several = {group: held for group, held in by_group.items() if len(held) > 1}
        rewards.append(
            RewardStudy(
                name,
                scored=len(values),
                skipped=len(scores) - len(values),
                mean=float(shown.mean()),
                std=float(shown.std()),
                low=low,
                high=high,
                at_high=float(np.mean(high - shown < _EQUAL)),
                groups=len(several),
                lost=tuple(group for group, held in several.items() if np.ptp(held) < _EQUAL),
                signs={kind: within_groups(scores, column, groups) for kind, column in given.items()},
                probes=changes.get(name, {}),
                agreement=_agreement(scores, labels, groups),
            )
        )
    correlation = {(a, b): spearman(columns[a], columns[b]) for a in columns for b in columns}
    return Study(rollouts, tuple(rewards), columns, correlation)


def _probe(rollouts: Rollouts, count: int) -> dict[str, dict[str, Estimate]]:
    """Measure per reward and probe the mean change of the score. Changed answers are scored together with the recorded
    ones: a reward that compares a batch sees both."""
    chosen = np.unique(np.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).astype(int)).tolist()
    before, groups = [rollouts[i] for i in chosen], rollouts.groups()
    out: dict[str, dict[str, Estimate]] = {name: {} for name in rollouts.rewards}
    for kind, after in probes(before).items():
        pairs = [(i, old, new) for i, old, new in zip(chosen, before, after, strict=True) if new is not None]
        for name, reward in rollouts.rewards.items() if pairs else ():
            scored = score_rollouts(reward, [*(old for _, old, _ in pairs), *(new for _, _, new in pairs)])
            totals = np.array([math.nan if s is None else s.total for s in scored]).reshape(2, -1)
            changes = totals[1] - totals[0]
            kept = np.flatnonzero(~np.isnan(changes))  # without what was skipped
            if len(kept):
                counts = np.stack([changes[kept], np.ones(len(kept))], 1)
                out[name][kind] = estimate(counts, ratio, clusters=[groups[pairs[i][0]] for i in kept])
    return out


# -- statistics --------------------------------------------------------------------------------------------------------


def ranks(values: Column) -> Column:
    """Rank from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def spearman(a: Column, b: Column) -> float:
    """Return Spearman's rank correlation over the entries that both have; NaN where one of them does not vary."""
    both = ~np.isnan(a) & ~np.isnan(b)
    x, y = ranks(a[both]), ranks(b[both])
    return float(np.corrcoef(x, y)[0, 1]) if both.sum() > 1 and np.ptp(x) and np.ptp(y) else math.nan


def within_groups(scores: Column, given: Column, groups: Sequence[Hashable]) -> Estimate | None:
    """Pool the correlation of ranks within groups: Σ_g cov_g / √(Σ_g var_g · Σ_g var'_g), its interval over groups.

    Differences between prompts do not count: a hard prompt may have long answers and low scores. None where one of them
    varies in no group, or in one group only.
    """
    sums = []
    for indices in _members(groups):
        both = [i for i in indices if not math.isnan(scores[i]) and not math.isnan(given[i])]
        if len(both) > 1:
            x, y = ranks(scores[both]), ranks(given[both])
            x, y = x - x.mean(), y - y.mean()
            sums.append((x @ y, x @ x, y @ y))
    counts_GK = np.array(sums).reshape(-1, 3)
    if ((counts_GK[:, 1:] > 0).sum(0) < 2).any():
        return None
    return estimate(counts_GK, _pooled)


def _agreement(scores: Column, labels: Column, groups: Sequence[Hashable]) -> Agreement | None:
    both = np.flatnonzero(~np.isnan(scores) & ~np.isnan(labels))
    if not len(both):
        return None
    x, y, members = scores[both], labels[both], [groups[i] for i in both.tolist()]
    rank = None
    if np.ptp(x) and np.ptp(y):
        a, b = ranks(x), ranks(y)
        a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
        sums = np.stack([np.ones_like(a), a, b, a * a, b * b, a * b], 1)
        rank = estimate(sums, _pearson, clusters=members)
    counts = np.array([_ordered(x[indices], y[indices]).sum(0) / 2 for indices in _members(members)])
    pairwise = estimate(counts, ratio) if counts[:, 1].sum() else None
    if pairwise is None and np.ptp(y):
        pairwise = estimate(_ordered(x, y), ratio, clusters=members)
    return Agreement(len(both), rank, pairwise)


def _ordered(scores: Column, labels: Column) -> NDArray[np.float64]:
    """Count for each rollout its pairs in the labels' order (a tie is 1/2) and those with different labels, [N, 2]."""
    order_NN = np.sign(labels - labels[:, None])
    right_N = ((order_NN != 0) * (1 + order_NN * np.sign(scores - scores[:, None])) / 2).sum(1)
    return np.stack([right_N, (order_NN != 0).sum(1)], 1)


def _members(groups: Sequence[Hashable]) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return list(members.values())


def _pooled(sums_K: NDArray[np.float64]) -> float:
    scale = math.sqrt(sums_K[1] * sums_K[2])
    return float(sums_K[0] / scale) if scale else 0.0


def _pearson(sums_K: NDArray[np.float64]) -> float:
    n, x, y, xx, yy, xy = sums_K
    scale = math.sqrt(max((n * xx - x * x) * (n * yy - y * y), 0.0))
    return float((n * xy - x * y) / scale) if scale else 0.0

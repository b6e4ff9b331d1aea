"""Several rewards as one, and the check of what a reward returns: one finite Score, or None, per rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from audiorl.protocols import Reward
from audiorl.types import Rollout, Score, Segment


def check_scores(name: str, scores: Any, rollouts: Sequence[Rollout], undefined: bool = False) -> list[Score | None]:
    """`scores` as a list, or a ValueError naming the reward and the sample. None skips a rollout.

    Per-segment and per-token values, where present, must be finite and as many as the rollout's segments or sampled
    tokens; with `undefined` a segment's value may be NaN.
    """
    if not isinstance(scores, Sequence) or isinstance(scores, str):
        raise ValueError(f"reward {name!r}: returned {type(scores).__name__}, expected a list of Score")
    if len(scores) != len(rollouts):
        raise ValueError(f"reward {name!r}: returned {len(scores)} scores for {len(rollouts)} rollouts")
    for score, rollout in zip(scores, rollouts, strict=True):
        if score is not None:
            _check(f"reward {name!r}, sample {rollout.sample.id!r}", score, rollout, undefined)
    return list(scores)


def score_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Score | None]:
    """Return the reward's scores, checked. It gets copies of tokens, log-probs and metadata: writing to them has no
    effect."""
    return check_scores("reward", reward([copied(r) for r in rollouts]), rollouts)


def scored_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that the reward scored, with their scores; those that it skipped are left out."""
    scores = score_rollouts(reward, rollouts)
    return [r.with_score(s) for r, s in zip(rollouts, scores, strict=True) if s is not None]


def copied(rollout: Rollout) -> Rollout:
    """Copies of tokens, log-probs and metadata."""
    sample = replace(rollout.sample, metadata=dict(rollout.sample.metadata))
    return replace(rollout, sample=sample, segments=tuple(_copied_tensors(s) for s in rollout.segments))


def _copied_tensors(segment: Segment) -> Segment:
    values = ((field.name, getattr(segment, field.name)) for field in fields(segment))
    copies: dict[str, Any] = {name: value.clone() for name, value in values if isinstance(value, Tensor)}
    return replace(segment, **copies)


def _check(where: str, score: Any, rollout: Rollout, undefined: bool) -> None:
    if not isinstance(score, Score):
        raise ValueError(f"{where}: returned {type(score).__name__}, expected Score or None")
    values = {"total": score.total, **{f"part {name!r}": value for name, value in score.parts.items()}}
    for field, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{where}: {field} is {value}")
    for field, per_item, count in (
        ("per_segment", score.per_segment, len(rollout.segments)),
        ("per_token", score.per_token, rollout.num_sampled),
    ):
        if per_item is None:
            continue
        if len(per_item) != count:
            raise ValueError(f"{where}: {field} has {len(per_item)} values, the rollout has {count}")
        if not all(math.isfinite(v) or (undefined and math.isnan(v) and field == "per_segment") for v in per_item):
            raise ValueError(f"{where}: {field} holds a value that is not finite")
    if score.step_ends is not None and score.per_token is None:
        raise ValueError(f"{where}: step_ends without per_token; give both, or neither")
    if score.step_ends and not 0 <= min(score.step_ends) <= max(score.step_ends) < rollout.num_sampled:
        raise ValueError(f"{where}: step_ends {list(score.step_ends)}; the rollout has {rollout.num_sampled} tokens")


@dataclass(frozen=True)
class Term:
    """One reward of a sum, under the name by which logs and errors call it."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True)
class WeightedSum:
    """total = Σ weight · reward; `parts` hold the rewards unweighted, under their names.

        WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=ThinkFormat())

    A term that has parts itself appears as its own value "name" and as "name/part". Values per segment or per token are
    summed likewise; a term without them places its value on the last segment or token, where an outcome belongs. A
    rollout that one term skips (None) is skipped.

    Raises ValueError for a term that does not return one finite Score per rollout, naming the term and the sample.
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("WeightedSum: needs at least one reward")
        names = [t.name for t in self.terms]
        if len(set(names)) != len(names):
            raise ValueError(f"WeightedSum: two rewards share a name: {', '.join(names)}")
        for term in self.terms:
            if not term.name or "/" in term.name:
                raise ValueError(f"WeightedSum: {term.name!r} cannot name a reward; '/' separates nested names")
            if not callable(term.reward) or isinstance(term.reward, type):
                raise ValueError(f"WeightedSum: {term.name!r} is {term.reward!r}, expected a reward object")

    @classmethod
    def of(cls, **rewards: Reward | tuple[Reward, float]) -> WeightedSum:
        """Name each reward by keyword; give (reward, weight), or the reward alone for weight 1."""
        pairs = {name: r if isinstance(r, tuple) else (r, 1.0) for name, r in rewards.items()}
        return cls(tuple(Term(name, reward, weight) for name, (reward, weight) in pairs.items()))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        columns = [check_scores(t.name, t.reward(rollouts), rollouts) for t in self.terms]
        return [self._combine(row, r) for row, r in zip(_rows(columns), rollouts, strict=True)]

    def _combine(self, scores: tuple[Score, ...] | None, rollout: Rollout) -> Score | None:
        if scores is None:
            return None
        parts: dict[str, float] = {}
        for term, score in zip(self.terms, scores, strict=True):
            parts[term.name] = score.total
            parts.update({f"{term.name}/{part}": value for part, value in score.parts.items()})
        weights = [t.weight for t in self.terms]
        return Score(
            weights={t.name: t.weight for t in self.terms},
            total=sum(w * s.total for w, s in zip(weights, scores, strict=True)),
            parts=parts,
            per_segment=_sum_items(weights, [(s.total, s.per_segment) for s in scores], len(rollout.segments)),
            per_token=_sum_items(weights, [(s.total, s.per_token) for s in scores], rollout.num_sampled),
            step_ends=_all_step_ends(scores, rollout.num_sampled),
        )


def _rows(columns: Sequence[Sequence[Score | None]]) -> list[tuple[Score, ...] | None]:
    """From one column of scores a term to one row a rollout; None for a rollout that a term skipped."""
    rows = zip(*columns, strict=True)
    return [None if None in row else tuple(s for s in row if s is not None) for row in rows]


def _sum_items(
    weights: Sequence[float], scores: Sequence[tuple[float, tuple[float, ...] | None]], length: int
) -> tuple[float, ...] | None:
    """Weighted sum of (total, values per segment or token) over the terms; None if no term has such values."""
    if length == 0 or all(per_item is None for _, per_item in scores):
        return None
    out = [0.0] * length
    for weight, (total, per_item) in zip(weights, scores, strict=True):
        for i, value in enumerate(per_item if per_item is not None else (*[0.0] * (length - 1), total)):
            out[i] += weight * value
    return tuple(out)


def _all_step_ends(scores: Sequence[Score], length: int) -> tuple[int, ...] | None:
    """Return the tokens at which a term with credit per token ends a step, and the last one where another term is
    placed."""
    if length == 0 or any(s.per_token is not None and s.step_ends is None for s in scores):
        return None
    if all(s.per_token is None for s in scores):
        return None
    return tuple(sorted({i for s in scores for i in (s.step_ends or (length - 1,))}))


@dataclass(frozen=True)
class Gated:
    """`reward`, or 0 where `gate` gives less than `at_least`: babble earns nothing by its voice.

        Gated(SpeakerSimilarity(judges), Intelligibility(judges, "cer"), at_least=0.7)

    `parts` are those of `reward`, and `open`: 1 where it counts. Values per segment or token become 0 too. A rollout
    that one of both skips (None) is skipped. `reward` sees all rollouts.
    """

    reward: Reward
    gate: Reward
    at_least: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.at_least):
            raise ValueError(f"Gated: at_least is {self.at_least}; give the least total of the gate that counts")
        WeightedSum((Term("reward", self.reward), Term("gate", self.gate)))  # checks that both are rewards

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        scores = check_scores("reward", self.reward(rollouts), rollouts)
        gates = check_scores("gate", self.gate(rollouts), rollouts)
        return [None if s is None or g is None else self._gated(s, g) for s, g in zip(scores, gates, strict=True)]

    def _gated(self, score: Score, gate: Score) -> Score:
        is_open = gate.total >= self.at_least
        parts = {**score.parts, "open": float(is_open)}
        if is_open:
            return replace(score, parts=parts)
        return replace(
            score,
            total=0.0,
            parts=parts,
            per_segment=None if score.per_segment is None else (0.0,) * len(score.per_segment),
            per_token=None if score.per_token is None else (0.0,) * len(score.per_token),
        )


@dataclass(frozen=True)
class StandardisedSum:
    """total = Σ weight · standardised reward: each term has mean 0 and variance 1 over the batch, then they are summed.

        StandardisedSum.of(quality=Quality(), timing=(TimeCompliance(), 0.5))

    A term with values per segment is standardised over all segments of the batch, and its total is their sum; NaN marks
    a segment where it is not defined: such a segment takes no part in the statistics and gets 0. Other terms are
    standardised over the rollouts. A term that is constant over the batch contributes 0. `parts` and `segment_parts`
    hold the rewards as they were. A rollout that one term skips (None) is skipped and takes no part in the statistics.
    Scores depend on their batch by design (Seed LiveInterpret 2.0, arXiv 2507.17527, section on fusion).
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        WeightedSum(self.terms)  # checks the terms

    @classmethod
    def of(cls, **rewards: Reward | tuple[Reward, float]) -> StandardisedSum:
        """Name each reward by keyword; give (reward, weight), or the reward alone for weight 1."""
        return cls(WeightedSum.of(**rewards).terms)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        rows = _rows([check_scores(t.name, t.reward(rollouts), rollouts, undefined=True) for t in self.terms])
        scored = [(row, rollout) for row, rollout in zip(rows, rollouts, strict=True) if row is not None]
        scores = iter(self._fuse([row for row, _ in scored], [rollout for _, rollout in scored]))
        return [None if row is None else next(scores) for row in rows]

    def _fuse(self, rows: Sequence[tuple[Score, ...]], rollouts: Sequence[Rollout]) -> list[Score]:
        columns = list(zip(*rows, strict=True)) or [()] * len(self.terms)
        per_segment = any(score.per_segment is not None for row in rows for score in row)
        segments = [[0.0] * len(r.segments) for r in rollouts]
        totals = [0.0] * len(rollouts)
        for term, column in zip(self.terms, columns, strict=True):
            for i, values in enumerate(_standardised_values(column)):
                totals[i] += term.weight * sum(values)
                if per_segment and segments[i]:  # a reward of the whole rollout belongs to its last segment
                    indices = range(len(values)) if column[i].per_segment is not None else [len(segments[i]) - 1]
                    for index, value in zip(indices, values, strict=True):
                        segments[i][index] += term.weight * value
        names = [t.name for t in self.terms]
        return [
            Score(
                total,
                {name: column[i].total for name, column in zip(names, columns, strict=True)},
                per_segment=tuple(segments[i]) if per_segment and segments[i] else None,
                segment_parts={
                    name: values
                    for name, column in zip(names, columns, strict=True)
                    if (values := column[i].per_segment) is not None
                },
            )
            for i, total in enumerate(totals)
        ]


def _standardised_values(column: Sequence[Score]) -> list[list[float]]:
    """Per rollout the standardised values of one term: one per segment, or the total alone."""
    rows = [[s.total] if s.per_segment is None else list(s.per_segment) for s in column]
    defined = [x for row in rows for x in row if not math.isnan(x)]
    mean = sum(defined) / len(defined) if defined else 0.0
    deviation = math.sqrt(sum((x - mean) ** 2 for x in defined) / len(defined)) if defined else 0.0
    if deviation <= 1e-8 * max(abs(mean), 1.0):
        return [[0.0] * len(row) for row in rows]
    return [[0.0 if math.isnan(x) else (x - mean) / deviation for x in row] for row in rows]

"""Several rewards as one: a weighted sum that keeps its parts for people to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.rewards.check import check_scores
from audiorl.types import Reward, Rollout, Score


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
    summed likewise; a term without them places its value on the last segment or token, where an outcome belongs.

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

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        columns = [check_scores(t.name, t.reward(rollouts), rollouts) for t in self.terms]
        return [self._combine(row, rollout) for row, rollout in zip(zip(*columns, strict=True), rollouts, strict=True)]

    def _combine(self, scores: tuple[Score, ...], rollout: Rollout) -> Score:
        parts: dict[str, float] = {}
        for term, score in zip(self.terms, scores, strict=True):
            parts[term.name] = score.total
            parts.update({f"{term.name}/{part}": value for part, value in score.parts.items()})
        weights = [t.weight for t in self.terms]
        return Score(
            total=sum(w * s.total for w, s in zip(weights, scores, strict=True)),
            parts=parts,
            per_segment=_spread(weights, [(s.total, s.per_segment) for s in scores], len(rollout.segments)),
            per_token=_spread(weights, [(s.total, s.per_token) for s in scores], rollout.num_sampled),
        )


def _spread(
    weights: Sequence[float], values: Sequence[tuple[float, tuple[float, ...] | None]], length: int
) -> tuple[float, ...] | None:
    """Weighted sum of fine-grained values; None if no term has any."""
    if length == 0 or all(fine is None for _, fine in values):
        return None
    out = [0.0] * length
    for weight, (total, fine) in zip(weights, values, strict=True):
        for i, value in enumerate(fine if fine is not None else (*[0.0] * (length - 1), total)):
            out[i] += weight * value
    return tuple(out)


@dataclass(frozen=True)
class StandardisedSum:
    """total = Σ weight · standardised reward: each term has mean 0 and variance 1 over the batch, then they are summed.

        StandardisedSum.of(quality=Quality(), timing=(TimeCompliance(), 0.5))

    A term with values per segment is standardised over all segments of the batch, and its total is their sum; NaN marks
    a segment where it is not defined: such a segment takes no part in the statistics and gets 0. Other terms are
    standardised over the rollouts. A term that is constant over the batch contributes 0. `parts` and `segment_parts`
    hold the rewards as they were. Scores depend on their batch by design (Seed LiveInterpret 2.0, arXiv 2507.17527,
    section on fusion).
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        WeightedSum(self.terms)  # the same terms are refused

    @classmethod
    def of(cls, **rewards: Reward | tuple[Reward, float]) -> StandardisedSum:
        """Name each reward by keyword; give (reward, weight), or the reward alone for weight 1."""
        return cls(WeightedSum.of(**rewards).terms)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        columns = [check_scores(t.name, t.reward(rollouts), rollouts, undefined=True) for t in self.terms]
        fine = any(score.per_segment is not None for column in columns for score in column)
        segments = [[0.0] * len(r.segments) for r in rollouts]
        totals = [0.0] * len(rollouts)
        for term, column in zip(self.terms, columns, strict=True):
            for i, values in enumerate(_standardised_values(column)):
                totals[i] += term.weight * sum(values)
                if fine and segments[i]:  # a reward of the whole rollout belongs to its last segment
                    places = range(len(values)) if column[i].per_segment is not None else [len(segments[i]) - 1]
                    for place, value in zip(places, values, strict=True):
                        segments[i][place] += term.weight * value
        names = [t.name for t in self.terms]
        return [
            Score(
                total,
                {name: column[i].total for name, column in zip(names, columns, strict=True)},
                per_segment=tuple(segments[i]) if fine and segments[i] else None,
                segment_parts={
                    name: per_turn
                    for name, column in zip(names, columns, strict=True)
                    if (per_turn := column[i].per_segment) is not None
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

"""Several rewards as one, and the check of what a reward returns: one finite Score, or None, per rollout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

from audiorl.algos.advantages import all_equal
from audiorl.protocols import Reward
from audiorl.types import Rollout, Sample, Score


def check_options(owner: object, **allowed: tuple[Any, ...] | float) -> None:
    """Raise ValueError for a field of `owner` that is none of the values given, or less than the number given."""
    for name, wanted in allowed.items():
        value, where = getattr(owner, name), type(owner).__name__
        if isinstance(wanted, tuple):
            if value not in wanted:
                raise ValueError(f"{where}: {name} {value!r} is not one of {', '.join(map(repr, wanted))}")
        elif value is not None and not wanted <= value < math.inf:
            raise ValueError(f"{where}: {name} is {value}; it must be at least {wanted}")


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


def check_sample(reward: Reward, sample: Sample) -> None:
    """Raise ValueError for a sample that the reward cannot score, where it has a method `check` that says so."""
    check = getattr(reward, "check", None)
    if callable(check):
        check(sample)


def score_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Score | None]:
    """Return the reward's scores, checked. It gets copies of tokens, log-probs and metadata, which it may write to.

    They come in a tuple: scores belong to rollouts by their order, which sorting a list in place would change.
    """
    return check_scores("reward", reward(tuple(copied(r) for r in rollouts)), rollouts)


def scored_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that the reward scored, with their scores; those that it skipped are left out."""
    scores = score_rollouts(reward, rollouts)
    return [r.with_score(s) for r, s in zip(rollouts, scores, strict=True) if s is not None]


def copied(rollout: Rollout) -> Rollout:
    """Return the rollout with copies of tokens, log-probs, metadata and the parts of its score."""
    segments = []
    for segment in rollout.segments:
        values = {field.name: getattr(segment, field.name) for field in fields(segment)}
        copies: dict[str, Any] = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
        segments.append(replace(segment, **copies))
    sample = replace(rollout.sample, metadata=_containers(rollout.sample.metadata))
    score = rollout.score and replace(rollout.score, parts=dict(rollout.score.parts))
    return replace(rollout, sample=sample, segments=tuple(segments), score=score)


def _containers(value: Any) -> Any:
    """Return a copy of dictionaries and lists at any depth; clips and other values stay themselves."""
    if isinstance(value, dict):
        return {key: _containers(held) for key, held in value.items()}
    return type(value)(map(_containers, value)) if type(value) in (list, tuple, set) else value


def _check(where: str, score: Any, rollout: Rollout, undefined: bool) -> None:
    if not isinstance(score, Score):
        raise ValueError(f"{where}: returned {type(score).__name__}, expected Score or None")
    for name, value in {"total": score.total, **{f"part {name!r}": v for name, v in score.parts.items()}}.items():
        if not _is_finite(f"{where}: {name}", value):
            raise ValueError(f"{where}: {name} is {value}")
    for name, count in (("per_segment", len(rollout.segments)), ("per_token", rollout.num_sampled)):
        values = getattr(score, name)
        if values is None:
            continue
        if len(values) != count:
            raise ValueError(f"{where}: {name} has {len(values)} values, the rollout has {count}")
        may_be_nan = undefined and name == "per_segment"
        if not all(_is_finite(f"{where}: {name}", v) or (may_be_nan and math.isnan(v)) for v in values):
            raise ValueError(f"{where}: {name} holds a value that is not finite")
    if score.step_ends is not None and score.per_token is None:
        raise ValueError(f"{where}: step_ends without per_token; give both, or neither")
    if score.step_ends and not 0 <= min(score.step_ends) <= max(score.step_ends) < rollout.num_sampled:
        raise ValueError(f"{where}: step_ends {list(score.step_ends)}; the rollout has {rollout.num_sampled} tokens")


def _is_finite(what: str, value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # tensors of several values raise any of these
        raise ValueError(f"{what} is {value!r}, expected a number") from None


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
        columns = _columns(self.terms, rollouts)
        return [self._combine(row, r) for row, r in zip(_rows(columns), rollouts, strict=True)]

    def check(self, sample: Sample) -> None:
        for term in self.terms:
            check_sample(term.reward, sample)

    def _combine(self, scores: tuple[Score, ...] | None, rollout: Rollout) -> Score | None:
        if scores is None:
            return None
        weights = {t.name: t.weight for t in self.terms}
        parts: dict[str, float] = {}
        for name, score in zip(weights, scores, strict=True):
            parts |= {name: score.total} | {f"{name}/{part}": value for part, value in score.parts.items()}

        def summed(values: Sequence[tuple[float, ...] | None], length: int) -> tuple[float, ...] | None:
            """Sum the values per segment or token; a term without them has its total on the last one."""
            if length == 0 or all(items is None for items in values):
                return None
            out = [0.0] * length
            for weight, score, items in zip(weights.values(), scores, values, strict=True):
                for i, value in enumerate((*[0.0] * (length - 1), score.total) if items is None else items):
                    out[i] += weight * value
            return tuple(out)

        per_token = summed([s.per_token for s in scores], rollout.num_sampled)
        step_ends = None
        if per_token is not None and not any(s.per_token is not None and s.step_ends is None for s in scores):
            # A term with credit per token ends steps of its own; another one is placed on the last token. Terms that
            # end a step on the same token end the same one.
            last = (rollout.num_sampled - 1,)
            ends = [Counter(last if s.step_ends is None else s.step_ends) for s in scores]
            step_ends = tuple(sorted(reduce(or_, ends).elements()))
        return Score(
            sum(w * s.total for w, s in zip(weights.values(), scores, strict=True)),
            parts,
            per_segment=summed([s.per_segment for s in scores], len(rollout.segments)),
            per_token=per_token,
            weights=weights,
            step_ends=step_ends,
        )


def _columns(terms: Sequence[Term], rollouts: Sequence[Rollout], undefined: bool = False) -> list[list[Score | None]]:
    """Return the scores of each term. Raises ValueError for a term that changes what the next one sees.

    Terms share the rollouts, since what they decode and recognise is kept by rollout.
    """
    shared, columns = tuple(rollouts), []
    before = _contents(shared)
    for term in terms:
        columns.append(check_scores(term.name, term.reward(shared), shared, undefined))
        if _contents(shared) != before:
            raise ValueError(
                f"reward {term.name!r}: writes to the rollouts, which other rewards see too; change copies"
            )
    return columns


def _contents(rollouts: Sequence[Rollout]) -> list[Any]:
    """Return what a reward could change in place: metadata, parts of scores, and how often tensors were written to."""
    tensors = [[v for s in r.segments for v in vars(s).values() if isinstance(v, Tensor)] for r in rollouts]
    versions = [[0 if v.is_inference() else v._version for v in held] for held in tensors]
    return [versions, [(_containers(r.sample.metadata), r.score and dict(r.score.parts)) for r in rollouts]]


def _rows(columns: Sequence[Sequence[Score | None]]) -> list[tuple[Score, ...] | None]:
    """From one column of scores a term to one row a rollout; None for a rollout that a term skipped."""
    rows = zip(*columns, strict=True)
    return [None if None in row else tuple(s for s in row if s is not None) for row in rows]


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
        scores, gates = _columns((Term("reward", self.reward), Term("gate", self.gate)), rollouts)
        return [None if s is None or g is None else self._gated(s, g) for s, g in zip(scores, gates, strict=True)]

    def check(self, sample: Sample) -> None:
        check_sample(self.reward, sample)
        check_sample(self.gate, sample)

    def _gated(self, score: Score, gate: Score) -> Score:
        if gate.total >= self.at_least:
            return replace(score, parts={**score.parts, "open": 1.0}, weights={})  # no longer the sum of its terms
        credit = (score.per_segment, score.per_token)
        per_segment, per_token = (None if values is None else (0.0,) * len(values) for values in credit)
        parts = {**score.parts, "open": 0.0}
        return replace(score, total=0.0, parts=parts, weights={}, per_segment=per_segment, per_token=per_token)


@dataclass(frozen=True)
class StandardisedSum:
    """total = Σ weight · standardised reward: each term has mean 0 and variance 1 over the batch, then they are summed.

        StandardisedSum.of(quality=Quality(), timing=(TimeCompliance(), 0.5))

    A term with values per segment is standardised over all segments of the batch, and its total is their sum; NaN marks
    a segment where it is not defined, which gets 0 and takes no part in the statistics, nor does a rollout that one
    term skips (None). Other terms are standardised over the rollouts; a constant one contributes 0. `parts` and
    `segment_parts` hold the rewards as they were. Source: Seed LiveInterpret 2.0, arXiv 2507.17527.
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        WeightedSum(self.terms)  # checks the terms

    @classmethod
    def of(cls, **rewards: Reward | tuple[Reward, float]) -> StandardisedSum:
        """Name each reward by keyword; give (reward, weight), or the reward alone for weight 1."""
        return cls(WeightedSum.of(**rewards).terms)

    def check(self, sample: Sample) -> None:
        WeightedSum(self.terms).check(sample)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return self._standardised(_rows(_columns(self.terms, rollouts, undefined=True)), rollouts)

    def as_one_batch(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return rollouts of several batches with scores standardised over all of them; no term is asked again."""
        rows: list[tuple[Score, ...] | None] = []
        for score in (r.score for r in rollouts):
            assert score is not None
            parts = [(score.parts[t.name], score.segment_parts.get(t.name)) for t in self.terms]
            rows.append(tuple(Score(total, per_segment=values) for total, values in parts))
        scores = self._standardised(rows, rollouts)
        return [r.with_score(s) for r, s in zip(rollouts, scores, strict=True) if s is not None]

    def _standardised(
        self, rows: Sequence[tuple[Score, ...] | None], rollouts: Sequence[Rollout]
    ) -> list[Score | None]:
        """Return the scores of rollouts from those of the terms."""
        scored = [i for i, row in enumerate(rows) if row is not None]
        columns = list(zip(*(row for row in rows if row is not None), strict=True)) or [()] * len(self.terms)
        by_segment = any(score.per_segment is not None for column in columns for score in column)
        segments = [[0.0] * len(rollouts[i].segments) for i in scored]
        totals = [0.0] * len(scored)
        for term, column in zip(self.terms, columns, strict=True):
            for n, values in enumerate(_standardised_values(column)):
                totals[n] += term.weight * sum(values)
                if by_segment and segments[n]:  # a reward of the whole rollout belongs to its last segment
                    first = 0 if column[n].per_segment is not None else len(segments[n]) - 1
                    for place, value in enumerate(values, first):
                        segments[n][place] += term.weight * value
        scores: list[Score | None] = [None] * len(rollouts)
        for n, i in enumerate(scored):
            terms = {term.name: column[n] for term, column in zip(self.terms, columns, strict=True)}
            scores[i] = Score(
                totals[n],
                {name: score.total for name, score in terms.items()},
                per_segment=tuple(segments[n]) if by_segment and segments[n] else None,
                segment_parts={name: s.per_segment for name, s in terms.items() if s.per_segment is not None},
            )
        return scores


def _standardised_values(column: Sequence[Score]) -> list[list[float]]:
    """Return per rollout the standardised values of one term: one per segment, or the total alone."""
    rows = [[s.total] if s.per_segment is None else list(s.per_segment) for s in column]
    defined = [x for row in rows for x in row if not math.isnan(x)]
    if not defined or all_equal(defined):
        return [[0.0] * len(row) for row in rows]
    if max(map(abs, defined)) > 1e150:
        raise ValueError(f"StandardisedSum: a reward of {max(defined, key=abs):g} is too large; its square is infinite")
    mean = sum(defined) / len(defined)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in defined) / len(defined))
    return [[0.0 if math.isnan(x) else (x - mean) / deviation for x in row] for row in rows]

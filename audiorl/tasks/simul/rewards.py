"""The rewards of simultaneous interpretation (Seed LiveInterpret 2.0, arXiv 2507.17527).

After each chunk t of audio the policy writes y_t, possibly nothing; y*_t is the reference for that chunk. A value that
is not defined for a chunk is NaN; `StandardisedSum` leaves it out of its statistics and gives it 0. Formulas that the
paper describes in words only are marked as reconstructed, and are options where there is more than one reading. The
rewards of single turns give a value per segment; their total is its mean over the turns where it is defined::

    single_turn()                         detection + initiative + quality + format, standardised over the batch
    multi_turn()                          the same plus the latency penalty and the quality of the whole stream
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from audiorl.eval.metrics.latency import cut_text, tidy
from audiorl.eval.metrics.text import units
from audiorl.protocols import Reward
from audiorl.rewards.combine import StandardisedSum, Term, WeightedSum
from audiorl.rewards.text_quality import Repetition
from audiorl.tasks.simul.quality import Metric, Similarity, Translation, similarities, units_like_references
from audiorl.tasks.simul.streams import completed
from audiorl.types import Rollout, Score, Segment, Turn

Weights = Mapping[str, float]
"""Weights of the rewards of a sum, by name."""
Waits = Literal["silence", "available"]
"""What a translation waited, in segments: "silence" counts the silent turns right before it; "available" counts the
turns since the oldest reference that had not been answered could be said, 0 when there was none."""


class TurnReward:
    """A value after each turn."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            values = tuple(self.value(s, t) for s, t in zip(rollout.segments, _turns(rollout), strict=True))
            defined = [v for v in values if not math.isnan(v)]
            scores.append(Score(sum(defined) / len(defined) if defined else 0.0, per_segment=values))
        return scores

    def value(self, segment: Segment, turn: Turn) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Detection(TurnReward):
    """r^l: 1 for silence where the reference is empty, I(|y_t| = 0)·I(|y*_t| = 0)."""

    def value(self, segment: Segment, turn: Turn) -> float:
        return float(not segment.text.strip() and not turn.reference.strip())


@dataclass(frozen=True)
class Initiative(TurnReward):
    """r^s: 1 for output where there is a reference, I(|y_t| > 0)·I(|y*_t| > 0). Formula reconstructed."""

    def value(self, segment: Segment, turn: Turn) -> float:
        return float(bool(segment.text.strip()) and bool(turn.reference.strip()))


@dataclass(frozen=True)
class TurnQuality(TurnReward):
    """r^q: the similarity of y_t and y*_t by a `metric` or any function (written, reference); NaN where y*_t is empty.

    Silence where there is a reference has quality 0. The paper does not name the metric.
    """

    metric: Metric | Similarity = "chrf"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        pairs = [
            Translation(segment.text.strip(), turn.reference.strip(), turn.source, _language(r))
            for r in rollouts
            for segment, turn in zip(r.segments, _turns(r), strict=True)
            if segment.text.strip() and turn.reference.strip()
        ]
        return _AskedQuality(iter(similarities(self.metric, pairs)))(rollouts)  # once for the batch


@dataclass(frozen=True)
class _AskedQuality(TurnReward):
    """Qualities of the turns with output and reference, in their order."""

    values: Iterator[float]

    def value(self, segment: Segment, turn: Turn) -> float:
        if not turn.reference.strip():
            return math.nan
        return next(self.values) if segment.text.strip() else 0.0


@dataclass(frozen=True)
class TimeCompliance(TurnReward):
    """r^c: 1 - min(1, |d - d*| / d*) for speech of d seconds; NaN where the reference's duration d* is not known.

    Too long and too short cost the same. Shape reconstructed. d is the frames / `frame_rate`; text is as fast as its
    reference, character by character, without spaces.
    """

    frame_rate: float = 25.0

    def value(self, segment: Segment, turn: Turn) -> float:
        wanted = turn.reference_seconds or 0.0
        if not wanted > 0:
            return math.nan
        written, reference = (len("".join(text.split())) for text in (segment.text, turn.reference))
        seconds = wanted * written / max(reference, 1)
        if segment.codes is not None:
            seconds = spoken_frames(segment.codes) / self.frame_rate
        return 1.0 - min(1.0, abs(seconds - wanted) / max(wanted, 1e-3))


def spoken_frames(codes: Tensor) -> int:
    """Count frames in rows [N, Q], -1 where a row is no frame. The delay pattern adds Q + 1 rows to each run."""
    is_frame = (codes[:, 0] >= 0).int()
    runs = int((torch.diff(is_frame, prepend=is_frame.new_zeros(1)) == 1).sum())
    return max(int(is_frame.sum()) - runs * (codes.shape[1] + 1), 0)


@dataclass(frozen=True)
class FormatMatch(TurnReward):
    """r^f: 1 where the whole of y_t matches the regular expression; 0 for a turn cut off at its token limit.

    The default refuses tags; SPEAKER_MARK is none.
    """

    pattern: str = r"(?:[^<>]|(?<!>)>>(?!>))*"

    def value(self, segment: Segment, turn: Turn) -> float:
        return float(segment.stop_reason != "length" and re.fullmatch(self.pattern, segment.text) is not None)


@dataclass(frozen=True)
class LatencyPenalty:
    """r^L: -(1/K)·Σ max(0, d_k - l) over K translations that waited d_k segments, l = `longest` of them acceptable.

    0 when nothing was translated: r^Q, the quality of the whole output, punishes that. Formula reconstructed. `waits`:
    the paper's d_k are the silent turns before the k-th translation. It also punishes silence in which nothing could
    be said; "available" does not.
    """

    longest: float = 0.0
    waits: Waits = "silence"

    def __post_init__(self) -> None:
        if self.waits not in get_args(Waits):
            raise ValueError(f"LatencyPenalty: waits is {self.waits!r}, expected one of {', '.join(get_args(Waits))}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            waits = self.waited(rollout)
            late = sum(max(0.0, wait - self.longest) for wait in waits)
            scores.append(Score(-late / len(waits) if waits else 0.0))
        return scores

    def waited(self, rollout: Rollout) -> list[int]:
        """Return what each written segment waited; speaking answers all references that are open."""
        waits: list[int] = []
        begun: int | None = None  # the first silent turn, or the turn of the oldest open reference
        for t, (segment, turn) in enumerate(zip(rollout.segments, _turns(rollout), strict=True)):
            if begun is None and (self.waits == "silence" or turn.reference.strip()):
                begun = t
            if segment.text.strip():
                waits.append(0 if begun is None else t - begun)
                begun = None
        return waits


@dataclass(frozen=True)
class SequenceQuality:
    """r^Q: the quality of the whole output against the whole reference, sentence by sentence.

    The output is split at the references by the alignment with the fewest word errors, as in long-form evaluation, and
    the qualities are averaged with the references' lengths as weights.
    """

    metric: Metric | Similarity = "chrf"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for pieces in _qualities(rollouts, self.metric):
            total = sum(len(pair.reference) * quality for pair, quality, _ in pieces)
            scores.append(Score(total / sum(len(pair.reference) for pair, _, _ in pieces)))
        return scores


@dataclass(frozen=True)
class StreamLength:
    """Minus the share of the output that is too much or missing, in [-1, 0], with credit per segment.

    After each turn the excess is what was written beyond `high` times all references so far, over the length of all
    references; a segment gets the change of it, so that the sum is the excess at the end. The last segment also gets
    the shortage: what is missing to `low` times all references. Lengths are words, or characters where a script has no
    spaces. Credit by differences: Ng et al. 1999, potential-based shaping.
    """

    low: float = 0.9
    high: float = 1.15

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(f"StreamLength: need 0 <= low <= 1 <= high, got low={self.low}, high={self.high}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            of_turns = [len(units(turn.reference)) for turn in _turns(rollout)]
            total, written, potentials = sum(of_turns), 0, [0.0]
            for available, text in zip(accumulate(of_turns), _texts_so_far(rollout), strict=True):
                written = len(units(text))
                potentials.append(-min(1.0, max(0.0, written - self.high * available) / total))
            potentials[-1] -= max(0.0, self.low * total - written) / total
            changes = [after - before for before, after in pairwise(potentials)]
            scores.append(Score(sum(changes), per_segment=tuple(changes)))
        return scores


@dataclass(frozen=True)
class HingedPromptness:
    """How soon each reference is translated after it could be said, where its translation is good enough, in [0, 1].

    The output is split at the references as in `SequenceQuality`. A reference whose piece has a similarity of at least
    `threshold` earns max(0, 1 - wait / longest), the others nothing; the total is their mean. The wait of a piece is
    the mean over its words of the seconds from the end of the reference's turn to the end of the turn that completed
    the word, 0 for words that came before. Speed so never pays where quality is lost.

    Source: the hinged latency of HPO (arXiv 2604.21045, per sentence), there LAAL and MetricX.
    """

    threshold: float = 0.5
    longest: float = 10.0
    metric: Metric | Similarity = "chrf"

    def __post_init__(self) -> None:
        if not self.longest > 0:
            raise ValueError(f"HingedPromptness: longest is {self.longest}; give seconds above 0")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for pieces in _qualities(rollouts, self.metric):
            waits = [wait for pair, quality, wait in pieces if pair.written and quality >= self.threshold]
            scores.append(Score(sum(max(0.0, 1.0 - wait / self.longest) for wait in waits) / len(pieces)))
        return scores


def _qualities(
    rollouts: Sequence[Rollout], metric: Metric | Similarity
) -> list[list[tuple[Translation, float, float]]]:
    """Return the pieces of each rollout, their qualities, 0 of an empty one, and how many seconds each waited."""
    rows = [_pieces(r) for r in rollouts]
    values = iter(similarities(metric, [pair for row in rows for pair, _ in row if pair.written]))
    return [[(pair, next(values) if pair.written else 0.0, wait) for pair, wait in row] for row in rows]


def _pieces(rollout: Rollout) -> list[tuple[Translation, float]]:
    """Return the output split at the references, and how many seconds each piece waited."""
    turns, language = _turns(rollout), _language(rollout)
    wanted = [turn for turn in turns if turn.reference.strip()]
    ends = [turns[min(turn, len(turns) - 1)].end for turn in completed(rollout.segments, language)]
    pieces = units_like_references(rollout.text, [turn.reference.strip() for turn in wanted], language)
    rows, start = [], 0
    for piece, text, turn in zip(pieces, cut_text(rollout.text, pieces), wanted, strict=True):
        waits = [max(0.0, end - turn.end) for end in ends[start : start + len(piece)]]
        start += len(piece)
        pair = Translation(tidy(text, language), tidy(turn.reference, language), turn.source, language)
        rows.append((pair, sum(waits) / len(waits) if waits else 0.0))
    return rows


def hpo(metric: Metric | Similarity = "chrf", threshold: float = 0.5, longest: float = 10.0) -> WeightedSum:
    """Return HPO's reward (arXiv 2604.21045): the quality of the stream, sentence by sentence, and hinged promptness.

    HPO normalises both within the group of a prompt before it adds them: use `advantage="gdpo"` and several
    rollouts of a stream. The paper's β, the weight of promptness, is 0.5.
    """
    promptness = HingedPromptness(threshold, longest, metric)
    return WeightedSum.of(stream_quality=SequenceQuality(metric), promptness=(promptness, 0.5))


def single_turn(
    metric: Metric | Similarity = "chrf",
    time: bool | TimeCompliance = False,
    weights: Weights | None = None,
    guards: bool = False,
) -> StandardisedSum:
    """Return the rewards of stage 1.

    `time` adds time compliance, or the one given. `weights`: by name, 1 for the others. `guards` adds `StreamLength` as
    "length" and `Repetition` beyond the reference's as "repetition".
    """
    return _weighted(_single(metric, time, guards), weights)


def multi_turn(
    metric: Metric | Similarity = "chrf",
    time: bool | TimeCompliance = False,
    longest: float = 0.0,
    weights: Weights | None = None,
    waits: Waits = "silence",
    guards: bool = False,
    hinge: float | None = None,
) -> StandardisedSum:
    """Return the rewards of stage 2: those of single turns, the latency penalty, and the quality of the whole stream.

    `longest` and `waits` are those of `LatencyPenalty`, the other arguments those of `single_turn`. `hinge`: the
    similarity from which speed counts; then `HingedPromptness` stands in place of the penalty.
    """
    penalty = LatencyPenalty(longest, waits)
    latency: Reward = penalty if hinge is None else HingedPromptness(hinge, metric=metric)
    stream = {"latency": latency, "stream_quality": SequenceQuality(metric)}
    return _weighted(_single(metric, time, guards) | stream, weights)


def _single(metric: Metric | Similarity, time: bool | TimeCompliance, guards: bool) -> dict[str, Reward]:
    terms: dict[str, Reward] = {"detection": Detection(), "initiative": Initiative()}
    terms |= {"quality": TurnQuality(metric), "format": FormatMatch()}
    if time:
        terms["time"] = TimeCompliance() if time is True else time
    if guards:
        terms |= {"length": StreamLength(), "repetition": Repetition(beyond_reference=True)}
    return terms


def _weighted(terms: Mapping[str, Reward], weights: Weights | None) -> StandardisedSum:
    weights = weights or {}
    if unknown := sorted(weights.keys() - terms):
        raise ValueError(f"weights: no reward is called {unknown[0]!r}; there are {', '.join(terms)}")
    return StandardisedSum(tuple(Term(name, reward, weights.get(name, 1.0)) for name, reward in terms.items()))


def _texts_so_far(rollout: Rollout) -> Iterator[str]:
    """Yield, after each turn, everything that has been written."""
    return accumulate(s.text for s in rollout.segments)


def _language(rollout: Rollout) -> str:
    return str(rollout.sample.metadata.get("target_language", ""))


def _turns(rollout: Rollout) -> tuple[Turn, ...]:
    turns, count = rollout.sample.turns, len(rollout.segments)
    if len(turns) != count:
        raise ValueError(f"{rollout.name}: {count} segments for {len(turns)} turns; these rewards score streams")
    if not any(t.reference.strip() for t in turns):
        raise ValueError(f"{rollout.name}: the stream has no reference; a stream without one cannot be rewarded")
    return turns

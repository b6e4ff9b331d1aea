"""The rewards of simultaneous interpretation as functions of one chunk, or of a whole sequence (Seed LiveInterpret 2.0,
arXiv 2507.17527, section on reinforcement learning).

After each chunk t of audio the policy writes y_t, possibly nothing; y*_t is the reference for that chunk. A value that
is not defined for a chunk is NaN; `StandardisedSum` leaves it out of its statistics and gives it 0. Formulas that the
paper describes in words only are marked as reconstructed, and are options where there is more than one reading.

Each formula is a function and, for whole rollouts, a reward of the same name. The rewards of single turns give a value
per segment; their total is its mean over the turns where it is defined::

    single_turn()                         detection + initiative + quality + format, standardised over the batch
    multi_turn()                          the same plus the latency penalty and the quality of the whole stream
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from audiorl.metrics.latency import join_texts
from audiorl.rewards.combine import StandardisedSum, Term
from audiorl.rewards.similarity import Metric, Pair, Similarity, sentence_chrf, similarities, split_like_references
from audiorl.types import Reward, Rollout, Score, Segment, Turn

Weights = Mapping[str, float]
"""Weights of the rewards of a sum, by name."""
Waits = Literal["silence", "available"]
"""What a translation waited, in segments: "silence" counts the silent turns right before it; "available" counts the
turns since the oldest reference that had not been answered could be said, 0 when there was none."""


def detection(written: str, reference: str) -> float:
    """r^l: 1 for silence where the reference is empty, I(|y_t| = 0)·I(|y*_t| = 0)."""
    return float(not written.strip() and not reference.strip())


def initiative(written: str, reference: str) -> float:
    """r^s: 1 for output where there is a reference, I(|y_t| > 0)·I(|y*_t| > 0). Formula reconstructed."""
    return float(bool(written.strip()) and bool(reference.strip()))


def quality(written: str, reference: str, similarity: Similarity = sentence_chrf) -> float:
    """r^q: the similarity of y_t and y*_t, sentence chrF / 100 unless another is given; NaN where y*_t is empty.

    Silence where there is a reference has quality 0. The paper does not name the metric.
    """
    if not reference.strip():
        return math.nan
    return 0.0 if not written.strip() else similarity(written, reference)


def time_compliance(seconds: float, reference_seconds: float, eps: float = 1e-3) -> float:
    """r^c: 1 - min(1, |d - d*| / max(d*, eps)) for speech of d seconds against d*; NaN where there is no reference.

    Too long and too short cost the same. Shape reconstructed.
    """
    if not reference_seconds > 0:
        return math.nan
    return 1.0 - min(1.0, abs(seconds - reference_seconds) / max(reference_seconds, eps))


def format_match(written: str, pattern: str | re.Pattern[str]) -> float:
    """r^f: 1 where the whole of y_t matches the regular expression."""
    return float(re.fullmatch(pattern, written) is not None)


def latency_penalty(waits: Sequence[float], longest: float) -> float:
    """r^L: -(1/K)·Σ max(0, d_k - l) over K translations that waited d_k segments, l of them acceptable.

    0 when nothing was translated: r^Q, the quality of the whole output, punishes that. Formula reconstructed.
    """
    return -sum(max(0.0, wait - longest) for wait in waits) / len(waits) if waits else 0.0


# -- for whole rollouts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Detection:
    """`detection` after each turn."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [_per_turn(r, lambda s, t: detection(s.text, t.reference)) for r in rollouts]


@dataclass(frozen=True)
class Initiative:
    """`initiative` after each turn."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [_per_turn(r, lambda s, t: initiative(s.text, t.reference)) for r in rollouts]


@dataclass(frozen=True)
class Quality:
    """`quality` after each turn, by a `metric` of `audiorl.rewards.similarity` or any function (written, reference)."""

    metric: Metric | Similarity = "chrf"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        pairs = [
            Pair(segment.text.strip(), turn.reference.strip(), turn.source)
            for r in rollouts
            for segment, turn in zip(r.segments, _turns(r), strict=True)
            if segment.text.strip() and turn.reference.strip()
        ]
        values = iter(similarities(self.metric, pairs))
        return [_per_turn(r, lambda s, t: quality(s.text, t.reference, lambda *_: next(values))) for r in rollouts]


@dataclass(frozen=True)
class TimeCompliance:
    """`time_compliance` after each turn whose reference has a known duration.

    The duration of speech is its frames / `frame_rate` seconds, that of text its characters / `characters_per_second`.
    """

    frame_rate: float = 25.0
    characters_per_second: float = 15.0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [_per_turn(r, self._value) for r in rollouts]

    def _value(self, segment: Segment, turn: Turn) -> float:
        if segment.codes is None:
            seconds = len(segment.text) / self.characters_per_second
        else:
            seconds = spoken_frames(segment.codes) / self.frame_rate
        return time_compliance(seconds, turn.reference_seconds or 0.0)


def spoken_frames(codes: Tensor) -> int:
    """Frames in rows [N, Q], -1 where a row is no frame. The delay pattern adds Q + 1 rows to each run of frames."""
    is_frame = (codes[:, 0] >= 0).int()
    runs = int((torch.diff(is_frame, prepend=is_frame.new_zeros(1)) == 1).sum())
    return max(int(is_frame.sum()) - runs * (codes.shape[1] + 1), 0)


@dataclass(frozen=True)
class FormatMatch:
    """`format_match` after each turn.

    `stops`: a turn that was cut off at its token limit has format 0, whatever its text.
    """

    pattern: str = r"[^<>]*"
    stops: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [_per_turn(r, self._value) for r in rollouts]

    def _value(self, segment: Segment, turn: Turn) -> float:
        cut = self.stops and segment.stop_reason == "length"
        return 0.0 if cut else format_match(segment.text, self.pattern)


@dataclass(frozen=True)
class LatencyPenalty:
    """`latency_penalty` of the whole stream, with `longest` segments of acceptable wait.

    `waits`: the paper's d_k, the segments waited before the k-th translation, are the silent turns before it. It also
    punishes silence in which nothing could be said; "available" does not.
    """

    longest: float = 0.0
    waits: Waits = "silence"

    def __post_init__(self) -> None:
        if self.waits not in get_args(Waits):
            raise ValueError(f"LatencyPenalty: waits is {self.waits!r}, expected one of {', '.join(get_args(Waits))}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        count = waits_since_available if self.waits == "available" else waits_in_silence
        return [Score(latency_penalty(count(r), self.longest)) for r in rollouts]


@dataclass(frozen=True)
class SequenceQuality:
    """r^Q: the quality of the whole output against the whole reference.

    `aligned`: sentence by sentence. The output is split at the references by the alignment with the fewest word errors,
    as in long-form evaluation, and the qualities are averaged with the references' lengths as weights.
    """

    metric: Metric | Similarity = "chrf"
    aligned: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        rows = [self._pairs(r) for r in rollouts]
        values_of_pairs = iter(similarities(self.metric, [pair for pairs in rows for pair in pairs if pair.written]))
        scores = []
        for pairs in rows:
            weights = [len(pair.reference) for pair in pairs]
            values = [next(values_of_pairs) if pair.written else 0.0 for pair in pairs]
            scores.append(Score(sum(w * q for w, q in zip(weights, values, strict=True)) / sum(weights)))
        return scores

    def _pairs(self, rollout: Rollout) -> list[Pair]:
        turns = [t for t in _turns(rollout) if t.reference.strip()]
        language = str(rollout.sample.metadata.get("target_language", ""))
        references = [t.reference.strip() for t in turns]
        if not self.aligned:
            sources = " ".join(t.source for t in turns)
            return [Pair(rollout.text.strip(), join_texts(references, language), sources)]
        written = split_like_references(rollout.text, references, language)
        return [Pair(w, r, t.source) for w, r, t in zip(written, references, turns, strict=True)]


def single_turn(
    metric: Metric | Similarity = "chrf",
    time: bool | TimeCompliance = False,
    weights: Weights | None = None,
    pattern: str = FormatMatch.pattern,
) -> StandardisedSum:
    """The rewards of stage 1. `time` adds time compliance, or the one given. `weights`: by name, 1 for the others."""
    terms: dict[str, Reward] = {
        "detection": Detection(),
        "initiative": Initiative(),
        "quality": Quality(metric),
        "format": FormatMatch(pattern),
    }
    if time:
        terms["time"] = TimeCompliance() if time is True else time
    return _weighted(terms, weights)


def multi_turn(
    metric: Metric | Similarity = "chrf",
    time: bool | TimeCompliance = False,
    longest: float = 0.0,
    weights: Weights | None = None,
    pattern: str = FormatMatch.pattern,
    waits: Waits = "silence",
) -> StandardisedSum:
    """The rewards of stage 2: those of single turns, the latency penalty, and the quality of the whole stream.

    `longest` and `waits` are those of `LatencyPenalty`, the other arguments those of `single_turn`.
    """
    single = {t.name: t.reward for t in single_turn(metric, time, None, pattern).terms}
    stream: dict[str, Reward] = {"latency": LatencyPenalty(longest, waits), "stream_quality": SequenceQuality(metric)}
    return _weighted(single | stream, weights)


def _weighted(terms: Mapping[str, Reward], weights: Weights | None) -> StandardisedSum:
    unknown = sorted(set(weights or {}) - set(terms))
    if "whole" in unknown:
        raise ValueError("weights: 'whole' is now called 'stream_quality'")
    if unknown:
        raise ValueError(f"weights: no reward is called {unknown[0]!r}; there are {', '.join(terms)}")
    return StandardisedSum(tuple(Term(name, reward, (weights or {}).get(name, 1.0)) for name, reward in terms.items()))


def waits_since_available(rollout: Rollout) -> list[int]:
    """Per written segment, the turns since the oldest unanswered reference could be said; speaking answers all."""
    waits: list[int] = []
    oldest: int | None = None
    for t, (segment, turn) in enumerate(zip(rollout.segments, _turns(rollout), strict=True)):
        if turn.reference.strip() and oldest is None:
            oldest = t
        if segment.text.strip():
            waits.append(0 if oldest is None else t - oldest)
            oldest = None
    return waits


def waits_in_silence(rollout: Rollout) -> list[int]:
    """Per written segment, the silent turns right before it."""
    waits, silent = [], 0
    for segment, _ in zip(rollout.segments, _turns(rollout), strict=True):
        if segment.text.strip():
            waits.append(silent)
            silent = 0
        else:
            silent += 1
    return waits


def _per_turn(rollout: Rollout, value: Callable[[Segment, Turn], float]) -> Score:
    values = tuple(value(s, t) for s, t in zip(rollout.segments, _turns(rollout), strict=True))
    defined = [v for v in values if not math.isnan(v)]
    return Score(sum(defined) / len(defined) if defined else 0.0, per_segment=values)


def _turns(rollout: Rollout) -> tuple[Turn, ...]:
    turns = rollout.sample.turns
    if len(turns) != len(rollout.segments):
        raise ValueError(
            f"{rollout.name}: {len(rollout.segments)} segments for {len(turns)} turns; these rewards score streams"
        )
    if not any(t.reference.strip() for t in turns):
        raise ValueError(f"{rollout.name}: the stream has no reference; a stream without one cannot be rewarded")
    return turns

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from audiorl.eval.metrics.latency import join_texts, latency_unit, separator, text_units
from audiorl.eval.metrics.text import units
from audiorl.protocols import Reward
from audiorl.rewards.combine import StandardisedSum, Term, WeightedSum
from audiorl.rewards.text_quality import Repetition
from audiorl.tasks.simul.quality import (
    Metric,
    Similarity,
    Translation,
    sentence_chrf,
    similarities,
    split_like_references,
    units_like_references,
)
from audiorl.types import Rollout, Score, Segment, Turn

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
class TurnQuality:
    """`quality` after each turn, by a `metric`: one of `similarities` or any function (written, reference)."""

    metric: Metric | Similarity = "chrf"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        pairs = [
            Translation(segment.text.strip(), turn.reference.strip(), turn.source)
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

    def _pairs(self, rollout: Rollout) -> list[Translation]:
        turns = [t for t in _turns(rollout) if t.reference.strip()]
        language = str(rollout.sample.metadata.get("target_language", ""))
        references = [t.reference.strip() for t in turns]
        if not self.aligned:
            sources = " ".join(t.source for t in turns)
            return [Translation(rollout.text.strip(), join_texts(references, language), sources)]
        written = split_like_references(rollout.text, references, language)
        return [Translation(w, r, t.source) for w, r, t in zip(written, references, turns, strict=True)]


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
            potentials = self.potentials(rollout)
            changes = [after - before for before, after in zip([0.0, *potentials], potentials, strict=False)]
            scores.append(Score(sum(changes), per_segment=tuple(changes)))
        return scores

    def potentials(self, rollout: Rollout) -> list[float]:
        """Minus the excess after each turn; after the last one minus excess or shortage."""
        turns = _turns(rollout)
        of_turns = [len(units(turn.reference)) for turn in turns]
        total, available, values = sum(of_turns), 0, []
        for of_turn, text in zip(of_turns, texts_so_far(rollout), strict=True):
            available += of_turn
            written = len(units(text))
            values.append(-min(1.0, max(0.0, written - self.high * available) / total))
        values[-1] -= max(0.0, self.low * total - written) / total
        return values


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
        rows = [self._pieces(r) for r in rollouts]
        pairs = [
            Translation(written, reference, source) for row in rows for written, reference, source, _ in row if written
        ]
        values = iter(similarities(self.metric, pairs))
        return [Score(sum(self._value(w, values, wait) for w, _, _, wait in row) / len(row)) for row in rows]

    def _value(self, written: str, values: Iterator[float], wait: float) -> float:
        if not written or next(values) < self.threshold:
            return 0.0
        return max(0.0, 1.0 - wait / self.longest)

    def _pieces(self, rollout: Rollout) -> list[tuple[str, str, str, float]]:
        """(piece, reference, source, wait in seconds) of each reference."""
        turns, language = _turns(rollout), str(rollout.sample.metadata.get("target_language", ""))
        wanted = [turn for turn in turns if turn.reference.strip()]
        ends: list[float] = []  # of each word, the end of the turn that completed it
        for turn, text in zip(turns, texts_so_far(rollout), strict=True):
            ends += [turn.end] * (len(text_units(text, latency_unit(language))) - len(ends))
        rows, start = [], 0
        for piece, turn in zip(
            units_like_references(rollout.text, [t.reference.strip() for t in wanted], language), wanted, strict=True
        ):
            waits = [max(0.0, end - turn.end) for end in ends[start : start + len(piece)]]
            start += len(piece)
            wait = sum(waits) / len(waits) if waits else 0.0
            rows.append((separator(language).join(piece), turn.reference.strip(), turn.source, wait))
        return rows


def hpo(
    metric: Metric | Similarity = "chrf", threshold: float = 0.5, longest: float = 10.0, latency: float = 0.5
) -> WeightedSum:
    """HPO's reward (arXiv 2604.21045): the quality of the stream, sentence by sentence, and hinged promptness.

    HPO normalises both within the group of a prompt before it adds them: use `advantage="gdpo"` and several
    rollouts of a stream. `latency` is the paper's β.
    """
    return WeightedSum.of(
        stream_quality=SequenceQuality(metric), promptness=(HingedPromptness(threshold, longest, metric), latency)
    )


def single_turn(
    metric: Metric | Similarity = "chrf",
    time: bool | TimeCompliance = False,
    weights: Weights | None = None,
    pattern: str = FormatMatch.pattern,
    guards: bool = False,
) -> StandardisedSum:
    """Return the rewards of stage 1. `time` adds time compliance, or the one given. `weights`: by name, 1 for the
    others.

    `guards` adds `StreamLength` as "length" and `Repetition` beyond the reference's as "repetition".
    """
    terms: dict[str, Reward] = {
        "detection": Detection(),
        "initiative": Initiative(),
        "quality": TurnQuality(metric),
        "format": FormatMatch(pattern),
    }
    if time:
        terms["time"] = TimeCompliance() if time is True else time
    if guards:
        terms |= {"length": StreamLength(), "repetition": Repetition(beyond_reference=True)}
    return _weighted(terms, weights)


def multi_turn(
    metric: Metric | Similarity = "chrf",
    time: bool | TimeCompliance = False,
    longest: float = 0.0,
    weights: Weights | None = None,
    pattern: str = FormatMatch.pattern,
    waits: Waits = "silence",
    guards: bool = False,
    hinge: float | None = None,
) -> StandardisedSum:
    """Return the rewards of stage 2: those of single turns, the latency penalty, and the quality of the whole stream.

    `longest` and `waits` are those of `LatencyPenalty`, the other arguments those of `single_turn`. `hinge`: the
    similarity from which speed counts; then `HingedPromptness` stands in place of the penalty.
    """
    single = {t.name: t.reward for t in single_turn(metric, time, None, pattern, guards).terms}
    latency: Reward = LatencyPenalty(longest, waits)
    if hinge is not None:
        latency = HingedPromptness(hinge, metric=metric)
    stream: dict[str, Reward] = {"latency": latency, "stream_quality": SequenceQuality(metric)}
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


def texts_so_far(rollout: Rollout) -> Iterator[str]:
    """After each turn, everything that has been written."""
    return accumulate(s.text for s in rollout.segments)


def _turns(rollout: Rollout) -> tuple[Turn, ...]:
    turns = rollout.sample.turns
    if len(turns) != len(rollout.segments):
        raise ValueError(
            f"{rollout.name}: {len(rollout.segments)} segments for {len(turns)} turns; these rewards score streams"
        )
    if not any(t.reference.strip() for t in turns):
        raise ValueError(f"{rollout.name}: the stream has no reference; a stream without one cannot be rewarded")
    return turns

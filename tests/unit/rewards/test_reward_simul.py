"""The rewards of simultaneous interpretation, by hand, and fused over a batch of chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from audiorl.rewards import StandardisedSum
from audiorl.rewards.simul import (
    detection,
    format_match,
    initiative,
    latency_penalty,
    quality,
    sentence_chrf,
    time_compliance,
)
from audiorl.types import Rollout, Score


def test_silence_and_speech() -> None:
    """(written, reference): each of the four cases, and blanks count as silence."""
    assert [detection(y, r) for y, r in (("", ""), ("a", ""), ("", "a"), ("a", "a"), (" ", "\n"))] == [1, 0, 0, 0, 1]
    assert [initiative(y, r) for y, r in (("", ""), ("a", ""), ("", "a"), ("a", "a"), (" ", "a"))] == [0, 0, 0, 1, 0]


def test_quality_is_similarity_where_something_can_be_said() -> None:
    assert math.isnan(quality("anything", ""))
    assert quality(" ", "hola") == 0
    assert quality("la conferencia", "la conferencia") == pytest.approx(1)
    assert 0 < quality("la conferencia", "las conferencias") < 1
    assert quality("a", "b", similarity=lambda y, r: 0.25) == 0.25
    # chrF2 of "ab" and "ac": 1-grams 1 of 2, 2-grams 0 of 1, precision = recall = 1/4
    assert sentence_chrf("ab", "ac") == pytest.approx(0.25)


def test_time_compliance_by_hand() -> None:
    assert [time_compliance(d, 2.0) for d in (2.0, 1.0, 3.0, 0.0, 9.0)] == [1.0, 0.5, 0.5, 0.0, 0.0]
    assert math.isnan(time_compliance(1.0, 0.0))


def test_format_and_latency_by_hand() -> None:
    assert format_match("<t>x</t>", r"<t>.*</t>") == 1 and format_match("<t>x</t>!", r"<t>.*</t>") == 0
    assert latency_penalty((1, 2, 5), longest=2) == -1  # only the last waited 3 too long
    assert latency_penalty((), longest=2) == 0


@dataclass(frozen=True)
class ChunkQuality:
    """The rewards of two chunks by a table of (written, reference)."""

    kind: str

    def __call__(self, rollouts: list[Rollout]) -> list[Score]:
        f = {"detection": detection, "quality": lambda y, r: quality(y, r, lambda a, b: float(a == b))}[self.kind]
        out = []
        for r in rollouts:
            values = tuple(f(s.text, ref) for s, ref in zip(r.segments, r.sample.references, strict=True))
            out.append(Score(sum(v for v in values if not math.isnan(v)), per_segment=values))
        return out


def test_fused_chunk_by_chunk(make_rollout) -> None:
    """detection 1 0 | 0 0, mean 1/4, deviation √3/4; quality - 1 | - 0, mean 1/2, deviation 1/2."""
    rollouts = [make_rollout("", "a", references=("", "a")), make_rollout("b", "c", references=("", "d"))]
    reward = StandardisedSum.of(detection=ChunkQuality("detection"), quality=ChunkQuality("quality"))
    first, second = reward(rollouts)
    high, low = 0.75 / (3**0.5 / 4), -0.25 / (3**0.5 / 4)
    assert first.per_segment == pytest.approx((high, low + 1))
    assert second.per_segment == pytest.approx((low, low - 1))
    assert first.total == pytest.approx(high + low + 1)

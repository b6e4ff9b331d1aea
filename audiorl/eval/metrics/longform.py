"""Latency of long, unsegmented streams: StreamLAAL and LongYAAL.

The output of a stream is cut at the segments of its reference (`resegment`); the delays of each piece, minus the start
of its segment, are those of a short utterance. A piece may be early (negative delays) or late (delays beyond its
segment): cuts follow the text, not the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.eval.metrics.latency import Unit, laal, text_units, yaal
from audiorl.eval.metrics.resegment import chunks


@dataclass(frozen=True)
class ReferenceSegment:
    """A segment of a stream and its reference translation; `start` and `duration` in ms."""

    start: float
    duration: float
    reference: str

    @property
    def end(self) -> float:
        return self.start + self.duration


def stream_laal(
    delays: Sequence[float], cuts: Sequence[int], segments: Sequence[ReferenceSegment], unit: Unit
) -> list[float | None]:
    """LAAL of each segment with delays from its start, None where nothing was written for it.

    StreamLAAL is the mean of the values over all streams. `delays` ms from the start of the stream, one per unit;
    `cuts` from `mwer_cuts`. Source: Papi et al. 2024 (StreamAtt), section 4; version 2 as in simulstream 1.0.
    """
    return [
        laal([delay - segment.start for delay in piece], segment.duration, length) if piece else None
        for piece, segment, length in _pieces(delays, cuts, segments, unit)
    ]


def long_yaal(
    delays: Sequence[float], cuts: Sequence[int], segments: Sequence[ReferenceSegment], unit: Unit
) -> list[float | None]:
    """YAAL of each segment with delays from its start, up to the end of the recording.

    None where nothing was written for it before the recording ended, that is the end of its last segment. LongYAAL is
    the mean of the values over all streams. `cuts` from `soft_cuts`. Source: Polák et al. 2025, "Better Late Than
    Never"; OmniSTEval 0.1.10.
    """
    end = max(segment.end for segment in segments)
    return [
        yaal([delay - segment.start for delay in piece], segment.duration, length, end - segment.start)
        if piece
        else None
        for piece, segment, length in _pieces(delays, cuts, segments, unit)
    ]


def elapsed_per_write(delays: Sequence[float], elapsed: Sequence[float]) -> list[float]:
    """Elapsed times in which each write is late by its own computation only, ms, one per unit.

    SimulEval adds up all computing since the start of the stream, although the source is read on meanwhile: after an
    hour the elapsed times of a fast system are minutes late. Here unit i comes at D_{i-1} + E_i - E_{i-1}, no earlier
    than the unit before. Source: OmniSTEval 0.1.10, its --fix_simuleval_emission_ca.
    """
    times: list[float] = []
    for i, now in enumerate(elapsed):
        times.append(max(times[-1], delays[i - 1] + now - elapsed[i - 1]) if i else now)
    return times


def _pieces(
    delays: Sequence[float], cuts: Sequence[int], segments: Sequence[ReferenceSegment], unit: Unit
) -> list[tuple[Sequence[float], ReferenceSegment, int]]:
    if len(cuts) != len(segments) + 1 or cuts[-1] != len(delays):
        raise ValueError(f"{len(cuts)} cuts up to {cuts[-1]} do not fit {len(segments)} segments, {len(delays)} delays")
    return [
        (piece, segment, _length(segment.reference, unit))
        for piece, segment in zip(chunks(delays, cuts), segments, strict=True)
    ]


def _length(reference: str, unit: Unit) -> int:
    """Units between plain spaces, so a no-break space joins, as both sources count; an empty reference counts as 1."""
    pieces = reference.split(" ") if unit == "word" else text_units(reference, unit)
    return max(1, sum(bool(piece) for piece in pieces))

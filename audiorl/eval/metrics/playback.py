"""When chunks of speech output play: each starts when it is ready and the chunk before it has been played."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[float, float]
"""Start and duration of played speech, ms since the start of the source."""


def play(delays: Sequence[float], durations: Sequence[float]) -> list[Interval]:
    """The interval of each chunk of `durations[i]` ms that is ready at `delays[i]` ms.

    >>> play([1000, 2000, 2500], [1500, 200, 300])  # the second waits for the first, the third starts on the dot
    [(1000, 1500), (2500, 200), (2700, 300)]
    """
    if len(delays) != len(durations):
        raise ValueError(f"{len(delays)} delays but {len(durations)} durations")
    intervals: list[Interval] = []
    end = 0.0
    for delay, duration in zip(delays, durations, strict=True):
        start = max(end, delay)
        intervals.append((start, duration))
        end = start + duration
    return intervals


def ends(intervals: Sequence[Interval]) -> list[float]:
    """The end of each interval."""
    return [start + duration for start, duration in intervals]


def silences(intervals: Sequence[Interval]) -> list[float]:
    """The lengths of the pauses between intervals, ms; intervals that follow each other at once have none."""
    pauses = [start - end for end, (start, _) in zip(ends(intervals), intervals[1:], strict=False)]
    return [pause for pause in pauses if pause > 0]


def discontinuity_sum(intervals: Sequence[Interval]) -> float:
    """All pauses within the output together, ms. Source: SimulEval 1.1.4, DiscontinuitySum."""
    return sum(silences(intervals))


def discontinuity_ave(intervals: Sequence[Interval]) -> float:
    """The mean pause within the output, ms; 0 without pauses. Source: SimulEval 1.1.4, DiscontinuityAve."""
    pauses = silences(intervals)
    return sum(pauses) / len(pauses) if pauses else 0.0


def discontinuity_num(intervals: Sequence[Interval]) -> int:
    """How many pauses the output has. Source: SimulEval 1.1.4, DiscontinuityNum."""
    return len(silences(intervals))

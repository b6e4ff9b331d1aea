"""Average token delay: how long after its source token each target token ends (Kano et al. 2023, arXiv 2211.13173).

Tokens of speech are pieces of 300 ms. What was read between two writes is one chunk of source, cut into pieces of which
the last may be shorter; what was written after it is the chunk of target with the same number. Target token t belongs
to source token t, as long as

- a chunk of target has no more tokens than its source: tokens written beyond that are not held against later chunks,
  so t is lowered by max(0, y - x) for y target and x source tokens of all chunks before;
- the source token has been read: at most the last one of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from audiorl.eval.metrics.latency import check_delays

SPEECH_TOKEN = 300.0  # ms


def atd(
    delays: Sequence[float],
    *,
    elapsed: Sequence[float] | None = None,
    durations: Sequence[float] | None = None,
    source_token: float = SPEECH_TOKEN,
    target_token: float | None = None,
) -> float:
    """Average token delay in the unit of the delays; delays never fall.

    `durations` (ms per unit) mark speech output, whose tokens last `target_token` = 300 ms. Units of text take no time
    (`target_token` = 0) when the source is speech; when it is text, source and target tokens last 1 each. `elapsed`
    makes it computation-aware: the time spent on each unit is added to its end. As SimulEval 1.1.4.
    """
    check_delays(delays)
    if durations is not None and not (len(durations) == len(delays) and min(durations) > 0):
        raise ValueError("durations: one positive number of milliseconds per delay")
    spent = [0.0] * len(delays)
    if elapsed is not None:
        overhead = [e - d for e, d in zip(elapsed, delays, strict=True)]
        spent = [now - before for now, before in zip(overhead, [0.0, *overhead], strict=False)]
    if target_token is None:
        target_token = SPEECH_TOKEN if durations is not None else 0.0

    source_ends = [0.0]
    lags: list[float] = []
    ended = 0.0  # when the last target token ended
    before = 0.0  # what had been read at the last write
    for units in _chunks(delays):
        delay = delays[units[0]]
        allowance = max(0, len(lags) - (len(source_ends) - 1))
        source_ends += list(accumulate(_pieces(delay - before, source_token), initial=source_ends[-1]))[1:]
        before = delay
        if durations is None:
            tokens = [(target_token, spent[i]) for i in units]
        else:
            pieces = _pieces(sum(durations[i] for i in units), target_token)
            tokens = [(piece, sum(spent[i] for i in units) / len(pieces)) for piece in pieces]
        for length, computed in tokens:
            ended = max(delay, ended) + length + computed
            source = min(len(lags) + 1 - allowance, len(source_ends) - 1)
            lags.append(ended - source_ends[source])
    return sum(lags) / len(lags)


def _chunks(delays: Sequence[float]) -> list[list[int]]:
    """Indices of the units written at the same point of the source, in order."""
    chunks: list[list[int]] = []
    for i, delay in enumerate(delays):
        if i and delay == delays[i - 1]:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks


def _pieces(length: float, piece: float) -> list[float]:
    """`length` in whole pieces and a shorter rest."""
    count, rest = divmod(length, piece)
    return [piece] * int(count) + ([rest] if rest else [])

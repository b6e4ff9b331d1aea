"""Latency of long, unsegmented streams: cut the output at the segments of its reference, then StreamLAAL and LongYAAL.

Each latency metric of long streams is defined on one way to cut: StreamLAAL on `mwer_cuts`, LongYAAL on `soft_cuts`.
Both take units (words, or characters) and return K + 1 cuts c for K references: reference k gets the units
c[k] : c[k + 1], so c[0] = 0 and c[K] is the number of units.

    references  "a b" | "c d"      hypothesis  "a b x d"      cuts  0, 2, 4      errors  0 + 1

The delays of each piece, minus the start of its segment, are those of a short utterance. A piece may be early (negative
delays) or late (delays beyond its segment): cuts follow the text, not the clock.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from audiorl.eval.metrics.latency import Unit, laal, text_units, yaal


def chunks(units: Sequence, cuts: Sequence[int]) -> list[Sequence]:
    """Cut anything that has one entry per unit at `cuts`."""
    return [units[start:end] for start, end in pairwise(cuts)]


def mwer_cuts(references: Sequence[Sequence[str]], hypothesis: Sequence[str]) -> list[int]:
    """Return the cuts that minimise the summed edit distance of the pieces to the references; case does not count.

    Among equally good cuts, units without a counterpart go to the reference before them, and deletions and insertions
    are preferred to substitutions, as mweralign does. One row per reference unit: time N·M, memory K·M for N reference
    units, M hypothesis units and K references. Raises ValueError without references.
    Source: Matusov et al. 2005, "Evaluating Machine Translation Output with Automatic Sentence Segmentation".
    """
    if not references:
        raise ValueError("no references: cutting an output needs at least one reference segment")
    numbers: dict[str, int] = {}  # units as numbers, equal for units that differ only in case
    wanted = [[numbers.setdefault(unit.lower(), len(numbers)) for unit in reference] for reference in references]
    written = np.array([numbers.setdefault(unit.lower(), len(numbers)) for unit in hypothesis], dtype=np.int64)
    place = np.arange(len(hypothesis) + 1)
    # cost[j]: the least errors of everything so far against the first j units; begin[j]: where this reference began.
    cost, begin = place.copy(), np.zeros_like(place)
    begins = []
    for reference in wanted:
        for unit in reference:
            cost, begin = _row(cost, begin, written != unit, place)
        begins.append(begin)
        begin = place
    cuts = [len(hypothesis)]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return cuts[::-1]


def _row(cost: np.ndarray, begin: np.ndarray, differs: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the next row of the edit distance: [M+1] costs and beginnings after one more reference unit."""
    best, source = cost + 1, begin.copy()  # the reference unit has no counterpart
    substituted = cost[:-1] + differs
    better = substituted < best[1:]
    best[1:][better] = substituted[better]
    source[1:][better] = begin[:-1][better]
    # Units without a counterpart: one error each after the cheapest place to stop before them.
    new = np.minimum.accumulate(best - place) + place
    stops = best == new
    # At equal cost an insertion wins over a substitution, but not over a deletion.
    inserted = new[:-1] + 1 == new[1:]
    stops[1:] &= ~(better & inserted)
    return new, source[np.maximum.accumulate(np.where(stops, place, 0))]


def soft_cuts(references: Sequence[Sequence[str]], hypothesis: Sequence[str], unit: Unit = "word") -> list[int]:
    """Return the cuts of the alignment with the greatest similarity; gaps cost nothing.

    Words are compared as sets of letters (intersection over union), characters by equality, both after NFKC and in
    lower case; punctuation never aligns with anything else. A unit between two references that aligns with nothing
    goes to the more similar of the words around it, the earlier one if equal, and takes those after it along. Time and
    memory N·M. Raises ValueError where there are units but no reference unit.
    Source: Polák et al. 2025, "Better Late Than Never", section on SoftSegmenter; OmniSTEval 0.1.10 without its Moses
    tokenizer (its `--lang` unset).
    """
    words = [_plain(word) for reference in references for word in reference]
    owner = [k for k, reference in enumerate(references) for _ in reference]
    written = [_plain(word) for word in hypothesis]
    if not written:
        return [0] * (len(references) + 1)
    if not words:
        raise ValueError("references: there are none, or all are empty; there is nothing to align with")
    similarity = _similarities(words, written, unit)
    counts = np.bincount(_owners(_align(similarity), owner, similarity), minlength=len(references))
    return [0, *np.cumsum(counts).tolist()]


def _align(similarity: np.ndarray) -> list[tuple[int | None, int | None]]:
    """Return pairs (reference, hypothesis) of the best alignment of an [N, M] similarity, in order, None for a gap."""
    rows, columns = similarity.shape
    total = np.zeros(columns + 1)
    moves = np.zeros((rows, columns), dtype=np.int8)  # 0 pair, 1 skip the reference unit, 2 skip the hypothesis unit
    for i in range(rows):
        paired, skipped = total[:-1] + similarity[i], total[1:]
        row = np.concatenate([[0.0], np.maximum.accumulate(np.maximum(np.maximum(paired, skipped), 0.0))])
        moves[i] = np.where((paired >= skipped) & (paired >= row[:-1]), 0, np.where(skipped >= row[:-1], 1, 2))
        total = row
    pairs: list[tuple[int | None, int | None]] = []
    i, j = rows, columns
    while i or j:
        move = 2 if not i else 1 if not j else moves[i - 1, j - 1]
        pairs.append((i - 1 if move != 2 else None, j - 1 if move != 1 else None))
        i, j = i - (move != 2), j - (move != 1)
    return pairs[::-1]


def _owners(pairs: Sequence[tuple[int | None, int | None]], owner: Sequence[int], similarity: np.ndarray) -> list[int]:
    """Return the reference that each hypothesis unit belongs to; it never falls."""
    coming_of: list[int | None] = [i for i, _ in pairs]  # the next reference unit at or after each pair
    for place in reversed(range(len(pairs) - 1)):
        coming_of[place] = coming_of[place + 1] if coming_of[place] is None else coming_of[place]
    owners: list[int] = []
    last: int | None = None
    ahead = False  # the units up to the next reference unit already belong to it
    for (i, j), coming in zip(pairs, coming_of, strict=True):
        if i is not None:
            last, ahead = i, False
            chosen = i
        else:
            assert j is not None
            if not ahead and coming is not None:
                ahead = last is None or similarity[coming, j] > similarity[last, j]
            chosen = coming if ahead and coming is not None else last if last is not None else 0
        if j is not None:
            owners.append(owner[chosen])
    return owners


_PUNCTUATION = frozenset(".!?,;:-()。！？，；：—（）ー")


def _similarities(words: Sequence[str], written: Sequence[str], unit: Unit) -> np.ndarray:
    """Return [N, M], in [0, 1], or -inf where punctuation meets anything else."""
    marks, other = (np.array([word in _PUNCTUATION for word in side]) for side in (words, written))
    if unit == "char":
        similar = (np.array(words)[:, None] == np.array(written)).astype(np.float64)
    else:
        letters = {letter: k for k, letter in enumerate(sorted(set("".join(words) + "".join(written))))}
        sets, others = np.zeros((len(words), len(letters))), np.zeros((len(written), len(letters)))
        for array, side in ((sets, words), (others, written)):
            for row, word in zip(array, side, strict=True):
                row[[letters[letter] for letter in word]] = 1
        shared = sets @ others.T
        similar = shared / np.maximum(sets.sum(1)[:, None] + others.sum(1) - shared, 1)
    return np.where(marks[:, None] == other, similar, -np.inf)


def _plain(word: str) -> str:
    return unicodedata.normalize("NFKC", word).lower()


# -- latencies ---------------------------------------------------------------------------------------------------------


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
    """Return LAAL of each segment with delays from its start, None where nothing was written for it.

    StreamLAAL is the mean of the values over all streams. `delays` ms from the start of the stream, one per unit;
    `cuts` from `mwer_cuts`. Source: Papi et al. 2024 (StreamAtt), section 4; version 2 as in simulstream 1.0.
    """
    return [
        laal(piece, segment.duration, length) if piece else None
        for piece, segment, length in _pieces(delays, cuts, segments, unit)
    ]


def long_yaal(
    delays: Sequence[float], cuts: Sequence[int], segments: Sequence[ReferenceSegment], unit: Unit
) -> list[float | None]:
    """Return YAAL of each segment with delays from its start, up to the end of the recording.

    None where nothing was written for it before the recording ended, that is the end of its last segment. LongYAAL is
    the mean of the values over all streams. `cuts` from `soft_cuts`. Source: Polák et al. 2025, "Better Late Than
    Never"; OmniSTEval 0.1.10.
    """
    end = max(segment.end for segment in segments)
    return [
        yaal(piece, segment.duration, length, end - segment.start) if piece else None
        for piece, segment, length in _pieces(delays, cuts, segments, unit)
    ]


def elapsed_per_write(delays: Sequence[float], elapsed: Sequence[float]) -> list[float]:
    """Return elapsed times in which each write is late by its own computation only, ms, one per unit.

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
) -> list[tuple[list[float], ReferenceSegment, int]]:
    """Return (delays from the segment's start, the segment, units of its reference) of each segment.

    Units lie between plain spaces, so a no-break space joins, as both sources count; an empty reference counts as 1.
    """
    if len(cuts) != len(segments) + 1 or cuts[-1] != len(delays):
        raise ValueError(f"{len(cuts)} cuts up to {cuts[-1]} do not fit {len(segments)} segments, {len(delays)} delays")
    pieces = []
    for piece, segment in zip(chunks(delays, cuts), segments, strict=True):
        words = segment.reference.split(" ") if unit == "word" else text_units(segment.reference, unit)
        pieces.append(([delay - segment.start for delay in piece], segment, max(1, sum(map(bool, words)))))
    return pieces

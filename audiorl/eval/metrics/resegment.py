"""Cut the unsegmented output of a long stream at the segments of its reference.

Quality and latency are defined on sentences, but a system that translates a whole talk writes one long text. Two ways
to cut it are in use, and each latency metric of long streams is defined on one of them:

- `mwer_cuts`: the cuts with the least word errors against the references (Matusov et al. 2005, mwerSegmenter), for
  StreamLAAL;
- `soft_cuts`: an alignment that rewards similar words (Polák et al. 2025, SoftSegmenter), for LongYAAL.

Both take units (words, or characters) and return K + 1 cuts c for K references: reference k gets the units
c[k] : c[k + 1], so c[0] = 0 and c[K] is the number of units. Nothing is lost, nothing moves.

    references  "a b" | "c d"      hypothesis  a b x d      cuts  0, 2, 4      errors  0 + 1
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from audiorl.eval.metrics.latency import Unit


def chunks(units: Sequence, cuts: Sequence[int]) -> list[Sequence]:
    """The pieces of anything that has one entry per unit, between one cut and the next."""
    return [units[start:end] for start, end in pairwise(cuts)]


def mwer_cuts(references: Sequence[Sequence[str]], hypothesis: Sequence[str]) -> list[int]:
    """The cuts that minimise the summed edit distance of the pieces to the references; case does not count.

    Among equally good cuts, units without a counterpart go to the reference before them, and deletions and insertions
    are preferred to substitutions, as mweralign does. One row per reference unit: time N·M, memory K·M for N reference
    units, M hypothesis units and K references. Raises ValueError without references.
    Source: Matusov et al. 2005, "Evaluating Machine Translation Output with Automatic Sentence Segmentation".
    """
    _need(references)
    wanted, written = _ids(references, hypothesis)
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
    """The next row of the edit distance: [M+1] costs and beginnings after one more reference unit."""
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
    """The cuts of the alignment with the greatest similarity; gaps cost nothing.

    Words are compared as sets of letters (intersection over union), characters by equality, both after NFKC and in
    lower case; punctuation never aligns with anything else. A unit between two references that aligns with nothing
    goes to the more similar of the words around it, the earlier one if equal, and takes those after it along. Time and
    memory N·M. Raises ValueError without references, and where there are units but no reference unit.
    Source: Polák et al. 2025, "Better Late Than Never", section on SoftSegmenter; OmniSTEval 0.1.10 without its Moses
    tokenizer (its `--lang` unset).
    """
    _need(references)
    words = [_plain(word) for reference in references for word in reference]
    owner = [k for k, reference in enumerate(references) for _ in reference]
    written = [_plain(word) for word in hypothesis]
    if not written:
        return [0] * (len(references) + 1)
    if not words:
        raise ValueError("references: all are empty, there is nothing to align with")
    similarity = _similarities(words, written, unit)
    counts = np.bincount(_owners(_align(similarity), owner, similarity), minlength=len(references))
    return [0, *np.cumsum(counts).tolist()]


def _align(similarity: np.ndarray) -> list[tuple[int | None, int | None]]:
    """Pairs (reference, hypothesis) of the best alignment of an [N, M] similarity, in order, None for a gap."""
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
    """The reference that each hypothesis unit belongs to; never falls."""
    following: list[int | None] = []  # the next reference unit at or after each pair
    after: int | None = None
    for i, _ in reversed(pairs):
        after = i if i is not None else after
        following.append(after)
    following.reverse()

    owners: list[int] = []
    last: int | None = None
    ahead = False  # the units up to the next reference unit already belong to it
    for (i, j), coming in zip(pairs, following, strict=True):
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
    """[N, M], in [0, 1], or -inf where punctuation meets anything else."""
    marks, other = (np.array([word in _PUNCTUATION for word in side]) for side in (words, written))
    if unit == "char":
        similar = (np.array(words)[:, None] == np.array(written)).astype(np.float64)
    else:
        letters = {letter: k for k, letter in enumerate(sorted(set("".join(words) + "".join(written))))}
        sets, others = _letter_sets(words, letters), _letter_sets(written, letters)
        shared = sets @ others.T
        similar = shared / np.maximum(sets.sum(1)[:, None] + others.sum(1) - shared, 1)
    return np.where(marks[:, None] == other, similar, -np.inf)


def _letter_sets(words: Sequence[str], letters: Mapping[str, int]) -> np.ndarray:
    """[N, letters], 1 where the word has the letter."""
    sets = np.zeros((len(words), len(letters)))
    for row, word in zip(sets, words, strict=True):
        row[[letters[letter] for letter in word]] = 1
    return sets


def _plain(word: str) -> str:
    return unicodedata.normalize("NFKC", word).lower()


def _ids(references: Sequence[Sequence[str]], hypothesis: Sequence[str]) -> tuple[list[list[int]], np.ndarray]:
    """Units as numbers, equal for units that differ only in case."""
    numbers: dict[str, int] = {}
    wanted = [[numbers.setdefault(unit.lower(), len(numbers)) for unit in reference] for reference in references]
    written = [numbers.setdefault(unit.lower(), len(numbers)) for unit in hypothesis]
    return wanted, np.array(written, dtype=np.int64)


def _need(references: Sequence[Sequence[str]]) -> None:
    if not references:
        raise ValueError("no references: cutting an output needs at least one reference segment")

"""CIDEr-D: how much a caption agrees with what several people wrote (Vedantam, Zitnick, Parikh, CVPR 2015).

N-grams of one to four words are weighed by how rare they are in a corpus of references, so that "a dog barks" is not
worth more than "a sound is heard" for the words that every caption has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ORDERS = 4
"""The longest n-gram, in words."""
SIGMA = 6.0
"""Words by which a caption's length may differ from the reference's, as a standard deviation."""

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class DocumentFrequencies:
    """In how many clips' references an n-gram occurs."""

    counts: Mapping[Ngram, int]
    clips: int

    @classmethod
    def of(cls, references: Sequence[Sequence[str]]) -> DocumentFrequencies:
        """Counted on the references of each clip, words separated by spaces.

        Raises ValueError for less than two clips, where no word is rarer than another.
        """
        if len(references) < 2:
            raise ValueError(f"CIDEr-D: the references of {len(references)} clips do not say which words are rare")
        counts: Counter[Ngram] = Counter()
        for texts in references:
            counts.update({ngram for text in texts for ngram in _ngrams(text)})
        return cls(dict(counts), len(references))

    def weight(self, ngram: Ngram) -> float:
        """Inverse document frequency, in nats."""
        return math.log(self.clips) - math.log(max(1, self.counts.get(ngram, 0)))


def cider_d(caption: str, references: Sequence[str], frequencies: DocumentFrequencies) -> float:
    """CIDEr-D in [0, 10], the mean over the references. Texts are normalised, words separated by spaces.

    Eq. 2 to 4 of the paper with the clipping and the Gaussian of section 5.2, as in its released code: lengths are
    counted in pairs of words.
    """
    written = _vectors(caption, frequencies)
    total = 0.0
    for reference in references:
        target = _vectors(reference, frequencies)
        difference = max(len(caption.split()) - 1, 0) - max(len(reference.split()) - 1, 0)
        total += math.exp(-(difference**2) / (2 * SIGMA**2)) * sum(map(_clipped_cosine, written, target)) / ORDERS
    return 10 * total / len(references)


def _ngrams(text: str) -> Counter[Ngram]:
    words = text.split()
    return Counter(
        tuple(words[start : start + order]) for order in range(1, ORDERS + 1) for start in range(len(words) - order + 1)
    )


def _vectors(text: str, frequencies: DocumentFrequencies) -> list[dict[Ngram, float]]:
    """TF-IDF of the n-grams, by order."""
    vectors: list[dict[Ngram, float]] = [{} for _ in range(ORDERS)]
    for ngram, count in _ngrams(text).items():
        vectors[len(ngram) - 1][ngram] = count * frequencies.weight(ngram)
    return vectors


def _clipped_cosine(written: Mapping[Ngram, float], target: Mapping[Ngram, float]) -> float:
    """The cosine of two vectors, where an n-gram counts at most as often as in the target; 0 for an empty vector."""
    lengths = math.sqrt(sum(v * v for v in written.values()) * sum(v * v for v in target.values()))
    product = sum(min(value, target[ngram]) * target[ngram] for ngram, value in written.items() if ngram in target)
    return product / lengths if lengths else 0.0

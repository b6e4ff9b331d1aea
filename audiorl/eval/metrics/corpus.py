"""Corpus metrics with how sure they are: means, error rates, BLEU, chrF, TER, words a minute, and CIDEr-D of captions.

Each utterance has a row of counts, and a score is a function of their sum, so one bootstrap gives the interval of each
metric, over utterances or over speakers, and of the difference of two systems on the same utterances.

Shapes: N utterances, K counts, R resamples, C clusters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.errors import install
from audiorl.eval.metrics.text import normalize, units

UNSEEN = "unseen"
"""The set of speakers that no phase trains on, in names of evaluations."""


def wilson(p: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95% score interval of a proportion (Wilson 1927)."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: Sequence[float], resamples: int = 2000, *, share: bool = False) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval (low, high) of the mean of `values`, with a fixed seed.

    How often each distinct value occurs in a resample is multinomial, and is drawn so: the same bootstrap at a fraction
    of the cost where values repeat, as those of right and wrong answers do. Equal values give an interval of width 0:
    it cannot know more. Of a `share`, the mean of values in [0, 1], that would be certainty: where all are 0, or all 1,
    the interval is Wilson's. Raises ValueError without values. Source: Efron and Tibshirani 1993, chapter 13.
    """
    if not len(values):
        raise ValueError("an interval needs at least one value")
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    n = int(counts.sum())
    if share and len(distinct) == 1 and distinct[0] in (0, 1):
        return wilson(float(distinct[0]), n)
    means = np.random.default_rng(0).multinomial(n, counts / n, size=resamples) @ distinct / n
    tail = (1 - 0.95) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


Score = Callable[[NDArray[Any]], float]
"""The metric of summed counts [K]."""


@dataclass(frozen=True)
class Estimate:
    """A score of a corpus with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def estimate(
    counts_NK: NDArray[Any],
    score: Score,
    *,
    baseline_NK: NDArray[Any] | None = None,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 1000,
) -> Estimate:
    """Score counts, or the difference from a baseline on the same resampled utterances, with the percentile interval.

    clusters: the speaker of each utterance; then whole speakers are drawn, and the interval says how far the score
    would move with other speakers. It needs several of them: from three speakers it is rough. Raises ValueError
    without utterances. Sources: Efron and Tibshirani 1993, chapter 13; for differences Koehn 2004 (paired bootstrap).
    """
    columns = [np.asarray(counts_NK, np.float64)]
    if baseline_NK is not None:
        columns.append(np.asarray(baseline_NK, np.float64))
    if not len(columns[0]) or any(len(column) != len(columns[0]) for column in columns):
        raise ValueError(f"an interval needs counts of the same utterances, got {[len(column) for column in columns]}")
    if clusters is not None:
        number = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
        cluster_N = [number[cluster] for cluster in clusters]
        utterances, columns = columns, [np.zeros((len(number), column.shape[1])) for column in columns]
        for sums_CK, column_NK in zip(columns, utterances, strict=True):
            np.add.at(sums_CK, cluster_N, column_NK)
    size = len(columns[0])
    weights_RN = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), size=resamples)
    weights_RN = np.concatenate([np.ones((1, size), weights_RN.dtype), weights_RN])  # first the corpus as it is
    scores = [np.array([score(sums_K) for sums_K in weights_RN @ column]) for column in columns]
    values = scores[0] - scores[1] if baseline_NK is not None else scores[0]
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def ratio(sums_K: NDArray[Any]) -> float:
    """Return the first count over the second; where that is 0, 0 for no errors and 1 for any, as `ErrorCounts.rate`."""
    return float(sums_K[0] / sums_K[1]) if sums_K[1] else float(sums_K[0] > 0)


def repeated(text: str) -> tuple[int, int]:
    """Count (3-grams that occurred before in the text, all 3-grams), in the units of `Repetition`."""
    tokens = units(text.casefold())
    ngrams = [tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


TRANSLATION = ("bleu", "chrf", "chrf++", "ter", "word_f1", "length_ratio", "repetition")
"""What `translation_counts` counts. TER, the ratio of lengths and repetition are not better when higher."""


def translation_counts(
    hypotheses: Sequence[str], references: Sequence[str], metric: str, tokenizer: str = "13a"
) -> tuple[NDArray[Any], Score]:
    """Return counts [N, K] of a metric of `TRANSLATION`, and their score.

    bleu (with `tokenizer`), chrf, chrf++ and ter are sacreBLEU's, in percent; sentence_bleu is BLEU of a text that may
    have less than four words. word_f1, in percent: words that occur in
    both texts, as often as they do (characters where a script has no spaces). length_ratio: words written over words
    of the reference. repetition: the share of written three-word sequences that were written before.
    """
    pairs = list(zip(hypotheses, references, strict=True))
    if metric == "word_f1":
        return np.array([_overlap(*pair) for pair in pairs], np.float64), _f1
    if metric == "length_ratio":
        return np.array([[len(units(text)) for text in pair] for pair in pairs], np.float64), ratio
    if metric == "repetition":
        return np.array([repeated(hypothesis) for hypothesis in hypotheses], np.float64), ratio
    measure = _sacrebleu(metric, tokenizer)
    # The methods that sacrebleu.significance builds on; its corpus_score gives the same number without the counts.
    counts = np.array(measure._extract_corpus_statistics(list(hypotheses), [list(references)]), np.float64)
    return counts, lambda sums_K: float(measure._compute_score_from_stats([int(x) for x in sums_K]).score)


def _sacrebleu(metric: str, tokenizer: str) -> Any:
    try:
        from sacrebleu.metrics import BLEU, CHRF, TER
    except ImportError as error:
        raise ImportError(f"BLEU, chrF and TER need sacrebleu: {install('metrics')}") from error
    unspaced = tokenizer in ("zh", "char")
    measures: dict[str, Callable[[], Any]] = {
        "bleu": lambda: BLEU(tokenize=tokenizer),
        "sentence_bleu": lambda: BLEU(tokenize=tokenizer, effective_order=True),
        "chrf": CHRF,
        "chrf++": lambda: CHRF(word_order=2),
        "ter": lambda: TER(normalized=unspaced, asian_support=unspaced),
    }
    if metric not in measures:
        raise ValueError(f"no metric of translations is called {metric!r}; there are {', '.join(TRANSLATION)}")
    return measures[metric]()


def _overlap(hypothesis: str, reference: str) -> tuple[int, int, int]:
    """Count words in both, words written, words of the reference."""
    written, wanted = (Counter(units(normalize(text, "basic"))) for text in (hypothesis, reference))
    return (written & wanted).total(), written.total(), wanted.total()


def _f1(sums_K: NDArray[Any]) -> float:
    both, written, wanted = sums_K
    return float(200 * both / (written + wanted)) if written + wanted else 100.0


# -- captions ----------------------------------------------------------------------------------------------------------


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
        """Count n-grams in the references of each clip, words separated by spaces.

        Raises ValueError for less than two clips, where no word is rarer than another.
        """
        if len(references) < 2:
            raise ValueError(f"CIDEr-D: the references of {len(references)} clips do not say which words are rare")
        counts: Counter[Ngram] = Counter()
        for texts in references:
            counts.update({ngram for text in texts for ngram in _ngrams(text)})
        return cls(dict(counts), len(references))

    def weight(self, ngram: Ngram) -> float:
        """Return the inverse document frequency, in nats."""
        return math.log(self.clips) - math.log(max(1, self.counts.get(ngram, 0)))


def cider_d(caption: str, references: Sequence[str], frequencies: DocumentFrequencies) -> float:
    """Return CIDEr-D in [0, 10], the mean over references. Texts are normalised, words separated by spaces.

    N-grams of one to four words are weighed by how rare they are in a corpus of references: "a dog barks" is worth more
    than "a sound is heard". Source: Vedantam, Zitnick, Parikh, CVPR 2015, eq. 2 to 4 with the clipping and the Gaussian
    of section 5.2, as in its released code: lengths are counted in pairs of words.
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
    lengths = range(1, ORDERS + 1)
    return Counter(tuple(words[i : i + order]) for order in lengths for i in range(len(words) - order + 1))


def _vectors(text: str, frequencies: DocumentFrequencies) -> list[dict[Ngram, float]]:
    """Return TF-IDF of the n-grams, by order."""
    vectors: list[dict[Ngram, float]] = [{} for _ in range(ORDERS)]
    for ngram, count in _ngrams(text).items():
        vectors[len(ngram) - 1][ngram] = count * frequencies.weight(ngram)
    return vectors


def _clipped_cosine(written: Mapping[Ngram, float], target: Mapping[Ngram, float]) -> float:
    """Return the cosine of two vectors; an n-gram counts at most as often as in the target. 0 for an empty vector."""
    lengths = math.sqrt(sum(v * v for v in written.values()) * sum(v * v for v in target.values()))
    product = sum(min(value, target[ngram]) * target[ngram] for ngram, value in written.items() if ngram in target)
    return product / lengths if lengths else 0.0

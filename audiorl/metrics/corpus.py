"""Corpus metrics as sums: each utterance has a row of counts, and a score is a function of their sum.

Error rates, BLEU, chrF and words a minute are all of this kind, so one bootstrap gives the interval of each, over
utterances or over speakers, and of the difference of two systems on the same utterances.

Shapes: N utterances, K counts, R resamples, C clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.metrics.scripts import units

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
    seed: int = 0,
) -> Estimate:
    """score(counts), or score(counts) - score(baseline) on the same resampled utterances, with the percentile interval.

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
        member_CN = np.zeros((len(number), len(columns[0])))
        member_CN[[number[cluster] for cluster in clusters], np.arange(len(columns[0]))] = 1
        columns = [member_CN @ column for column in columns]
    size = len(columns[0])
    weights_RN = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=resamples)
    weights_RN = np.concatenate([np.ones((1, size), weights_RN.dtype), weights_RN])  # first the corpus as it is
    scores = [np.array([score(sums_K) for sums_K in weights_RN @ column]) for column in columns]
    values = scores[0] - scores[1] if baseline_NK is not None else scores[0]
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def ratio(sums_K: NDArray[Any]) -> float:
    """The first count over the second; where that is 0, 0 for no errors and 1 for any, as `ErrorCounts.rate`."""
    return float(sums_K[0] / sums_K[1]) if sums_K[1] else float(sums_K[0] > 0)


def repeated(text: str, n: int = 3) -> tuple[int, int]:
    """(n-grams that occurred before in the text, all n-grams), in the units of `Repetition`."""
    tokens = units(text.casefold())
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def translation_counts(
    hypotheses: Sequence[str], references: Sequence[str], metric: str, tokenizer: str = "13a"
) -> tuple[NDArray[Any], Score]:
    """Counts [N, K] of "bleu" or "chrf", and their score in [0, 100]; computed by sacreBLEU, BLEU with `tokenizer`."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'audiorl[metrics]'") from error
    measure = BLEU(tokenize=tokenizer) if metric == "bleu" else CHRF()
    # The methods that sacrebleu.significance builds on; its corpus_score gives the same number without the counts.
    counts = np.array(measure._extract_corpus_statistics(list(hypotheses), [list(references)]), np.float64)
    return counts, lambda sums_K: float(measure._compute_score_from_stats([int(x) for x in sums_K]).score)

"""How sure a mean is: the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval (low, high) of the mean of `values`.

    How often each distinct value occurs in a resample is multinomial, and is drawn so: the same bootstrap at a fraction
    of the cost where values repeat, as those of right and wrong answers do. Equal values give an interval of width 0:
    it cannot know more. Raises ValueError without values. Source: Efron and Tibshirani 1993, chapter 13.
    """
    if not len(values):
        raise ValueError("an interval needs at least one value")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    n = int(counts.sum())
    means = np.random.default_rng(seed).multinomial(n, counts / n, size=resamples) @ distinct / n
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)

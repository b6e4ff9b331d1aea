"""Divergences between two distributions over the same few outcomes, such as the choices of a question.

Shapes: C outcomes. All values are in nats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def log_distribution(scores_C: Floats) -> Floats:
    """Log-probs [C] that add up to 1: scores - log Σ exp(scores)."""
    return scores_C - np.logaddexp.reduce(scores_C)


def kl_divergence(p_C: Floats, q_C: Floats) -> float:
    """KL(p ‖ q) = Σ p (log p - log q) of log-probs p and q; 0 where they are equal, not symmetric, without bound."""
    return float(np.sum(np.exp(p_C) * (p_C - q_C)))


def jensen_shannon(p_C: Floats, q_C: Floats) -> float:
    """½ KL(p ‖ m) + ½ KL(q ‖ m) with m = ½ (p + q), of log-probs p and q: symmetric, between 0 and log 2 = 0.693.

    Source: Lin 1991, Divergence measures based on the Shannon entropy, eq. 4.1.
    """
    middle_C = np.logaddexp(p_C, q_C) - np.log(2)
    return (kl_divergence(p_C, middle_C) + kl_divergence(q_C, middle_C)) / 2

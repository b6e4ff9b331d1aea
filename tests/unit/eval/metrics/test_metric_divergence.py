from __future__ import annotations

import math

import numpy as np
import pytest

from audiorl.eval.metrics.choice import jensen_shannon, kl_divergence, log_distribution

P, Q = np.log([0.5, 0.5]), np.log([0.75, 0.25])


def test_by_hand() -> None:
    assert kl_divergence(P, Q) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    middle = (0.625, 0.375)
    left = 0.5 * math.log(0.5 / middle[0]) + 0.5 * math.log(0.5 / middle[1])
    right = 0.75 * math.log(0.75 / middle[0]) + 0.25 * math.log(0.25 / middle[1])
    assert jensen_shannon(P, Q) == pytest.approx((left + right) / 2) == pytest.approx(jensen_shannon(Q, P))


def test_equal_and_far() -> None:
    assert kl_divergence(P, P) == jensen_shannon(P, P) == 0
    near, far = log_distribution(np.array([0.0, -800.0])), log_distribution(np.array([-800.0, 0.0]))
    assert jensen_shannon(near, far) == pytest.approx(math.log(2)) and kl_divergence(near, far) == pytest.approx(800)


def test_log_distribution() -> None:
    assert np.exp(log_distribution(np.array([-1000.0, -1000.0 + math.log(3)]))) == pytest.approx([0.25, 0.75])

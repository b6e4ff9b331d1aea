"""Bootstrap intervals against the normal approximation and by hand."""

from __future__ import annotations

import pytest

from audiorl.eval.metrics.corpus import bootstrap_interval


def test_the_interval_of_a_share() -> None:
    answers = [1.0] * 64 + [0.0] * 36
    low, high = bootstrap_interval(answers, resamples=10_000)
    # normal approximation: 0.64 ± 1.96 sqrt(0.64·0.36/100) = 0.64 ± 0.094
    assert low == pytest.approx(0.546, abs=0.011)
    assert high == pytest.approx(0.734, abs=0.011)
    assert bootstrap_interval(answers, resamples=10_000) == (low, high)
    wider = bootstrap_interval(answers, confidence=0.99, resamples=10_000)
    assert wider[0] < low < high < wider[1]


def test_equal_values_have_no_width() -> None:
    assert bootstrap_interval([1.0] * 5) == (1.0, 1.0)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match=r"got 95"):
        bootstrap_interval([1.0], confidence=95)

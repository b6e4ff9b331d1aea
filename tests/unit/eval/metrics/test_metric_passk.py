from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.eval.metrics import pass_at_k, pass_at_k_curve
from audiorl.eval.metrics.choice import crossings


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the right one
        (4, 2, 2, 5 / 6),
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 3, 2, 1.0),
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_is_the_share_of_subsets_that_hold_a_right_attempt(attempts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    subsets = list(combinations(attempts, k))
    share = sum(any(s) for s in subsets) / len(subsets)
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(share, abs=1e-12)


def test_large_counts_do_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


def test_curve() -> None:
    curve = pass_at_k_curve([[True, False, False, False], [False] * 4], ks=[1, 2, 4])
    assert curve == pytest.approx({1: 1 / 8, 2: 1 / 4, 4: 1 / 2})


def test_errors() -> None:
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="no problems"):
        pass_at_k_curve([], [1])


def test_crossings() -> None:
    assert crossings([0.5, 0.6, 0.7], [0.3, 0.6, 0.8]) == [3]  # equal at k = 2
    assert crossings([0.5, 0.6], [0.3, 0.6]) == crossings([0.2], [0.2]) == []
    assert crossings([0.1, 0.4, 0.5, 0.6], [0.2, 0.3, 0.6, 0.7]) == [2, 3]
    with pytest.raises(ValueError):
        crossings([0.1], [0.1, 0.2])

"""The rules of MMAU, MMSU and MMAR, pass@k, and divergences, by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.eval.metrics import mmau_match, pass_at_k, pass_at_k_curve
from audiorl.eval.metrics.choice import (
    crossings,
    jensen_shannon,
    kl_divergence,
    log_distribution,
    mmsu_letter,
    mmsu_match,
    rubric_score,
)


@pytest.mark.parametrize(
    ("answer", "prediction", "choices", "expected"),
    [
        ("dog", "dog", ["dog", "cat"], True),
        ("dog", "It is a DOG.", ["dog", "cat"], True),
        ("dog", "dog, not cat", ["dog", "cat"], False),
        ("dog", "dogs", ["dog", "cat"], False),
        ("dog", "", ["dog", "cat"], False),
        ("dog", "!!", ["dog", "cat"], False),
        ("dog", "A", ["dog", "cat"], False),
        ("big dog", "dog", ["big dog", "cat"], False),
        ("dog", "big dog", ["dog", "big cat"], False),
        ("big dog", "big dog", ["big dog", "big cat"], True),  # "big" belongs to the answer too
        ("...", "anything", ["...", "cat"], True),  # an answer without words is matched by any words
    ],
)
def test_mmau_match(answer: str, prediction: str, choices: list[str], expected: bool) -> None:
    assert mmau_match(answer, prediction, choices) is expected


def test_mmsu() -> None:
    letters = {
        "B": "B", " C. a cat ": "C", "The answer is A.": "A", "\nD\n": "D", "None": None, "": None, "b": None,
        "It is B": None,  # only the last character but one is looked at
        "Apple": "A",  # the rule takes the first character for a letter, whatever follows
    }  # fmt: skip
    assert {response: mmsu_letter(response) for response in letters} == letters
    choices = {"A": "cat", "B": "dog", "C": "", "D": ""}
    right = {r: mmsu_match("dog", r, choices) for r in ("B", "I think B.", "A", "dog")}
    assert right == {"B": True, "I think B.": True, "A": False, "dog": False}


RUBRIC = [{"name": "cue", "choices": [0, 1]}, {"name": "reasoning", "choices": [0, 1, 3]}]


def rating(*scores: object) -> str:
    items = ", ".join(f'{{"name": "x", "score": {score}}}' for score in scores)
    return f"Here it is:\n[{items}]"


def test_rubric_score_by_hand() -> None:
    ratings = [rating(1, 3), rating(0, 0), rating(1, 0), rating(1, 1), rating(0, 1)]  # 1, 0, 1/4, 1/2, 1/4
    assert rubric_score(True, ratings, RUBRIC) == pytest.approx((1 / 4 + 1 / 2 + 1 / 4) / 3)
    assert rubric_score(True, ratings[:2], RUBRIC) == 0.5  # two ratings: none is left out
    assert rubric_score(False, ratings, RUBRIC) == 0


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ([], "no ratings of a right answer"),
        (["very good"], "a rating is not JSON"),
        ([rating(1)], "a list of 2 items"),
        ([rating(1, 2)], "gives 2 for 'reasoning', not one of"),
        ([rating("true", 1)], "gives True for 'cue'"),
        (['[{"name": "cue"}, {"name": "reasoning", "score": 1}]'], "gives None for 'cue'"),
    ],
)
def test_ratings_that_do_not_fit(ratings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rubric_score(True, ratings, RUBRIC)


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
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_is_the_share_of_subsets_that_hold_a_right_attempt(attempts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    subsets = list(combinations(attempts, k))
    share = sum(any(s) for s in subsets) / len(subsets)
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)  # without overflow
    curve = pass_at_k_curve([[True, False, False, False], [False] * 4], ks=[1, 2, 4])
    assert curve == pytest.approx({1: 1 / 8, 2: 1 / 4, 4: 1 / 2})
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


P, Q = np.log([0.5, 0.5]), np.log([0.75, 0.25])


def test_divergences_by_hand() -> None:
    assert kl_divergence(P, Q) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    middle = (0.625, 0.375)
    left = 0.5 * math.log(0.5 / middle[0]) + 0.5 * math.log(0.5 / middle[1])
    right = 0.75 * math.log(0.75 / middle[0]) + 0.25 * math.log(0.25 / middle[1])
    assert jensen_shannon(P, Q) == pytest.approx((left + right) / 2) == pytest.approx(jensen_shannon(Q, P))


def test_divergences_of_equal_and_far_distributions() -> None:
    assert kl_divergence(P, P) == jensen_shannon(P, P) == 0
    near, far = log_distribution(np.array([0.0, -800.0])), log_distribution(np.array([-800.0, 0.0]))
    assert jensen_shannon(near, far) == pytest.approx(math.log(2)) and kl_divergence(near, far) == pytest.approx(800)
    assert np.exp(log_distribution(np.array([-1000.0, -1000.0 + math.log(3)]))) == pytest.approx([0.25, 0.75])

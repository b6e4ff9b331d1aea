"""Purity and V-measure: numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from audiorl.eval.metrics.clusters import compare_clusters


def test_two_of_six_in_the_wrong_cluster() -> None:
    scores = compare_clusters("AAABBB", [1, 1, 2, 2, 2, 1])
    assert scores.purity == pytest.approx(4 / 6)
    # H(class | cluster) of thirds and two thirds; both directions are the same here.
    conditional = -(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3))
    expected = 1 - conditional / math.log(2)
    assert scores.homogeneity == pytest.approx(expected) and scores.completeness == pytest.approx(expected)
    assert scores.v_measure == pytest.approx(expected)


def test_single_items_are_pure_but_not_complete() -> None:
    scores = compare_clusters("AABB", range(4))
    assert (scores.purity, scores.homogeneity) == (1, pytest.approx(1))
    assert scores.completeness == pytest.approx(0.5) and scores.v_measure == pytest.approx(2 / 3)


def test_one_cluster_and_one_class() -> None:
    scores = compare_clusters("AAB", "xxx")
    assert scores.purity == pytest.approx(2 / 3) and scores.homogeneity == pytest.approx(0) and scores.v_measure == 0
    assert compare_clusters("AA", "xx").v_measure == 1


def test_items_without_a_cluster_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 classes and 1 clusters"):
        compare_clusters("AB", "x")
    with pytest.raises(ValueError, match="0 classes"):
        compare_clusters("", "")

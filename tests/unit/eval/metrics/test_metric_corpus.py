"""Intervals of corpus metrics: against the normal approximation, sacreBLEU, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from audiorl.eval.metrics.corpus import bootstrap_interval, estimate, ratio, repeated, translation_counts


def test_the_interval_of_a_rate() -> None:
    counts = np.array([[1, 1]] * 64 + [[0, 1]] * 36)
    result = estimate(counts, ratio, resamples=5000)
    assert result.value == 0.64
    # normal approximation: 0.64 ± 1.96 sqrt(0.64·0.36/100) = 0.64 ± 0.094
    assert (result.low, result.high) == pytest.approx((0.546, 0.734), abs=0.012)


def test_long_utterances_weigh_more() -> None:
    assert estimate(np.array([[1, 1], [0, 9]]), ratio).value == 0.1
    assert ratio(np.array([0, 0])) == 0.0
    assert ratio(np.array([3, 0])) == 1.0


def test_differences_are_paired() -> None:
    """Two systems with much the same errors: their intervals overlap, that of the difference is narrow."""
    rng = np.random.default_rng(0)
    words = np.full(60, 10)
    errors = rng.integers(0, 10, 60)
    better = np.maximum(errors - 1, 0)
    system, baseline = np.stack([better, words], 1), np.stack([errors, words], 1)
    difference = estimate(system, ratio, baseline_NK=baseline)
    assert difference.value == pytest.approx((better - errors).sum() / 600)
    assert difference.low < difference.value < difference.high < 0
    alone = estimate(system, ratio)
    assert alone.high > estimate(baseline, ratio).low
    assert difference.high - difference.low < (alone.high - alone.low) / 3


def test_speakers_are_drawn_whole() -> None:
    """Two speakers whose utterances are all alike: the utterances say little, another speaker would say much."""
    counts = np.array([[0, 1]] * 50 + [[1, 1]] * 50 + [[0, 1]] * 50)
    speakers = ["a"] * 50 + ["b"] * 50 + ["c"] * 50
    utterances, people = estimate(counts, ratio), estimate(counts, ratio, clusters=speakers)
    assert utterances.value == people.value == pytest.approx(1 / 3)
    assert people.high - people.low > 2 * (utterances.high - utterances.low)
    assert (people.low, people.high) == (0.0, 1.0)


@pytest.mark.parametrize("metric", ["bleu", "chrf", "chrf++", "ter"])
def test_translation_is_that_of_sacrebleu(metric: str) -> None:
    metrics = pytest.importorskip("sacrebleu.metrics")
    hypotheses = ["the call is forwarded to the desk", "please wait for the operator now", "goodbye", ""]
    references = ["the call was forwarded to the desk", "please wait for the next operator", "good bye", "yes"]
    counts, score = translation_counts(hypotheses, references, metric)
    result = estimate(counts, score)
    measures = {
        "bleu": metrics.BLEU(),
        "chrf": metrics.CHRF(),
        "chrf++": metrics.CHRF(word_order=2),
        "ter": metrics.TER(),
    }
    assert result.value == pytest.approx(measures[metric].corpus_score(hypotheses, [references]).score)
    assert 0 <= result.low < result.value < result.high <= 100


def test_translation_by_words_by_hand() -> None:
    hypotheses, references = ["the the cat, sat", ""], ["The cat sat down", "yes"]
    values = {}
    for metric in ("word_f1", "length_ratio", "repetition"):
        counts, score = translation_counts(hypotheses, references, metric)
        values[metric] = score(counts.sum(0))
    assert values == pytest.approx({"word_f1": 100 * 2 * 3 / (4 + 5), "length_ratio": 4 / 5, "repetition": 0.0})
    counts, score = translation_counts(["你好吗"], ["你好"], "word_f1")
    assert score(counts.sum(0)) == pytest.approx(80)
    assert repeated("a b c a b c a b c") == (4, 7)
    assert repeated("A b c a B c") == (1, 4)
    assert repeated("a b") == (0, 0)


def test_bootstrap_interval() -> None:
    answers = [1.0] * 64 + [0.0] * 36
    low, high = bootstrap_interval(answers, resamples=10_000)
    # normal approximation: 0.64 ± 1.96 sqrt(0.64·0.36/100) = 0.64 ± 0.094
    assert (low, high) == pytest.approx((0.546, 0.734), abs=0.011)
    assert bootstrap_interval(answers, resamples=10_000) == (low, high)
    assert bootstrap_interval([1.0] * 5) == (1.0, 1.0)  # equal values have no width
    # but 10 right answers of 10 may be 72 % of all: 10 / (10 + 1.96²)
    assert bootstrap_interval([1.0] * 10, share=True) == pytest.approx((0.7225, 1), abs=1e-4)
    assert bootstrap_interval([0.0] * 10, share=True) == pytest.approx((0, 0.2775), abs=1e-4)
    assert bootstrap_interval(answers, resamples=10_000, share=True) == (low, high)
    assert bootstrap_interval([0.5] * 5, share=True) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate(np.zeros((0, 2)), ratio), r"same utterances, got \[0\]"),
        (lambda: estimate(np.ones((2, 2)), ratio, baseline_NK=np.ones((1, 2))), r"same utterances, got \[2, 1\]"),
        (lambda: bootstrap_interval([]), "at least one"),
        (lambda: translation_counts(["a"], ["a"], "rouge"), "no metric of translations is called 'rouge'"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

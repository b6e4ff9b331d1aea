"""Samples that are chosen by reward and by the prosody of the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from audiorl.eval.metrics.prosody import Prosody
from audiorl.tasks.tts.prosody import ProsodyBins
from experiments.balance import balanced_choice


def spoken(f0_range: float) -> Prosody:
    return Prosody(f0_range, 1.0, 200.0, 0.8, 20.0, 0.0, 0)


def one_edge(lively: float) -> ProsodyBins:
    """F0 ranges above 4 semitones are lively, and that share of the recordings is."""
    edges = {"f0_range": (np.log(4),), "energy_range": (), "pauses": ()}
    return ProsodyBins(edges, {"f0_range": (1 - lively, lively), "energy_range": (1.0,), "pauses": (1.0,)})


@pytest.mark.parametrize("lively", [0.0, 0.25, 0.5, 1.0])
def test_the_kept_samples_have_the_share_of_the_recordings_where_it_costs_least(lively: float) -> None:
    """Each text has a flat sample and a lively one, which is understood worse by 0.1, 0.2, 0.3 or 0.4."""
    rewards = np.array([[1.0, 0.9], [1.0, 0.7], [0.8, 0.6], [0.9, 0.5]])
    measured = [spoken(1.0), spoken(9.0)] * 4
    kept = balanced_choice(rewards, measured, one_edge(lively))
    by_cost = [0, 2, 1, 3]
    assert sorted(np.flatnonzero(kept == 1)) == sorted(by_cost[: round(4 * lively)])


def test_the_choice_is_the_best_of_all_that_have_these_shares() -> None:
    """Against all 3^5 choices; samples of three bins, rewards at random."""
    rng = np.random.default_rng(0)
    edges = {"f0_range": (np.log(4), np.log(8)), "energy_range": (), "pauses": ()}
    bins = ProsodyBins(edges, {"f0_range": (0.4, 0.2, 0.4), "energy_range": (1.0,), "pauses": (1.0,)})
    for _ in range(20):
        rewards, ranges = rng.random((5, 3)), np.stack([rng.permutation([2.0, 6.0, 10.0]) for _ in range(5)])
        kept = balanced_choice(rewards, [spoken(x) for x in ranges.ravel()], bins, rounds=2000)

        def counts(choice: np.ndarray, ranges: np.ndarray = ranges) -> list[int]:
            return [int((ranges[range(5), choice] == x).sum()) for x in (2.0, 6.0, 10.0)]

        choices = [np.array(c) for c in itertools.product(range(3), repeat=5)]
        best = max(rewards[range(5), c].sum() for c in choices if counts(c) == [2, 1, 2])
        assert counts(kept) == [2, 1, 2]
        assert rewards[range(5), kept].sum() == pytest.approx(best)


def test_without_voice_a_sample_is_kept_for_its_reward_alone() -> None:
    kept = balanced_choice(np.array([[0.2, 0.9], [0.1, 0.0]]), [None, None, spoken(1.0), None], one_edge(1.0))
    assert [*kept] == [1, 0]

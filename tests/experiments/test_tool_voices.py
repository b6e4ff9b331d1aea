"""A speaker encoder by linear discriminants, and samples that are chosen by reward and by the batch's prosody."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import lfilter

from audiorl.data.corpus import bundled_speech
from audiorl.eval.metrics.prosody import Prosody
from audiorl.tasks.tts.prosody import ProsodyBins

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from voices import VoiceLDA, balanced_choice, fit_voices, statistics

RATE = 16_000
SPOKEN = [u.clip.load(RATE) for u in bundled_speech(("en",), 0.6, 1.5)[:72]]


def said_by(resonance: float, wav: np.ndarray) -> np.ndarray:
    """The recording in a vocal tract with one more resonance, at so many Hz."""
    angle = 2 * np.pi * resonance / RATE
    return lfilter([0.05], [1, -2 * 0.97 * np.cos(angle), 0.97**2], wav).astype(np.float32)


FITTED, OTHER = SPOKEN[:40], SPOKEN[40:]


@pytest.fixture(scope="module")
def encoder() -> VoiceLDA:
    voices = [500.0, 1000.0, 1500.0, 2000.0, 2500.0, 3000.0]
    waves = [said_by(v, wav) for v in voices for wav in FITTED]
    return fit_voices(waves, [f"{v}" for v in voices for _ in FITTED], RATE)


def test_a_voice_that_it_was_not_fitted_on_is_nearest_to_itself(encoder: VoiceLDA) -> None:
    """In other words and at another level; chance is a quarter."""
    unseen = [750.0, 1250.0, 1750.0, 2250.0]
    known = encoder.embed([said_by(v, OTHER[0]) for v in unseen], RATE)
    assert known.dtype == np.float32 and known.shape == (4, 5)  # one discriminant fewer than voices
    np.testing.assert_allclose(np.linalg.norm(known, axis=1), 1, atol=1e-6)
    owns = [i % len(unseen) for i in range(len(OTHER[1:]))]
    spoken = encoder.embed([0.3 * said_by(unseen[own], wav) for own, wav in zip(owns, OTHER[1:], strict=True)], RATE)
    right = np.mean((spoken @ known.T).argmax(1) == owns)
    assert right > 0.7


def test_a_clip_does_not_depend_on_the_others(encoder: VoiceLDA) -> None:
    alone = np.concatenate([encoder.embed([wav], RATE) for wav in SPOKEN[:4]])
    np.testing.assert_allclose(encoder.embed(SPOKEN[:4], RATE), alone, atol=1e-5)


def test_what_cannot_be_fitted_is_refused(encoder: VoiceLDA) -> None:
    with pytest.raises(ValueError, match="1 speakers, the fewest clips of one 3"):
        fit_voices(SPOKEN[:3], ["a"] * 3, RATE)
    with pytest.raises(ValueError, match="2 speakers, the fewest clips of one 1"):
        fit_voices(SPOKEN[:3], ["a", "a", "b"], RATE)
    with pytest.raises(ValueError, match="waveform 0: holds no samples"):
        encoder.embed([np.zeros(0, np.float32)], RATE)
    assert statistics([np.zeros(RATE, np.float32)], RATE).shape == (1, 160)


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

"""Metrics of sounds: known clicks at known times and delays, hiss and clipping of known size, distances by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from audiorl.eval.metrics.sound import (
    frechet_distance,
    hiss_level,
    inception_score,
    interaural_delay,
    kl_divergence,
    loudness_range,
    matched_onsets,
    onset_scores,
    onsets,
    sound_quality,
)
from audiorl.tasks.sound.places import azimuth_of, delay_of, placed

RATE = 16_000


def click(*times: float, seconds: float = 2.0, rate: int = RATE) -> np.ndarray:
    """Decaying noise bursts of 50 ms that begin at exactly these times."""
    wave = np.zeros(round(seconds * rate), np.float32)
    burst = np.random.default_rng(0).uniform(-0.5, 0.5, rate // 20) * np.exp(-np.arange(rate // 20) / (rate / 100))
    burst[0] = 0.5
    for time in times:
        wave[round(time * rate) : round(time * rate) + len(burst)] += burst.astype(np.float32)
    return wave


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100])
def test_the_onset_of_a_click_is_where_it_is(rate: int) -> None:
    times = [0.0, 0.3, 0.47, 1.2, 1.9]
    assert onsets(click(*times, rate=rate), rate) == pytest.approx(times, abs=0.001)
    stereo = np.stack([click(*times, rate=rate), np.zeros(2 * rate, np.float32)], axis=1)
    assert onsets(0.01 * stereo, rate) == pytest.approx(times, abs=0.001)


def test_steady_sounds_silence_and_noise_under_a_click_begin_once() -> None:
    steady = 0.3 * np.sin(2 * np.pi * 440 * np.arange(2 * RATE) / RATE)
    steady[: RATE // 2] = 0
    assert onsets(steady, RATE) == pytest.approx([0.5], abs=0.005)
    assert len(onsets(np.zeros(RATE), RATE)) == len(onsets(np.zeros(0), RATE)) == 0
    noise = np.random.default_rng(1).normal(0, 0.003, 2 * RATE)
    found = onsets(click(1.0) + noise, RATE)
    assert found[np.argmin(abs(found - 1.0))] == pytest.approx(1.0, abs=0.003)


def test_onsets_are_paired_nearest_first_and_texture_does_not_count() -> None:
    assert matched_onsets([1.0, 1.2], [1.15, 0.4], 0.5) == [(1, 0)]
    spans = [(0.5, 1.0), (1.5, 1.8)]
    assert onset_scores(spans, [0.5, 1.5]) == {"f1": 1.0, "lag": 0.0, "graded": 1.0}
    assert onset_scores(spans, [0.5, 0.8, 1.5])["f1"] == 1.0  # within the first sound
    assert onset_scores(spans, [0.5, 1.2, 1.5])["f1"] == pytest.approx(4 / 5)  # in neither
    late = onset_scores(spans, [0.7, 1.5])
    assert late["lag"] == pytest.approx(0.1) and late["graded"] == pytest.approx(2 * 1.6 / 3.6)
    assert late["f1"] == pytest.approx(2 / 3)
    later = onset_scores([(0.5, 0.55), (1.5, 1.8)], [0.7, 1.5])
    assert later["f1"] == pytest.approx(2 / 4) and later["graded"] == late["graded"]
    assert onset_scores(spans, []) == {"f1": 0.0, "lag": 0.5, "graded": 0.0}


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("azimuth", [-90.0, -37.0, 0.0, 15.0, 60.0])
def test_a_placed_click_comes_from_where_it_was_placed(azimuth: float, rate: int) -> None:
    wave = placed(click(0.2, seconds=0.5, rate=rate), azimuth, rate)
    delay = interaural_delay(wave, rate)
    assert delay * 1e6 == pytest.approx(delay_of(azimuth) * 1e6, abs=1.0)
    assert azimuth_of(delay) == pytest.approx(azimuth, abs=1.0)
    whole = np.pad(click(0.2, seconds=0.5, rate=rate), (3, 0)), np.pad(click(0.2, seconds=0.5, rate=rate), (0, 3))
    assert interaural_delay(np.stack(whole, axis=1), rate) == pytest.approx(3 / rate, abs=1e-7)


def test_hiss_and_clipping_of_known_size() -> None:
    clean = sound_quality(click(0.5, 1.0), RATE)
    assert (clean["clean"], clean["clipping"], clean["hiss"]) == (1.0, 1.0, 1.0)
    noise = np.random.default_rng(0).normal(0, 10 ** (-50 / 20), 2 * RATE)
    assert hiss_level(noise, RATE) == pytest.approx(
        -53.6, abs=1.0
    )  # half its power lies above 4 kHz, 0.6 dB a quantile
    hissing = sound_quality(click(0.5) + noise, RATE)
    assert hissing["hiss"] == pytest.approx((-35 - hiss_level(click(0.5) + noise, RATE)) / 30)
    assert 0.5 < hissing["hiss"] < 0.7 and hissing["clipping"] == 1.0
    clipped = click(0.5).copy()
    clipped[8000 : 8000 + 160] = 1.0  # half of the share that is worthless
    assert sound_quality(clipped, RATE)["clipping"] == pytest.approx(0.5, abs=0.02)
    assert set(sound_quality(np.zeros(RATE), RATE).values()) == {0.0}
    tone = np.sin(2 * np.pi * 440 * np.arange(4 * RATE) / RATE)
    tone[: 2 * RATE] *= 0.1
    assert loudness_range(tone, RATE) == pytest.approx(20, abs=0.1)


def test_distances_of_sets_are_those_of_known_gaussians() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, (20_000, 2)), rng.normal(0, 1, (20_000, 2)) * [2.0, 1.0] + [3.0, 0.0]
    assert frechet_distance(a, b) == pytest.approx(9 + (2 - 1) ** 2, rel=0.02)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    few = rng.normal(size=(5, 40)), rng.normal(size=(7, 40))  # fewer sounds than dimensions
    covariances = [np.cov(x.T) for x in few]
    root = np.sqrt(np.clip(np.linalg.eigvals(covariances[0] @ covariances[1]).real, 0, None)).sum()
    means = np.square(few[0].mean(0) - few[1].mean(0)).sum()
    expected = means + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * root
    assert frechet_distance(*few) == pytest.approx(expected, rel=1e-5)
    p, q = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.25, 0.75], [0.5, 0.5]])
    hand = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)]
    assert kl_divergence(p, q) == pytest.approx(hand, abs=1e-4)
    assert inception_score(np.eye(4)) == pytest.approx(4, rel=1e-3)
    assert inception_score(np.ones((4, 3))) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: onsets(np.zeros((10, 3)), RATE), "shape .10, 3.; give"),
        (lambda: onsets(np.array([np.nan]), RATE), "1 samples that are not finite"),
        (lambda: interaural_delay(np.zeros(10), RATE), "a delay needs two channels"),
        (lambda: frechet_distance(np.zeros((1, 3)), np.zeros((5, 3))), "two sets of two embeddings or more"),
    ],
)
def test_what_has_no_value_is_refused(call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()

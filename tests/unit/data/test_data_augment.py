"""Augmentations measured on real speech: levels, bands, lengths and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest

from audiorl.data.augment import add_noise, augment, gain, reverb, speed, telephone
from audiorl.data.corpus import bundled_speech

RATE = 16_000


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    return next(u for u in bundled_speech(("en",)) if u.key == "conf-full").clip.load(RATE)


def power(wav: np.ndarray) -> float:
    return float(np.mean(wav.astype(np.float64) ** 2))


@pytest.mark.parametrize("color", [0.0, 1.0])
@pytest.mark.parametrize("snr", [-5.0, 10.0, 30.0])
def test_noise_has_the_asked_level(speech: np.ndarray, snr: float, color: float) -> None:
    noise = add_noise(speech, snr, np.random.default_rng(0), color) - speech
    assert 10 * np.log10(power(speech) / power(noise)) == pytest.approx(snr, abs=0.01)


def test_pink_noise_falls_three_decibels_an_octave(speech: np.ndarray) -> None:
    long = np.tile(speech, 10)
    noise = add_noise(long, 0, np.random.default_rng(0), color=1.0) - long
    spectrum = np.abs(np.fft.rfft(noise)) ** 2
    hz = np.fft.rfftfreq(len(noise), 1 / RATE)
    low, high = (spectrum[(hz > f) & (hz < 1.1 * f)].mean() for f in (500, 4000))
    assert 10 * np.log10(low / high) == pytest.approx(9, abs=1)


def test_noise_on_silence_stays_silent() -> None:
    np.testing.assert_array_equal(add_noise(np.zeros(100, np.float32), 10, np.random.default_rng(0)), 0)


def test_gain_scales_and_limits(speech: np.ndarray) -> None:
    np.testing.assert_allclose(gain(speech, -20), speech / 10, rtol=1e-5)
    assert np.abs(gain(speech, 60)).max() == 1.0


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_speed_moves_length_and_pitch(factor: float) -> None:
    tone = np.sin(2 * np.pi * 500 * np.arange(RATE) / RATE).astype(np.float32)
    out = speed(tone, factor)
    assert len(out) == pytest.approx(RATE / factor, abs=2)
    peak = np.argmax(np.abs(np.fft.rfft(out))) * RATE / len(out)
    assert peak == pytest.approx(500 * factor, abs=2)


def test_telephone_keeps_only_its_band(speech: np.ndarray) -> None:
    hz = np.fft.rfftfreq(len(speech), 1 / RATE)
    before, after = (np.abs(np.fft.rfft(w)) ** 2 for w in (speech, telephone(speech)))
    middle, outside = (hz > 400) & (hz < 3300), (hz < 150) | (hz > 3800)
    assert after[middle].sum() == pytest.approx(before[middle].sum(), rel=0.1)
    assert after[outside].sum() < 0.02 * after.sum()


def test_reverb_adds_a_decaying_tail_at_the_asked_level() -> None:
    click = np.zeros(RATE, np.float32)
    click[100] = 1.0
    out = reverb(click, np.random.default_rng(0), decay_seconds=0.3, wet=0.5)
    assert len(out) == len(click) and np.abs(out[:100]).max() < 1e-15
    tail = out - click
    assert np.sqrt(np.sum(tail**2)) == pytest.approx(0.5, rel=1e-3)
    early, late = power(tail[100 : 100 + 480]), power(tail[100 + 2400 : 100 + 2880])  # 0.15 s apart: 30 dB
    assert 10 * np.log10(early / late) == pytest.approx(30, abs=2)
    assert np.abs(tail[100 + 4800 :]).max() < 1e-9


def test_augment_is_reproducible_varied_and_keeps_the_words(speech: np.ndarray) -> None:
    original = speech.copy()
    outs = [augment(speech, np.random.default_rng(seed)) for seed in range(20)]
    np.testing.assert_array_equal(outs[3], augment(speech, np.random.default_rng(3)))
    np.testing.assert_array_equal(speech, original)
    assert len({out.tobytes() for out in outs}) == 20
    for out in outs:
        assert out.dtype == np.float32 and np.isfinite(out).all() and np.abs(out).max() <= 1
        assert 0.9 < len(speech) / len(out) < 1.1 or len(out) == pytest.approx(len(speech) / 1.1, abs=2)
        frames = [np.abs(w[: len(w) // 50 * 50]).reshape(50, -1).mean(1) for w in (speech, out)]
        assert np.corrcoef(frames[0], frames[1])[0, 1] > 0.7  # the loud syllables are where they were

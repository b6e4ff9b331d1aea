"""Prosody of tones whose F0 is known, and of human speech with its melody flattened or exaggerated."""

from __future__ import annotations

import numpy as np
import pytest

from audiorl.data.corpus import bundled_speech
from audiorl.eval.metrics.prosody import Prosody, pitch_steps, prosody, yin
from tests.support.prosody import glide, harmonics, melody_scaled

RATE = 16_000


def measured(wav: np.ndarray, rate: int = RATE) -> Prosody:
    result = prosody(wav, rate)
    assert result is not None
    return result


@pytest.mark.parametrize("rate", [8000, 16_000, 24_000])
@pytest.mark.parametrize("semitones", [0, 3, 12])
def test_a_glide_has_its_range(semitones: float, rate: int) -> None:
    result = measured(glide(semitones, rate), rate)
    assert result.f0_range == pytest.approx(0.9 * semitones, abs=0.15)  # between the percentiles 5 and 95
    assert result.f0_deviation == pytest.approx(semitones / np.sqrt(12), abs=0.1)
    assert result.f0_median == pytest.approx(110 * 2 ** (semitones / 24), rel=0.01)
    assert result.voiced > 0.95 and result.pauses == result.pause_count == 0
    assert result.energy_range < 1.5


def test_high_and_low_voices_in_noise() -> None:
    noise = 0.005 * np.random.default_rng(0).standard_normal(RATE)
    for hertz in (70, 100, 220, 480):
        f0 = yin(harmonics(np.full(RATE, hertz), RATE) + noise, RATE)
        assert len(f0) == 101
        assert np.nanmedian(f0) == pytest.approx(hertz, rel=0.005)
        assert np.isnan(f0).mean() < 0.05


@pytest.mark.slow  # pYIN
def test_yin_agrees_with_pyin_on_speech() -> None:
    librosa = pytest.importorskip("librosa")
    wav = next(u.clip.load(RATE) for u in bundled_speech(("en",), min_seconds=0.8))
    fast, slow = yin(wav, RATE), librosa.pyin(wav, fmin=65, fmax=500, sr=RATE, frame_length=1024, hop_length=160)[0]
    assert len(fast) == len(slow)
    both = ~np.isnan(fast) & ~np.isnan(slow)
    assert both.mean() > 0.4
    assert np.median(np.abs(12 * np.log2(fast[both] / slow[both]))) < 0.2


def test_a_flattened_melody_has_a_smaller_range_and_an_exaggerated_one_a_greater() -> None:
    ranges = []
    for u in [u for u in bundled_speech(max_seconds=2.5) if u.duration > 1.5][::25]:
        wav = u.clip.load(RATE)
        flat, own, wild = (measured(melody_scaled(wav, RATE, factor)) for factor in (0.0, 1.0, 1.5))
        assert flat.f0_range < 0.5 * own.f0_range and flat.f0_deviation < 0.5 * own.f0_deviation
        ranges.append((flat.f0_range, own.f0_range, wild.f0_range))
    flat_mean, own_mean, wild_mean = np.mean(ranges, axis=0)
    assert flat_mean < 0.2 * own_mean and wild_mean > 1.2 * own_mean


def test_pauses_and_the_range_of_the_level() -> None:
    sound, silence = glide(2, RATE, 0.5), np.zeros(RATE // 4)
    wav = np.concatenate([silence, sound, silence, 0.25 * sound, silence[: RATE // 10], sound, silence])
    result = measured(wav)
    assert result.pause_count == 1  # that of 0.1 s is none, and silence at the ends does not count
    assert result.pauses == pytest.approx(0.25 / 1.85, abs=0.02)
    assert result.energy_range == pytest.approx(12, abs=0.5)  # a factor of 4
    quieter = measured(wav / 100)
    assert quieter.f0_range == pytest.approx(result.f0_range, abs=0.01)
    assert quieter.energy_range == pytest.approx(result.energy_range, abs=0.01)
    assert quieter.pauses == result.pauses


def test_nothing_voiced_has_no_prosody() -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(RATE)
    for wav in (np.zeros(0), np.zeros(RATE), noise, glide(0, RATE, 0.08), 1e-5 * glide(0, RATE), np.full(RATE, 1e-3)):
        assert prosody(wav, RATE) is None
    with pytest.raises(ValueError, match="NaN"):
        prosody(np.full(RATE, np.nan), RATE)


def test_long_recordings_are_measured_block_by_block() -> None:
    wav = glide(6, RATE, 45.0)
    f0 = yin(wav, RATE)
    assert len(f0) == 4501 and np.isnan(f0).mean() < 0.01
    assert f0[100] == pytest.approx(yin(wav[: 2 * RATE], RATE)[100], rel=1e-4)


def tone(hertz: float, seconds: float = 0.6) -> np.ndarray:
    """Ten harmonics, as a voice has them."""
    time = np.arange(round(seconds * RATE)) / RATE
    return 0.05 * sum(np.sin(2 * np.pi * k * hertz * time) / k for k in range(1, 11))


def test_steps_in_semitones() -> None:
    assert pitch_steps(tone(120), tone(120), RATE)[0] < 0.15
    assert pitch_steps(tone(120), tone(120 * 2 ** (4 / 12)), RATE)[0] == pytest.approx(4, abs=0.2)
    assert pitch_steps(tone(240), tone(120), RATE)[0] == pytest.approx(12, abs=0.2)
    noise = 0.1 * np.random.default_rng(0).standard_normal(RATE)
    assert pitch_steps(tone(120), noise, RATE) == []  # no voice
    assert pitch_steps(tone(120), tone(120, 0.2), RATE) == []  # too short
    assert pitch_steps(tone(120), np.zeros(RATE), RATE) == []

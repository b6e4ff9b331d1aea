"""Steps of pitch at a joint, on tones whose F0 is known."""

from __future__ import annotations

import numpy as np
import pytest

from audiorl.eval.metrics.prosody import pitch_steps

RATE = 16_000


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

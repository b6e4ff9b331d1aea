"""The speaker encoder that is fitted to a corpus: it knows voices that it was not fitted on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter

from audiorl.data.corpus import bundled_speech
from corpora.models.voices import VoiceLDA, fit_voices, statistics

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

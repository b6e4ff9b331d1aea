"""The drawing of pitch and level: a flat melody is a level line, a glide rises, and silence has no line."""

from __future__ import annotations

import re

import numpy as np
import pytest

from audiorl.report.audio import contour
from tests.support.prosody import glide

RATE = 16_000


def line(svg: str) -> np.ndarray:
    """The points (x, y) of the pitch, [N, 2]; y grows downwards."""
    (path,) = re.findall(r"<path d='([^']*)' fill='none'", svg)
    return np.array([[float(n) for n in point.split()] for point in re.split("[ML]", path)[1:]])


def test_the_line_is_the_pitch() -> None:
    flat, rising = line(contour(glide(0, RATE), RATE)), line(contour(glide(12, RATE), RATE))
    assert np.abs(flat[:, 1] - 24).max() < 0.5  # the middle of 48 pixels
    assert rising[0] == pytest.approx([0, 36], abs=3) and rising[-1] == pytest.approx([300, 12], abs=3)
    assert "median 110 Hz, F0 range (semitones) 0" in contour(glide(0, RATE), RATE)


def test_long_silent_and_empty_recordings() -> None:
    assert len(contour(glide(12, RATE, 20.0), RATE)) < 12_000
    silent = contour(np.zeros(RATE), RATE)
    assert "no voice" in silent and silent.count("<path") == 1 and "nan" not in silent
    half = contour(np.concatenate([glide(0, RATE), np.zeros(2 * RATE), glide(0, RATE)]), RATE)
    assert re.findall(r"<path d='([^']*)' fill='none'", half)[0].count("M") == 2  # no line through the pause
    assert contour(np.zeros(0), RATE) == ""

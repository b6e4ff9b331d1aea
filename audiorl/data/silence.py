"""Finding the speech in a recording, and cutting off the silence around it."""

from __future__ import annotations

import numpy as np

RATE = 16_000
_FRAME, _MARGIN, _BELOW = 160, 800, -40.0
"""Samples of a frame, samples kept on either side, dB below the loudest frame that count as silence."""


def trimmed(wav: np.ndarray) -> np.ndarray:
    """`wav` [T] at RATE Hz without the silence around the speech (see `speech_in`)."""
    first, end = speech_in(wav)
    return wav[first:end]


def speech_in(wav: np.ndarray) -> tuple[int, int]:
    """First sample of the speech in `wav` [T] at RATE Hz, and the one behind its last.

    They leave 50 ms on either side, in which soft consonants begin and end. Silence: 10 ms frames more than 40 dB below
    the loudest one. Raises ValueError when there is nothing else.
    """
    frames = len(wav) // _FRAME
    power = np.square(wav[: frames * _FRAME], dtype=np.float64).reshape(frames, _FRAME).mean(1)
    if not len(power) or power.max() < 1e-9:
        raise ValueError(f"{len(wav) / RATE:.2f} s of silence; give speech")
    loud = np.nonzero(power > power.max() * 10 ** (_BELOW / 10))[0]
    return max(0, int(loud[0]) * _FRAME - _MARGIN), min((int(loud[-1]) + 1) * _FRAME + _MARGIN, len(wav))

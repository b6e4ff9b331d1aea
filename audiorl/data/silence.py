"""Finding the speech in a recording, and cutting off the silence around it."""

from __future__ import annotations

import numpy as np

RATE = 16_000
_FRAME, _MARGIN, _BELOW = 160, 0.05, -40.0
"""Samples of a frame at RATE, seconds kept on either side, dB below the loudest frame that count as silence."""


def trimmed(wav: np.ndarray, rate: int = RATE) -> np.ndarray:
    """`wav` [T] without the silence around the speech (see `speech_in`)."""
    first, end = speech_in(wav, rate)
    return wav[first:end]


def speech_in(wav: np.ndarray, rate: int = RATE) -> tuple[int, int]:
    """First sample of the speech in `wav` [T], and the one behind its last.

    They leave 50 ms on either side, in which soft consonants begin and end. Silence: 10 ms frames more than 40 dB below
    the loudest one. Raises ValueError when there is nothing else.
    """
    frame, frames = _FRAME * rate // RATE, len(wav) * RATE // (_FRAME * rate)
    power = np.square(wav[: frames * frame], dtype=np.float64).reshape(frames, frame).mean(1)
    if not len(power) or power.max() < 1e-9:
        raise ValueError(f"{len(wav) / rate:.2f} s of silence; give speech")
    loud = np.nonzero(power > power.max() * 10 ** (_BELOW / 10))[0]
    margin = round(_MARGIN * rate)
    return max(0, int(loud[0]) * frame - margin), min((int(loud[-1]) + 1) * frame + margin, len(wav))

"""Where a sound comes from: the interaural delay and level of an azimuth, and what they say about the azimuth.

A sphere with two ears and a distant source. Azimuths are degrees from straight ahead, -90 (left) to 90 (right); a delay
is positive where the left ear hears the sound later, as it does from the right.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

HEAD_RADIUS = 0.0875
"""Metres."""
SPEED_OF_SOUND = 343.0
LEVEL = 10.0
"""dB by which the far ear is quieter at 90°."""


def delay_of(azimuth: float) -> float:
    """Return the interaural delay in seconds, r/c·(θ + sin θ). Source: Woodworth 1938.

    >>> round(delay_of(90) * 1e6)
    656
    """
    angle = math.radians(azimuth)
    return HEAD_RADIUS / SPEED_OF_SOUND * (angle + math.sin(angle))


def azimuth_of(delay: float) -> float:
    """Return the azimuth in degrees whose interaural delay is the one given in seconds, by bisection; ±90 beyond.

    >>> round(azimuth_of(delay_of(-30)), 6)
    -30.0
    """
    low, high = -90.0, 90.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if delay_of(middle) < delay else (low, middle)
    return (low + high) / 2


def placed(wave: NDArray[np.float32], azimuth: float, rate: int) -> NDArray[np.float32]:
    """Return a mono sound [T] as [T', 2] from an azimuth: the far ear hears it later and quieter, the near one as it
    is. T' is longer than T by the delay."""
    delay = abs(delay_of(azimuth)) * rate
    extra = math.ceil(delay)
    near = np.pad(wave, (0, extra))
    padding = 64  # else the shift, which is circular, would carry the ripples before the onset to the end
    size = len(near) + 2 * padding
    spectrum = np.fft.rfft(np.pad(wave.astype(np.float64), (padding, padding + extra)))
    shift = np.exp(-2j * np.pi * np.fft.rfftfreq(size) * delay)
    far = np.fft.irfft(spectrum * shift, size)[padding : padding + len(near)]
    far *= 10 ** (-LEVEL * abs(math.sin(math.radians(azimuth))) / 20)
    ears = (far, near) if azimuth > 0 else (near, far)
    return np.stack(ears, axis=1).astype(np.float32)

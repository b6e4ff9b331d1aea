"""What judges of speech have in common.

All take mono waveforms [T] of floats in [-1, 1] at one rate, in any number and of any length, resample them, and answer
for each in order. The answer for one does not depend on the others, within the dtype's tolerance, nor on the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

Waveform = NDArray[Any]


class Recogniser(Protocol):
    """Speech to text."""

    @property
    def name(self) -> str:
        """What tables and settings call it."""
        ...

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        """One text each; "" for no samples."""
        ...


class SpeakerEncoder(Protocol):
    """Speech to a vector that is close for the same voice."""

    @property
    def name(self) -> str:
        """What tables and settings call it."""
        ...

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        """[N, D] float32, each of length 1. ValueError for no samples: nobody speaks there."""
        ...


class QualityModel(Protocol):
    """Speech to the opinion that listeners would have of it."""

    @property
    def name(self) -> str:
        """What tables and settings call it."""
        ...

    def rate(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[float]:
        """A mean opinion score from 1 (bad) to 5 (excellent) each. ValueError for no samples."""
        ...

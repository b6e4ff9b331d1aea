"""The protocols of speech judges: `Recogniser`, `Aligner`, `TextScorer`, `LanguageIdentifier`, `SpeakerEncoder`,
`QualityModel`, `SpeechDetector`.

All take mono waveforms [T] of floats in [-1, 1] at one rate, any number and any length, resample them, and return one
result each, in order. A result does not depend on the other waveforms (within the dtype's tolerance) nor on the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Waveform = NDArray[Any]


@dataclass(frozen=True)
class AlignedWord:
    """A word of a text that should have been said, and what a recogniser understood in its place."""

    text: str
    transcript: str
    """What the recogniser understood in that time, "" for nothing."""
    start: float
    """Seconds. Words follow each other without gaps: a pause is divided between its neighbours."""
    end: float


class Recogniser(Protocol):
    """Speech to text."""

    @property
    def name(self) -> str:
        """The name in tables and settings."""
        ...

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        """One text each; "" for no samples."""
        ...


class Aligner(Recogniser, Protocol):
    """A recogniser that also says where each word of a text is said: one with a CTC head."""

    def align(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[list[AlignedWord]]:
        """The words of the text of each waveform, in order; none for no samples and for a text without words.

        Raises ValueError for a text with a character that the recogniser does not know.
        """
        ...


class TextScorer(Recogniser, Protocol):
    """A recogniser that also says how probable a text is for a clip: one with a CTC head, and Whisper."""

    def log_probabilities(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[float]:
        """ln p(text | waveform) of each, in nats for the whole text; -inf for no samples, and for a text that is too
        long for its clip.

        Raises ValueError for a text without words or with a character that the recogniser does not know.
        """
        ...


class LanguageIdentifier(Recogniser, Protocol):
    """A recogniser of many languages: it says which one is spoken, and transcribes in the one that it is given."""

    @property
    def multilingual(self) -> bool:
        """Whether the model has more than one language; False for Whisper's English models."""
        ...

    def identify(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[dict[str, float]]:
        """The probability of each language, by its code; {} for no samples. Whisper looks at the first 30 s."""
        ...

    def transcribe(
        self, waveforms: Sequence[Waveform], sample_rate: int, languages: Sequence[str] | None = None
    ) -> list[str]:
        """One text each; `languages` holds the code of each waveform's, in place of the recogniser's own."""
        ...


class SpeakerEncoder(Protocol):
    """Speech to a vector; vectors of the same speaker are close."""

    @property
    def name(self) -> str:
        """The name in tables and settings."""
        ...

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        """[N, D] float32, each of length 1. Raises ValueError for a waveform without samples."""
        ...


class QualityModel(Protocol):
    """Speech to a predicted mean opinion score of listeners."""

    @property
    def name(self) -> str:
        """The name in tables and settings."""
        ...

    def rate(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[float]:
        """A mean opinion score from 1 (bad) to 5 (excellent) each. Raises ValueError for a waveform without samples."""
        ...


class SpeechDetector(Protocol):
    """Audio to the probability of speech over time."""

    @property
    def name(self) -> str:
        """The name in tables and settings."""
        ...

    @property
    def frame_seconds(self) -> float:
        """Length of a frame in seconds."""
        ...

    def probabilities(self, waveform: Waveform, sample_rate: int) -> NDArray[Any]:
        """[ceil(T / frame)] float32 in [0, 1], for one waveform; the last frame may be shorter."""
        ...

"""Transcripts by several recognisers, and the choice of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

from audiorl.eval.metrics.text import char_errors, normalize
from corpora.annotate.recognisers import BATCH, NamedRecogniser
from corpora.annotate.recordings import RATE, Recording


@dataclass(frozen=True)
class Transcripts:
    """A text for each segment, None for one in a language that the recogniser does not transcribe.

    At another `speed` than 1 the audio is resampled, which changes its pitch too, as in the speed perturbation of Ko et
    al. 2015.
    """

    recogniser: NamedRecogniser
    speed: float = 1.0
    language: str | None = None
    """Of all recordings; None: that of the stage `language`, if it comes before."""
    after_language: bool = True
    """Whether the stage `language` comes before this one."""

    @property
    def name(self) -> str:
        return f"transcripts {self.recogniser.path}" + ("" if self.speed == 1 else f" at {self.speed:g}")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("segments", "language") if self._reads_languages else ("segments",)

    @property
    def _reads_languages(self) -> bool:
        uses = self.recogniser.languages is not None or self.recogniser.takes_languages
        return self.language is None and self.after_language and uses

    @property
    def settings(self) -> Mapping[str, Any]:
        covered = None if self.recogniser.languages is None else list(self.recogniser.languages)
        return {
            "recogniser": self.recogniser.mark,
            "languages": covered,
            "speed": self.speed,
            "language": self.language,
        }

    def __call__(self, recording: Recording) -> list[str | None]:
        spans = recording.results["segments"]
        codes: list[str | None] = [self.language] * len(spans)
        if self._reads_languages:
            codes = [code for code, _ in recording.results["language"]]
        texts: list[str | None] = [None] * len(spans)
        covered = [i for i, code in enumerate(codes) if self.recogniser.covers(code)]
        for start in range(0, len(covered), BATCH):
            batch = covered[start : start + BATCH]
            waves = [at_speed(recording.read(spans[i]), self.speed) for i in batch]
            languages = [code for i in batch if (code := codes[i]) is not None]
            with recording.naming([spans[i] for i in batch]):
                written = self.recogniser.transcribe(waves, RATE, languages or None)
            for i, text in zip(batch, written, strict=True):
                texts[i] = text and " ".join(text.split())
        return texts


def at_speed(wav: np.ndarray, speed: float) -> np.ndarray:
    """[T] to [T / speed]."""
    return wav if speed == 1 else soxr.resample(wav, RATE, RATE / speed)


@dataclass(frozen=True)
class Vote:
    """The transcript that the others agree with most. `index` is its place among them."""

    index: int
    agreement: float | None
    """1 - mean distance to the others; None where there is no other."""


def vote(texts: Sequence[str], language: str | None = None) -> Vote:
    """Return the medoid of transcripts under `distance`; of equals the first, so the recogniser to trust most comes
    first.

    This is minimum Bayes risk over the recognisers' outputs, each as probable as the others (Goel and Byrne 2000). In
    contrast to a vote on words (ROVER, Fiscus 1997) the result is what one recogniser wrote, with its case and
    punctuation. Raises ValueError for no texts.
    """
    if not texts:
        raise ValueError("vote: no transcripts")
    count = len(texts)
    if count == 1:
        return Vote(0, None)
    distances = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            distances[i, j] = distances[j, i] = distance(texts[i], texts[j], language)
    means = distances.sum(1) / (count - 1)
    index = int(np.argmin(np.round(means, 9)))
    return Vote(index, round(1 - float(means[index]), 4))


def distance(a: str, b: str, language: str | None = None) -> float:
    """Edits of characters over the length of the longer text, in [0, 1], both normalised; 0 for two empty texts."""
    first, second = (normalize(text, "basic", language) for text in (a, b))
    if not first or not second:
        return float(bool(first) != bool(second))
    errors = char_errors(first, second)
    return errors.errors / max(errors.reference_length, errors.hits + errors.substitutions + errors.insertions)

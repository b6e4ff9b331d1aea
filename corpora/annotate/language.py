"""Which language each segment is in: from the audio by Whisper, or from a transcript by py3langid."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corpora.annotate.recognisers import BATCH, NamedRecogniser
from corpora.annotate.recordings import RATE, Recording, Span


@dataclass(frozen=True)
class LanguageOfAudio:
    """[[code, probability], …] for the segments, by a multilingual Whisper; with `one_language` all the same."""

    recogniser: NamedRecogniser
    one_language: bool
    name: str = "language"
    needs: tuple[str, ...] = ("segments",)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"recogniser": self.recogniser.mark, "one_language": self.one_language}

    def __call__(self, recording: Recording) -> list[tuple[str, float]]:
        spans = recording.results["segments"]
        probabilities: list[dict[str, float]] = []
        for start in range(0, len(spans), BATCH):
            waves = [recording.read(span) for span in spans[start : start + BATCH]]
            probabilities += self.recogniser.model.identify(waves, RATE)
        return most_probable(probabilities, spans, self.one_language)


def most_probable(
    probabilities: Sequence[Mapping[str, float]], spans: Sequence[Span], one_language: bool
) -> list[tuple[str, float]]:
    """The language of each segment; with `one_language` that of the mean over segments, weighted by their seconds."""
    if one_language and probabilities:
        weights = np.array([end - start for start, end in spans])
        codes = sorted({code for row in probabilities for code in row})
        rows = np.array([[row.get(code, 0.0) for code in codes] for row in probabilities])
        mean = weights @ rows / weights.sum()
        probabilities = [dict(zip(codes, mean.tolist(), strict=True))] * len(spans)
    best = (max(row.items(), key=lambda item: item[1]) for row in probabilities)
    return [(code, round(probability, 4)) for code, probability in best]


@dataclass(frozen=True)
class LanguageOfText:
    """The same from the transcripts of a recogniser. Source: py3langid, after Lui and Baldwin 2012."""

    transcripts: str
    """The name of the stage that wrote them."""
    one_language: bool
    name: str = "language"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("segments", self.transcripts)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"one_language": self.one_language}

    def __call__(self, recording: Recording) -> list[tuple[str, float]]:
        texts = recording.results[self.transcripts]
        if self.one_language:
            texts = [" ".join(texts)] * len(texts)
        result = [_identifier().classify(text) for text in texts]
        return [(code, round(float(probability), 4)) for code, probability in result]


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

"""Where somebody speaks, and where something else sounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from audiorl.eval.metrics.speech import level
from audiorl.speech_models import SpeechDetector
from corpora.annotate.recordings import RATE, Recording, Span

HYSTERESIS = 0.15
"""How far below the threshold the probability falls where speech ends; that of Silero's own segmentation."""
BLOCK = 18_750
"""Frames that the detector gets at once, ten minutes of 32 ms: memory does not grow with the recording."""
SHORTEST = 0.064
"""Seconds: speech of a single frame is none."""
SILENT = -50.0
"""dB below which a part without speech is no sound."""
SHORTEST_SOUND = 0.5
"""Seconds."""


@dataclass(frozen=True)
class Segments:
    """The spans of speech of a recording, [[start, end], …] in seconds, padded, in order, without overlap."""

    detector: SpeechDetector
    threshold: float
    pause: float
    max_seconds: float
    padding: float
    name: str = "segments"
    needs: tuple[str, ...] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "detector": self.detector.name,
            "threshold": self.threshold,
            "pause": self.pause,
            "max_seconds": self.max_seconds,
            "padding": self.padding,
        }

    def __call__(self, recording: Recording) -> list[Span]:
        frame = self.detector.frame_seconds
        block, pieces, start = BLOCK * frame, [], 0.0
        while start + SHORTEST < recording.seconds:
            wav = recording.read((start, min(start + block, recording.seconds)))
            pieces.append(self.detector.probabilities(wav, RATE))
            start += block
        probabilities = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        spans = speech_spans(probabilities, frame, self.threshold, self.pause, self.max_seconds - 2 * self.padding)
        return padded(spans, self.padding, recording.seconds)


def speech_spans(
    probabilities: np.ndarray, frame: float, threshold: float, pause: float, max_seconds: float
) -> list[Span]:
    """Spans of speech from the probability of each frame [frames], of `frame` seconds.

    Speech begins at `threshold` and ends HYSTERESIS below it. Spans with less than `pause` seconds between them are
    joined; longer ones than `max_seconds` are cut at the least probable frame of their middle third, again and again.
    """
    spans: list[tuple[int, int]] = []
    start = None
    for i, probability in enumerate(probabilities.tolist()):
        if start is None and probability >= threshold:
            start = i
        elif start is not None and probability < threshold - HYSTERESIS:
            spans.append((start, i))
            start = None
    if start is not None:
        spans.append((start, len(probabilities)))
    joined: list[tuple[int, int]] = []
    for span in spans:
        if joined and (span[0] - joined[-1][1]) * frame < pause:
            joined[-1] = (joined[-1][0], span[1])
        else:
            joined.append(span)
    longest = max(math.floor(max_seconds / frame), 3)
    result = [piece for span in joined for piece in _cut(span, probabilities, longest)]
    return [(a * frame, b * frame) for a, b in result if (b - a) * frame >= SHORTEST]


def _cut(span: tuple[int, int], probabilities: np.ndarray, longest: int) -> list[tuple[int, int]]:
    start, end = span
    if end - start <= longest:
        return [span]
    third = (end - start) // 3
    middle = start + third + int(probabilities[start + third : end - third].argmin())
    return [*_cut((start, middle), probabilities, longest), *_cut((middle, end), probabilities, longest)]


def padded(spans: list[Span], padding: float, total: float) -> list[Span]:
    """The spans with `padding` seconds on both sides, within the recording; neighbours meet half way."""
    result: list[Span] = []
    for i, (start, end) in enumerate(spans):
        before = (spans[i - 1][1] + start) / 2 if i else 0.0
        after = (end + spans[i + 1][0]) / 2 if i + 1 < len(spans) else total
        first, last = max(start - padding, before, 0.0), min(end + padding, after, total)
        if last > first:
            result.append((round(first, 3), round(last, 3)))
    return result


@dataclass(frozen=True)
class Sounds:
    """The spans without speech that are not silent, [[start, end], …] in seconds, of at most `max_seconds`."""

    max_seconds: float
    name: str = "sounds"
    needs: tuple[str, ...] = ("segments",)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"max_seconds": self.max_seconds, "silent": SILENT, "shortest": SHORTEST_SOUND}

    def __call__(self, recording: Recording) -> list[Span]:
        edges = [0.0, *(edge for span in recording.results["segments"] for edge in span), recording.seconds]
        result = []
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            pieces = max(math.ceil((end - start) / self.max_seconds), 1)
            for k in range(pieces):
                first = round(start + (end - start) * k / pieces, 3)
                last = round(start + (end - start) * (k + 1) / pieces, 3)
                if last - first >= SHORTEST_SOUND and level(recording.read((first, last))) >= SILENT:
                    result.append((first, last))
        return result

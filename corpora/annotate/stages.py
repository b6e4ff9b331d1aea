"""Stages of the annotation of a recording: where somebody speaks, in which language, how good it sounds, and what a
speech model says about it. `transcripts` and `speakers` are further ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from audiorl.eval.metrics.speech import clipped_share, frame_levels, level, silent_share
from audiorl.languages import language_code
from audiorl.speech_models import QualityModel, SpeechDetector
from corpora.annotate.recognisers import BATCH, Captioner, NamedRecogniser, files_mark
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
class SpeechSegments:
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
    """Return the spans with `padding` seconds on both sides, within the recording; neighbours meet half way."""
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


# -- language ----------------------------------------------------------------------------------------------------------


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
    """Return the language of each segment; with `one_language` that of the mean over segments, weighted by their
    seconds."""
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
    languages: tuple[str, ...] | None = None
    """Those that the recogniser transcribes, the only ones to choose among; None: all that there are."""
    name: str = "language"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("segments", self.transcripts)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"one_language": self.one_language, "languages": self.languages and list(self.languages)}

    def __call__(self, recording: Recording) -> list[tuple[str, float]]:
        texts = recording.results[self.transcripts]
        if self.one_language:
            texts = [" ".join(texts)] * len(texts)
        codes = self.languages and tuple(sorted(set(map(language_code, self.languages))))
        if codes and len(codes) == 1:
            return [(codes[0], 1.0)] * len(texts)
        result = [_identifier(codes).classify(text) for text in texts]
        return [(code, round(float(probability), 4)) for code, probability in result]


@functools.cache
def _identifier(languages: tuple[str, ...] | None) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if unknown := set(languages or ()) - set(identifier.labels):
        raise ValueError(f"annotate: py3langid does not identify {', '.join(sorted(unknown))}; give --language")
    identifier.set_languages(languages)
    return identifier


# -- quality -----------------------------------------------------------------------------------------------------------

QUIETEST = -100.0
"""dB that digital silence counts as, so that every level is a number."""
AUDIBLE = 60.0
"""dB below the strongest frequency down to which a frequency belongs to the bandwidth."""
FFT = 1024


@dataclass(frozen=True)
class Quality:
    """{"mos"?, "level", "snr", "clipped", "silent", "bandwidth"} of each segment, at the rate of the recording.

    mos: that of the model. level: dB of full scale. clipped, silent: shares of samples and frames, see
    `audiorl.eval.metrics.speech`. snr and bandwidth: see the functions below.
    """

    model: QualityModel | None
    name: str = "quality"
    needs: tuple[str, ...] = ("segments",)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"model": None if self.model is None else self.model.name}

    def __call__(self, recording: Recording) -> list[dict[str, float]]:
        rows = []
        for span in recording.results["segments"]:
            row = waveform_quality(recording.native(span), recording.rate)
            if self.model is not None:
                row = {"mos": round(self.model.rate([recording.read(span)], RATE)[0], 3), **row}
            rows.append(row)
        return rows


def waveform_quality(wav: np.ndarray, rate: int) -> dict[str, float]:
    """Measure samples [T] at `rate` Hz."""
    return {
        "level": round(max(level(wav), QUIETEST), 2),
        "snr": round(snr(wav, rate), 2),
        "clipped": round(clipped_share(wav), 6),
        "silent": round(silent_share(wav, rate), 4),
        "bandwidth": round(bandwidth(wav, rate)),
    }


def snr(wav: np.ndarray, rate: int) -> float:
    """Estimate in dB of speech over noise: the 95th percentile of the levels of 25 ms frames minus the 5th.

    Without pauses, and for noise that is not steady, it is too low. After NIST's STNR, which takes both levels from a
    histogram of frame powers.
    """
    levels = np.maximum(frame_levels(wav, rate), QUIETEST)
    if not len(levels):
        return 0.0
    return float(np.percentile(levels, 95) - np.percentile(levels, 5))


def bandwidth(wav: np.ndarray, rate: int) -> float:
    """Return the highest frequency in Hz whose mean power is at most AUDIBLE dB below that of the strongest; 0 for
    silence.

    Telephone speech that was resampled to 48 kHz has about 4000.
    """
    filled = np.pad(wav.astype(np.float64), (0, max(0, FFT - len(wav))))
    frames = np.lib.stride_tricks.sliding_window_view(filled, FFT)[:: FFT // 2]
    powers = (np.abs(np.fft.rfft(frames * np.hanning(FFT), axis=-1)) ** 2).mean(0)
    if powers.max() <= 0:
        return 0.0
    return float(np.nonzero(powers >= powers.max() * 10 ** (-AUDIBLE / 10))[0][-1] * rate / FFT)


# -- captions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captions:
    """A text for each span of the stage `spans`, "segments" or "sounds"."""

    captioner: Captioner
    spans: str = "segments"

    @property
    def name(self) -> str:
        return f"captions of {self.spans}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.spans,)

    @property
    def settings(self) -> Mapping[str, Any]:
        path = self.captioner.path
        return {"model": path, "files": files_mark(path), "prompt": self.captioner.prompt}

    def __call__(self, recording: Recording) -> list[str]:
        spans = recording.results[self.spans]
        texts: list[str] = []
        for start in range(0, len(spans), BATCH):
            batch = spans[start : start + BATCH]
            waves = [recording.read(span) for span in batch]
            with recording.naming(batch):
                texts += self.captioner.describe(waves, RATE)
        return texts

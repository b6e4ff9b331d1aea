"""Spoken interpretation of streams, judged by what is heard: a transcript, the voice, and how long it lasts.

Quality is that of the transcripts (ASR-BLEU, …). Voices are compared by a speaker encoder: a translation is to sound
like the speaker of its source, more than like the other speakers of the set. In a stream of several speakers this is
asked of each: the text of the policy says whose words a turn translates, and its speech is to be in that voice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.eval._judging import Judges
from audiorl.eval.metrics.corpus import bootstrap_interval, estimate
from audiorl.eval.metrics.latency import latency_unit, text_units
from audiorl.eval.metrics.longform import chunks, soft_cuts
from audiorl.eval.metrics.text import normalize
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.tasks.simul.quality import NAMES, default_quality, quality_counts
from audiorl.tasks.simul.streams import Stream
from audiorl.types import Rollout

DURATION_TOLERANCE = 0.2
"""A turn's speech may last so much longer or shorter than its reference, relative to it."""
MAX_WORDS_PER_SECOND = 5
"""Nobody says more; a recogniser that repeats itself for ever does. What it writes beyond that is cut off."""
RATE = 16_000
"""Hz, of the sources for the speaker encoder."""
Interval = tuple[float, float]


def measure_spoken(
    streams: Sequence[Stream], rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder, judges: Judges
) -> tuple[dict[str, Any], list[str]]:
    """Scores, with their 95 % bootstrap intervals over streams in `intervals`, and the transcripts, raw.

    With a recogniser ASR-BLEU and the other qualities of `default_quality`, ASR-LengthRatio, and ASR-Cut, the share of
    transcripts with more than MAX_WORDS_PER_SECOND, of which the rest is not counted. With an encoder
    SourceSimilarity, and where there are several speakers those of `own_voice`, by stream and speaker. Where streams
    have several, OwnVoiceInStream: whether a speaker's translation is nearer to the own source than to any other of the
    same stream; and MixedTurns, the share of spoken turns that translate several at once, which no voice is compared
    with. Always those of `durations`. Raises ValueError for a stream without reference.
    """
    waves = speech_decoder.waveforms(rollouts)
    spoken = [np.zeros(0, np.float32) if wav is None else wav for wav in waves]
    scores: dict[str, Any] = {}
    intervals: dict[str, Interval] = {}
    transcripts: list[str] = []
    if judges.recogniser:
        texts = judges.recogniser.transcribe(spoken, speech_decoder.sample_rate)
        transcripts = [" ".join(text.split()) for text in texts]
        limits = [math.ceil(MAX_WORDS_PER_SECOND * len(wav) / speech_decoder.sample_rate) for wav in spoken]
        counted = [" ".join(text.split()[:limit]) for text, limit in zip(transcripts, limits, strict=True)]
        asr, intervals = transcript_quality(counted, [s.reference for s in streams], streams[0].target_language)
        scores |= asr | {"ASR-Cut": float(np.mean([a != b for a, b in zip(counted, transcripts, strict=True)]))}
    if judges.encoder:
        parts, mixed = speaker_parts(streams, rollouts, speech_decoder)
        if mixed:
            scores["MixedTurns"], intervals["MixedTurns"] = float(np.mean(mixed)), bootstrap_interval(mixed)
        sources = np.asarray(judges.encoder.embed([part.source for part in parts], RATE))
        voices = np.asarray(judges.encoder.embed([part.spoken for part in parts], speech_decoder.sample_rate))
        values_of = own_voice(voices, sources, [part.speaker for part in parts])
        values_of |= own_voice_in_stream(voices, sources, [part.stream for part in parts])
        for name, values in values_of.items():
            scores[name], intervals[name] = float(np.mean(values)), bootstrap_interval(values)
    for name, values in durations(rollouts, speech_decoder).items():
        scores[name], intervals[name] = float(np.mean(values)), bootstrap_interval(values)
    return scores | {"intervals": {name: list(interval) for name, interval in intervals.items()}}, transcripts


def transcript_quality(
    transcripts: Sequence[str], references: Sequence[str], language: str
) -> tuple[dict[str, float], dict[str, Interval]]:
    """ASR-BLEU, ASR-chrF, … of transcripts, and their intervals.

    Both sides go through Whisper's multilingual normaliser, which spells numbers out: references in words, as they are
    said, do not compare with digits. SimulEval only drops case and punctuation.
    """
    said, wanted = ([normalize(text, "basic", language) for text in texts] for texts in (transcripts, references))
    scores: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    metrics: dict[str, str] = {metric: NAMES[metric] for metric in default_quality(language)}
    for metric, name in (metrics | {"length_ratio": "LengthRatio"}).items():
        counts_NK, score = quality_counts(metric, said, wanted, language)
        quality = estimate(counts_NK, score)
        scores[f"ASR-{name}"], intervals[f"ASR-{name}"] = quality.value, (quality.low, quality.high)
    return scores, intervals


@dataclass(frozen=True)
class SpeakerPart:
    """What a speaker says in a stream, and its translation."""

    stream: int
    speaker: str
    source: NDArray[np.float32]
    """float32 [T] at RATE Hz."""
    spoken: NDArray[np.float32]
    """float32 [T] at the codec's rate."""


def speaker_parts(
    streams: Sequence[Stream], rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder
) -> tuple[list[SpeakerPart], list[float]]:
    """The parts that have speech; and of each spoken turn in streams of several speakers, 1.0 if it translates several.

    A stream of one speaker is a part.
    """
    parts, mixed = [], []
    for index, (stream, rollout) in enumerate(zip(streams, rollouts, strict=True)):
        waves, source = speech_decoder.by_segment(rollout), stream.audio.load(RATE)
        speakers = sorted({u.speaker for u in stream.units if u.target})
        if len(speakers) < 2:
            whole = speech_decoder.waveform(rollout)
            speaker = str(stream.metadata.get("speaker", "")) or next(iter(speakers), "")
            parts += [] if whole is None else [SpeakerPart(index, speaker, source, whole)]
            continue
        owners = turn_speakers(stream, rollout)
        mixed += [float(len(of_turn) > 1) for of_turn, wav in zip(owners, waves, strict=True) if len(wav)]
        for speaker in speakers:
            said = [wav for of_turn, wav in zip(owners, waves, strict=True) if of_turn == {speaker} and len(wav)]
            own = [source[round(u.start * RATE) : round(u.end * RATE)] for u in stream.units if u.speaker == speaker]
            if said:
                parts.append(SpeakerPart(index, speaker, np.concatenate(own), np.concatenate(said)))
    return parts, mixed


def turn_speakers(stream: Stream, rollout: Rollout) -> list[set[str]]:
    """Whose words each turn translates: its text is aligned with the units' translations (`soft_cuts`)."""
    unit = latency_unit(stream.target_language)
    units = [u for u in stream.units if u.target]
    written = [text_units(segment.text, unit) for segment in rollout.segments]
    words = [word for turn in written for word in turn]
    pieces = chunks(range(len(words)), soft_cuts([text_units(u.target, unit) for u in units], words, unit))
    speaker_of_word = [u.speaker for u, piece in zip(units, pieces, strict=True) for _ in piece]
    ends = np.cumsum([len(turn) for turn in written])
    return [set(speaker_of_word[end - len(turn) : end]) for end, turn in zip(ends, written, strict=True)]


def own_voice_in_stream(
    voices_ND: NDArray[np.float32], sources_ND: NDArray[np.float32], streams: Sequence[int]
) -> dict[str, list[float]]:
    """OwnVoiceInStream of each part with others in its stream: 1 where no other source is nearer than the own."""
    cosines_NN = voices_ND @ sources_ND.T
    values = []
    for i, stream in enumerate(streams):
        others = [cosines_NN[i, j] for j, other in enumerate(streams) if other == stream and j != i]
        if others:
            values.append(float(cosines_NN[i, i] >= max(others)))
    return {"OwnVoiceInStream": values} if values else {}


def own_voice(
    voices_ND: NDArray[np.float32], sources_ND: NDArray[np.float32], speakers: Sequence[str]
) -> dict[str, list[float]]:
    """By part, from embeddings of length 1 of N translations and of their sources:

    SourceSimilarity: cosine of the translation and its source. Of parts whose speaker has others, and where there are
    several speakers: OwnSimilarity, the mean cosine with that speaker's other sources; OtherSimilarity, the same of the
    other speakers, as the mean over them; SimilarityDifference between the two; OwnVoice, 1 where no other speaker's
    mean is above the own.
    """
    cosines_NN = voices_ND @ sources_ND.T
    values: dict[str, list[float]] = {"SourceSimilarity": np.diag(cosines_NN).tolist()}
    names = sorted(set(speakers))
    if len(names) < 2 or "" in names:
        return values
    for i, speaker in enumerate(speakers):
        means = {
            name: np.mean(
                [cosines_NN[i, j] for j, other in enumerate(speakers) if other == name and j != i] or [np.nan]
            )
            for name in names
        }
        own, others = means.pop(speaker), list(means.values())
        if np.isnan(own):
            continue
        columns = {
            "OwnSimilarity": own,
            "OtherSimilarity": np.mean(others),
            "SimilarityDifference": own - np.mean(others),
            "OwnVoice": float(own >= max(others)),
        }
        for name, value in columns.items():
            values.setdefault(name, []).append(float(value))
    return values


def durations(rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder) -> dict[str, list[float]]:
    """DurationWithin20: of each turn that has a spoken reference and is spoken, whether its speech lasts as long, to
    20 %. DurationRatio: of each stream, all speech over that of all references."""
    within, ratios = [], []
    for rollout in rollouts:
        seconds = [len(wav) / speech_decoder.sample_rate for wav in speech_decoder.by_segment(rollout)]
        wanted = [turn.reference_seconds or 0.0 for turn in rollout.sample.turns]
        pairs = [(a, b) for a, b in zip(seconds, wanted, strict=True) if a and b]
        within += [float(abs(a - b) <= DURATION_TOLERANCE * b) for a, b in pairs]
        if sum(wanted):
            ratios.append(sum(seconds) / sum(wanted))
    return {name: values for name, values in (("DurationWithin20", within), ("DurationRatio", ratios)) if values}

"""Spoken interpretation: the transcript's quality, whose voice it is, how long it lasts; judged by what is heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.eval._common import Judges
from audiorl.eval._streams import durations, measure_spoken, own_voice, speaker_parts, transcript_quality, turn_speakers
from audiorl.tasks.simul.streams import Stream, Unit, interpretation_sample
from audiorl.types import Rollout
from tests.support.step_codec import DECODER, said


class Listener:
    """Transcribes by the level, and embeds a voice as the direction of its level."""

    def transcribe(self, waveforms: Sequence[Any], sample_rate: int, languages: Any = None) -> list[str]:
        return ["37 minutes" if len(w) and w.max() < 0.15 else "" for w in waveforms]

    def embed(self, waveforms: Sequence[Any], sample_rate: int) -> np.ndarray:
        angles = np.array([10 * np.abs(w).max() for w in waveforms])
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def stream(name: str, level: float, speaker: str) -> Stream:
    clip = AudioClip(array=np.full(16_000, level, np.float32), sample_rate=16_000)
    units = (Unit(0.0, 0.9, "thirty seven minutes", "x", 1.0),)
    return Stream(name, clip, 1.0, units, "es", "en", {"speaker": speaker})


def spoken(source: Stream, code: int, frames: int) -> Rollout:
    sample = interpretation_sample(source)
    return Rollout(sample, (said(1.0, *[code] * frames),) * len(sample.turns), "g")


STREAMS = [stream("a", 0.1, "low"), stream("b", 0.1, "low"), stream("c", 0.2, "high"), stream("d", 0.2, "high")]


def test_what_is_said_in_whose_voice_and_how_long() -> None:
    rollouts = [spoken(s, code, frames) for s, code, frames in zip(STREAMS, (1, 1, 2, 1), (10, 12, 13, 5), strict=True)]
    judge = Listener()
    scores, transcripts = measure_spoken(STREAMS, rollouts, DECODER, Judges(judge, judge))  # type: ignore[arg-type]
    assert transcripts == ["37 minutes", "37 minutes", "", "37 minutes"]
    assert scores["ASR-TER"] == pytest.approx(25) and 50 < scores["ASR-WordF1"] < 100
    assert scores["OwnVoice"] == 0.75  # the last stream's translation is in the other voice
    assert scores["DurationWithin20"] == 0.5  # 1.0 and 1.2 of 1 s, not 1.3 and 0.5
    assert scores["DurationRatio"] == pytest.approx(1.0)
    low, high = scores["intervals"]["SimilarityDifference"]
    assert low < scores["SimilarityDifference"] < high
    assert {*scores["intervals"]} == {*scores} - {"intervals", "ASR-Cut"} and scores["ASR-Cut"] == 0


def test_a_recogniser_that_repeats_itself_counts_as_far_as_anybody_could_speak() -> None:
    """Of 1 s five words are counted, of 0.1 s one."""
    listener = Listener()
    listener.transcribe = lambda waves, rate, languages=None: ["thirty seven minutes minutes minutes minutes"] * 2  # type: ignore[method-assign]
    rollouts = [spoken(STREAMS[0], 1, 10), spoken(STREAMS[1], 1, 1)]
    scores, transcripts = measure_spoken(STREAMS[:2], rollouts, DECODER, Judges(listener))  # type: ignore[arg-type]
    assert scores["ASR-Cut"] == 1 and scores["ASR-LengthRatio"] == (5 + 1) / 6
    assert transcripts == ["thirty seven minutes minutes minutes minutes"] * 2


def test_without_judges_only_durations() -> None:
    scores, transcripts = measure_spoken(STREAMS[:1], [spoken(STREAMS[0], 1, 10)], DECODER, Judges())
    assert transcripts == [] and {*scores} == {"DurationWithin20", "DurationRatio", "intervals"}


def test_a_recogniser_may_write_numbers_as_it_likes() -> None:
    for language, text, words in (
        ("en", "37 Minutes!", "thirty seven minutes"),
        ("es", "7 mensajes", "siete mensajes"),
    ):
        scores, intervals = transcript_quality([text], [words], language)
        assert scores["ASR-TER"] == 0 and scores["ASR-LengthRatio"] == 1 and intervals["ASR-TER"] == (0, 0)


def test_voices_are_compared_with_other_streams_of_the_speaker() -> None:
    """The translation of a stream is like its source, but of the speaker's other stream it knows nothing."""
    voices, sources = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)
    values = own_voice(voices, sources, ["a", "a", "b"])
    assert values["SourceSimilarity"] == [1, 1, 1]
    assert values["OwnSimilarity"] == [0, 0]  # "b" has one stream
    assert set(own_voice(voices, sources, ["a", "a", "a"])) == {"SourceSimilarity"}
    assert set(own_voice(voices, sources, ["", "a", "b"])) == {"SourceSimilarity"}


def test_a_turn_without_reference_or_speech_has_no_duration() -> None:
    without = replace(STREAMS[0], units=(replace(STREAMS[0].units[0], target_seconds=None),))
    assert durations([spoken(without, 1, 10)], DECODER) == {}


def test_in_a_stream_of_two_speakers_each_is_to_have_the_own_voice() -> None:
    """ "low" is translated after the first and third second, "high" after the second, both after the fourth."""
    levels = {"low": 0.1, "high": 0.2}
    order, words = ("low", "high", "low", "high", "low"), ("one", "two", "three", "four", "five")
    units = tuple(
        Unit(k, k + 0.9, word, "x", 1.0, None, who) for k, (word, who) in enumerate(zip(words, order, strict=True))
    )
    level = np.repeat([levels[who] for who in order], 16_000).astype(np.float32)
    source = Stream("talk", AudioClip(array=level, sample_rate=16_000), 5.0, units, "es", "en")
    texts, codes = ("one", "two", "three", "four five"), (1, 1, 1, 2)
    turns = tuple(
        replace(said(t, *[code] * 10), text=text) for t, (text, code) in enumerate(zip(texts, codes, strict=True), 1)
    )
    rollout = Rollout(
        interpretation_sample(source), (*turns, *[said(5.0)] * (len(interpretation_sample(source).turns) - 4)), "g"
    )
    assert turn_speakers(source, rollout) == [
        {"low"},
        {"high"},
        {"low"},
        {"low", "high"},
        *[set()] * (len(rollout.segments) - 4),
    ]
    parts, mixed = speaker_parts([source], [rollout], DECODER)
    assert mixed == [0, 0, 0, 1]
    assert [(p.speaker, len(p.spoken), p.source.max()) for p in parts] == [
        ("high", 100, np.float32(0.2)),
        ("low", 200, np.float32(0.1)),
    ]
    scores, _ = measure_spoken([source], [rollout], DECODER, Judges(encoder=Listener()))  # type: ignore[arg-type]
    assert scores["OwnVoiceInStream"] == 0.5 and scores["MixedTurns"] == 0.25  # the turn of "high" is in the low voice
    silent = Rollout(rollout.sample, (said(1.0),), "g")
    assert speaker_parts([source], [silent], DECODER) == ([], []) and turn_speakers(source, silent) == [set()]

"""Spoken interpretation: the transcript's quality, whose voice it is, how long it lasts; judged by what is heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.eval._common import Judges
from audiorl.eval._streams import measure_spoken, own_voice, said_in, speaker_parts, turn_speakers
from audiorl.tasks.simul.streams import Stream, Unit, interpretation_sample
from audiorl.types import Rollout
from tests.support.step_codec import DECODER, said


class Listener:
    """Transcribes by the level, and embeds a voice as the direction of its level."""

    def __init__(self, text: str = "37 minutes"):
        self.text = text

    def transcribe(self, waveforms: Sequence[Any], sample_rate: int, languages: Any = None) -> list[str]:
        return [self.text if len(w) and w.max() < 0.15 else "" for w in waveforms]

    def embed(self, waveforms: Sequence[Any], sample_rate: int) -> np.ndarray:
        angles = np.array([10 * np.abs(w).max() for w in waveforms])
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def stream(name: str, level: float, speaker: str, seconds: float | None = 1.0) -> Stream:
    clip = AudioClip(array=np.full(16_000, level, np.float32), sample_rate=16_000)
    units = (Unit(0.0, 0.9, "thirty seven minutes", "x", seconds),)
    return Stream(name, clip, 1.0, units, "es", "en", {"speaker": speaker})


def spoken(source: Stream, code: int, frames: int) -> Rollout:
    sample = interpretation_sample(source)
    return Rollout(sample, (said(1.0, *[code] * frames),) * len(sample.turns), "g")


STREAMS = [stream("a", 0.1, "low"), stream("b", 0.1, "low"), stream("c", 0.2, "high"), stream("d", 0.2, "high")]


def test_what_is_said_in_whose_voice_and_how_long() -> None:
    rollouts = [spoken(s, code, frames) for s, code, frames in zip(STREAMS, (1, 1, 2, 1), (10, 12, 13, 5), strict=True)]
    judge: Any = Listener()
    scores, transcripts = measure_spoken(STREAMS, rollouts, DECODER, Judges(judge, judge))
    assert transcripts == ["37 minutes", "37 minutes", "", "37 minutes"]  # numbers as the recogniser likes
    assert scores["ASR-TER"] == pytest.approx(25) and 50 < scores["ASR-WordF1"] < 100
    assert scores["OwnVoice"] == 0.75  # the last stream's translation is in the other voice
    assert scores["DurationWithin20"] == 0.5  # 1.0 and 1.2 of 1 s, not 1.3 and 0.5
    assert scores["DurationRatio"] == pytest.approx(1.0)
    low, high = scores["intervals"]["SimilarityDifference"]
    assert low < scores["SimilarityDifference"] < high
    assert {*scores["intervals"]} == {*scores} - {"intervals", "ASR-Cut"} and scores["ASR-Cut"] == 0
    scores, transcripts = measure_spoken(STREAMS[:1], rollouts[:1], DECODER, Judges())
    assert transcripts == [] and {*scores} == {"DurationWithin20", "DurationRatio", "intervals"}
    without = stream("a", 0.1, "low", None)
    assert measure_spoken([without], [spoken(without, 1, 10)], DECODER, Judges())[0] == {"intervals": {}}


def test_a_recogniser_that_repeats_itself_counts_as_far_as_anybody_could_speak() -> None:
    """Of 1 s five words are counted, of 0.1 s one; of Chinese twelve characters and two."""
    judge: Any = Listener("thirty seven minutes minutes minutes minutes")
    rollouts = [spoken(STREAMS[0], 1, 10), spoken(STREAMS[1], 1, 1)]
    scores, transcripts = measure_spoken(STREAMS[:2], rollouts, DECODER, Judges(judge))
    assert scores["ASR-Cut"] == 1 and scores["ASR-LengthRatio"] == (5 + 1) / 6
    assert transcripts == [judge.text] * 2
    assert [said_in(seconds, "好 " * 20, "zh") for seconds in (1, 0.1, 2)] == ["好" * 12, "好" * 2, "好 " * 20]
    assert said_in(1, "用 Deep Learning 吧", "zh") == "用Deep Learnin" and said_in(1, "ก" * 30, "th") == "ก" * 24


def test_voices_are_compared_with_other_streams_of_the_speaker() -> None:
    """The translation of a stream is like its source, but of the speaker's other stream it knows nothing."""
    cosines = np.eye(3, dtype=np.float32)
    values = own_voice(cosines, ["a", "a", "b"], range(3))
    assert values["SourceSimilarity"] == [1, 1, 1]
    assert values["OwnSimilarity"] == [0, 0]  # "b" has one stream
    for speakers in (["a", "a", "a"], ["", "a", "b"]):
        assert set(own_voice(cosines, speakers, range(3))) == {"SourceSimilarity"}


def test_in_a_stream_of_two_speakers_each_is_to_have_the_own_voice() -> None:
    """ "low" is translated after the first and third second, "high" after the second, both after the fourth."""
    levels = {"low": 0.1, "high": 0.2}
    order, words = ("low", "high", "low", "high", "low"), ("one", "two", "three", "four", "five")
    units = tuple(Unit(k, k + 0.9, words[k], "x", 1.0, None, order[k]) for k in range(5))
    level = np.repeat([levels[who] for who in order], 16_000).astype(np.float32)
    source = Stream("talk", AudioClip(array=level, sample_rate=16_000), 5.0, units, "es", "en")
    sample = interpretation_sample(source)
    written = (("one", 1), ("two", 1), ("three", 1), ("four five", 2))
    turns = [replace(said(t, *[code] * 10), text=text) for t, (text, code) in enumerate(written, 1)]
    turns += [said(5.0)] * (len(sample.turns) - 4)
    rollout = Rollout(sample, tuple(turns), "g")
    owners = turn_speakers(source, rollout)
    assert owners[:4] == [{"low"}, {"high"}, {"low"}, {"low", "high"}] and not any(owners[4:])
    parts, mixed = speaker_parts([source], [rollout], DECODER)
    assert mixed == [0, 0, 0, 1]
    found = [(p.speaker, len(p.spoken), p.source.max()) for p in parts]
    assert found == [("high", 100, np.float32(0.2)), ("low", 200, np.float32(0.1))]
    judge: Any = Listener()
    scores, _ = measure_spoken([source], [rollout], DECODER, Judges(encoder=judge))
    assert scores["OwnVoiceInStream"] == 0.5 and scores["MixedTurns"] == 0.25  # the turn of "high" is in the low voice
    silent = Rollout(rollout.sample, (said(1.0),), "g")
    assert speaker_parts([source], [silent], DECODER) == ([], []) and turn_speakers(source, silent) == [set()]

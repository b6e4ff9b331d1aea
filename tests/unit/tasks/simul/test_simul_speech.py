"""Interpretation that is heard: recorded translations in streams, tracks of what was said, and their logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip, seconds
from audiorl.data.silence import trimmed
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.formats import read_streams, write_streams
from audiorl.tasks.simul.logs import playback_track, read_log, write_speech_log
from audiorl.tasks.simul.scoring import score
from audiorl.tasks.simul.streams import interpretation_sample
from audiorl.types import Rollout, Sample, Segment, Turn
from tests.support.step_codec import DECODER, said

CLIP = AudioClip(array=np.zeros(16_000, np.float32), sample_rate=16_000)


def interpreted(*segments: Segment) -> Rollout:
    turns = tuple(Turn(CLIP, s.source_time or 0.0, "hola") for s in segments)
    sample = Sample("talk", (), ("hola hola",), metadata={"seconds": turns[-1].end}, turns=turns)
    return Rollout(sample, segments, "g")


def test_speech_is_played_when_it_is_ready_and_the_one_before_is_over() -> None:
    """At 100 Hz: 15 frames, 1.5 s, are ready after 1 s; the next 2 wait until 2.5 s; the last are on the dot at 4 s."""
    rollout = interpreted(said(1.0, *[1] * 15), said(2.0, 2, 2), said(3.0), said(4.0, 3))
    track, intervals = playback_track(rollout, DECODER)
    assert intervals == [(1000, 1500), (2500, 200), (4000, 100)]
    assert len(track) == 410
    expected = np.concatenate([np.zeros(100), np.full(150, 0.1), np.full(20, 0.2), np.zeros(130), np.full(10, 0.3)])
    np.testing.assert_allclose(track, expected, atol=1e-6)


def test_nothing_said_is_an_empty_track(tmp_path: Path) -> None:
    silent = interpreted(said(1.0), said(2.0))
    track, intervals = playback_track(silent, DECODER)
    assert len(track) == 0 and intervals == []
    write_speech_log(tmp_path, [silent], DECODER)
    (instance,) = read_log(tmp_path)
    assert instance.delays == () and instance.prediction_length == 0


def test_the_log_is_one_that_the_scorers_read(tmp_path: Path) -> None:
    rollouts = [interpreted(said(1.0, *[1] * 15), said(2.0, 2, 2)), interpreted(said(1.0), said(2.0, 3, 3, 3))]
    paths = write_speech_log(tmp_path, rollouts, DECODER)
    wav, rate = soundfile.read(paths[0])
    assert rate == 100 and len(wav) == 270
    first, second = read_log(tmp_path)
    assert first.delays == (1000, 2000) and first.durations == (1500, 200) and first.prediction_offset == 1000
    assert first.intervals == ((1000, 1500), (2500, 200)) and first.prediction_length == pytest.approx(2.7)
    assert second.delays == (2000,) and second.source_length == 2000
    scores = score([first, second], "speech", "es", transcripts=["hola hola", "hola hola"])
    assert scores["StartOffset"] == 1500 and scores["NumChunks"] == 1.5


def test_streams_know_the_recordings_of_their_translations(tmp_path: Path) -> None:
    (stream,) = bundled_streams("train", "es", count=1, seconds=(3, 5))
    for unit in stream.units:
        assert unit.target_audio is not None and unit.target_seconds is not None
        assert seconds(unit.target_audio) == pytest.approx(unit.target_seconds)
        wav = unit.target_audio.load(16_000)
        assert abs(len(trimmed(wav)) - len(wav)) <= 1600 and np.abs(wav).max() > 0.01
    sample = interpretation_sample(stream)
    assert [c.key for t in sample.turns for c in t.speech] == [
        u.target_audio.key for u in stream.units if u.target_audio is not None
    ]
    written = write_streams(tmp_path, [stream])
    (again,) = read_streams(tmp_path).samples
    for a, b in zip(written[0].units, again.units, strict=True):
        assert a.target_audio is not None and b.target_audio is not None
        np.testing.assert_array_equal(a.target_audio.load(16_000), b.target_audio.load(16_000))


def test_a_translation_in_memory_becomes_a_file(tmp_path: Path) -> None:
    (stream,) = bundled_streams("train", "es", count=1, seconds=(3, 5))
    tone = AudioClip(array=np.sin(np.arange(8000) / 10).astype(np.float32) / 2, sample_rate=16_000)
    own = replace(stream, units=(replace(stream.units[0], target_audio=tone), *stream.units[1:]))
    write_streams(tmp_path, [own])
    (again,) = read_streams(tmp_path).samples
    found = again.units[0].target_audio
    assert found is not None and found.path is not None
    np.testing.assert_allclose(found.load(16_000), tone.load(16_000), atol=1e-4)


@pytest.mark.parametrize(
    ("value", "message"),
    [("a.wav", "target_audio.*give {path"), ({"path": ""}, "target_audio"), ({"path": "a", "start": -1}, "start")],
)
def test_a_translation_that_is_no_recording(tmp_path: Path, value: object, message: str) -> None:
    soundfile.write(tmp_path / "a.wav", np.full(32_000, 0.1, np.float32), 16_000)
    unit = {"start": 0, "end": 1, "target": "hola", "target_audio": value}
    row = {"id": "a", "audio": "a.wav", "source_language": "en", "target_language": "es", "units": [unit]}
    (tmp_path / "streams.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        read_streams(tmp_path)

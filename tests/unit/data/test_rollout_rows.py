"""Recorded rollouts give back everything that a reward may look at."""

import io
import json
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.audio import AudioClip
from audiorl.data.rollout_rows import file_bytes, read_rollouts, rollout_row
from audiorl.data.rows import Row, read_rows, write_json_lines
from audiorl.rewards.replay import replay
from audiorl.tasks.simul.streams import ChunkConfig, Stream, Unit, interpretation_sample
from audiorl.types import Message, Rollout, Sample, Score, Segment


def same(a: Any, b: Any) -> bool:
    """Equal in every field, tensors to the bit; clips by what they load, with and without context."""
    if isinstance(a, AudioClip):
        return np.array_equal(a.load(), b.load()) and np.array_equal(a.with_context().load(), b.with_context().load())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return (bool(a == b) and type(a) is type(b)) or (a != a and b != b)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, round(16_000 * seconds)).astype(np.float32)


def segment(text: str, *audio: AudioClip, **more: Any) -> Segment:
    return Segment(torch.arange(5), torch.arange(3), torch.tensor([-0.5, -1.25, -1e-8]), text, audio, **more)


def write(folder: Path, *rollouts: Rollout, step: int = 1) -> Path:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(rollout_row(r, step, 0.5, folder)) + "\n" for r in rollouts))
    return path


def test_an_answer_comes_back_whole(tmp_path: Path) -> None:
    clip = AudioClip(array=noise(0.5), sample_rate=16_000, start=0.1, duration=0.2)
    sample = Sample(
        "q",
        (Message("system", ("Be brief.",)), Message("user", ("Listen: ", clip, " What is it?"))),
        references=("dog", "a dog"),
        choices=("cat", "dog"),
        task="sound",
        metadata={"n": 3, "list": [1, {"deep": (2.5, None)}], "reference_audio": "a.wav", "nan": float("nan")},
    )
    codes = {"codes": torch.arange(6).view(3, 2), "code_mask": torch.ones(3, 2, dtype=torch.bool)}
    codes |= {"prompt_codes": torch.full((5, 2), -1)}
    score = Score(1.5, {"a": 1.0}, (0.5,), (0.0, 0.0, 0.5), {"a": (float("nan"),)})
    rollout = Rollout(sample, (segment("a dog", clip, stop_reason="length", **codes),), "7/2", 3, score)
    (read,) = read_rollouts(write(tmp_path, rollout, replace(rollout, index=4)))[:1]
    assert same(read, rollout)
    assert len(list((tmp_path / "rollouts" / "audio").iterdir())) == 1  # both rows share the file
    row = json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert row["sample"]["prompt"] == "Be brief.\nListen: [audio] What is it?" and row["text"] == "a dog"
    unknown = replace(sample, metadata={"object": object(), "kept": 1})
    assert read_rollouts(write(tmp_path, replace(rollout, sample=unknown)))[0].sample.metadata == {"kept": 1}


def test_a_channel_comes_back(tmp_path: Path) -> None:
    """Of a file and of an array, in the clips themselves and in those for people; channel 0 is no missing channel."""
    both = np.stack([noise(0.5, 1), noise(0.5, 2)], 1)
    soundfile.write(tmp_path / "s.wav", both, 16_000, subtype="FLOAT")
    clips = [AudioClip(path=str(tmp_path / "s.wav"), start=0.25 * k, duration=0.25, channel=k) for k in (0, 1)]
    clips += [AudioClip(array=both, sample_rate=16_000, channel=channel) for channel in (1, (0, 1))]
    rollout = Rollout(Sample("q", (Message("user", tuple(clips)),)), (segment("a"),), "0/0")
    (read,) = read_rollouts(write(tmp_path, rollout))
    assert same(read, rollout)
    for sent, clip in zip(read.sample.audio, clips, strict=True):
        np.testing.assert_array_equal(sent.load(), clip.load())
    row = json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text())
    assert [clip["channel"] for clip in row["sample"]["audio"]] == [0, 1, 1, [0, 1]]


def test_a_stream_in_memory_comes_back_whole_from_one_file(tmp_path: Path) -> None:
    units = (Unit(0.1, 0.9, "hola", "hello", 0.5, AudioClip(array=noise(0.5, 1), sample_rate=16_000)),)
    stream = Stream("s", AudioClip(array=noise(2.3), sample_rate=16_000), 2.3, units, "en", "es")
    sample = interpretation_sample(stream, ChunkConfig(0.48, 0.96))
    segments = tuple(
        segment(f"{i}", t.audio, source_time=t.end, emit_time=t.end + 0.1) for i, t in enumerate(sample.turns)
    )
    rollout = Rollout(sample, segments, "0/0", score=Score(-1.0))
    (read,) = read_rollouts(write(tmp_path, rollout))
    assert same(read, rollout) and len(read.sample.turns) == 5
    assert len(list((tmp_path / "rollouts" / "audio").iterdir())) == 2  # the recording, and the reference's
    row = json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text())
    (clip,) = row["sample"]["audio"]
    assert clip["start"] == 0 and clip["duration"] == pytest.approx(2.3)


def test_replay_reads_patterns_step_by_step(tmp_path: Path) -> None:
    sample = Sample("q", (Message("user", ("?",)),))

    def answer(text: str, total: float) -> Rollout:
        return Rollout(sample, (segment(text),), "g", score=Score(total, {"length": total}))

    write(tmp_path, answer("ab", 2.0), answer("", 0.0))
    write(tmp_path, answer("abc", 3.0), step=2)
    batches: list[int] = []

    def length(rollouts: Any) -> list[Score | None]:
        batches.append(len(rollouts))
        return [Score(float(len(r.text)), {"length": 0.0}) if r.text else None for r in rollouts]

    result = replay(length, [str(tmp_path / "rollouts" / "*.jsonl"), tmp_path / "rollouts" / "step_000001.jsonl"])
    assert batches == [2, 1] and [f.name[:11] for f in result.files] == ["step_000001", "step_000001", "step_000002"]
    assert [s and s.total for s in result.scores] == [2.0, None, 3.0]
    assert result.correlation() == pytest.approx(1.0) and all(old == new for old, new in result.totals().values())
    with pytest.raises(ValueError, match="no file matches it as a pattern"):
        replay(length, str(tmp_path / "none" / "*.jsonl"))
    file = tmp_path / "mine.py"
    file.write_text("def reward(rollout): return {'ab': 1.0}[rollout.text]")
    where = (
        r"step_000001\.jsonl: reward file '.*mine\.py', function 'reward', sample 'q' \(group g, answer 0\): KeyError"
    )
    with pytest.raises(RuntimeError, match=where):
        replay(file, os.path.join(str(tmp_path), "rollouts", "*1.jsonl"))


def test_equal_audio_is_equal_bytes_at_any_time() -> None:
    """libsndfile writes the time of day into 32-bit float WAV; a resumed run writes the same files."""
    content = file_bytes(AudioClip(array=noise(0.1), sample_rate=16_000))
    peak = content.index(b"PEAK")
    assert content[peak + 12 : peak + 16] == bytes(4)
    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    assert rate == 16_000 and np.array_equal(samples, noise(0.1))


def test_half_a_character_does_not_stop_a_run(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [{"text": "a\ud83d", "language": "ελ"}, {"text": "b"}])
    rows = [row.data for row in read_rows(tmp_path / "rows.jsonl") if isinstance(row, Row)]
    assert rows == [{"text": "a?", "language": "ελ"}, {"text": "b"}]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

"""Rewards of sounds: a scene that is as asked earns 1, what is wrong earns less, by known amounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.audio import AudioClip
from audiorl.config.flow import FlowConfig
from audiorl.protocols import Request, Reward
from audiorl.recipes._sound import SoundRewards, sound_reward
from audiorl.rewards import FunctionReward, WeightedSum
from audiorl.rewards.combine import score_rollouts
from audiorl.rollout.flow import FlowEngine
from audiorl.speech_models.taggers import SoundTagger, TaggerNetwork
from audiorl.tasks.sound.places import delay_of, placed
from audiorl.tasks.sound.rewards import (
    Clean,
    EventPlaces,
    EventsHeard,
    EventTimes,
    SoundModels,
    SoundOfThought,
    ThoughtEvents,
)
from audiorl.tasks.sound.scenes import Event, write_thought
from audiorl.types import Message, Rollout, Sample, Segment
from tests.support.flows import asked, tiny_flow
from tests.unit.eval.metrics.test_metrics_sound import RATE, click

EVENTS = [
    {"name": "bell", "start": 0.5, "end": 0.55, "azimuth": -45.0},
    {"name": "cow", "start": 1.2, "end": 1.25, "azimuth": 30.0},
]
SAMPLE = Sample(
    "s", (Message("user", ("A bell, then a cow.",)),), metadata={"events": EVENTS, "duration": 2.0, "channels": 2}
)


def scene(*events: tuple[float, float], gain: float = 1.0) -> np.ndarray:
    """Clicks at (time, azimuth)."""
    out = np.zeros((2 * RATE, 2), np.float32)
    for time, azimuth in events:
        out += gain * placed(click(time), azimuth, RATE)[: 2 * RATE]
    return out


def rollout(wave: np.ndarray | None, text: str = "", sample: Sample = SAMPLE) -> Rollout:
    clip = None if wave is None else AudioClip(array=wave, sample_rate=RATE)
    empty = torch.zeros(0, dtype=torch.long)
    return Rollout(sample, (Segment(empty, empty, torch.zeros(0), text),), "g", spoken_audio=clip)


@dataclass(frozen=True)
class Told:
    """A tagger that says of every sound what it was told."""

    tags: tuple[float, ...]
    labels: tuple[str, ...] = ("bell", "cow", "dog")
    name: str = "told"

    def tag(self, waveforms: Sequence[Any], sample_rate: int) -> np.ndarray:
        assert all(w.ndim == 1 for w in waveforms)
        return np.array([self.tags for _ in waveforms])

    embed = tag


RIGHT = scene((0.5, -45), (1.2, 30))


@pytest.mark.parametrize(
    ("wave", "times", "places", "parts"),
    [
        (RIGHT, 1.0, 1.0, {"f1": 1.0, "lag": 0.0, "azimuth_error": 0.0, "delay_error": 0.0}),
        (scene((0.58, -45), (1.2, 30)), 2 * 1.84 / 3.84, None, {"f1": 1.0, "lag": 0.04}),
        (scene((0.5, -45), (1.2, 30), (1.7, 0)), 2 * 2 / 5, 1.0, {"f1": 4 / 5}),
        (scene((0.5, 45), (1.2, 30)), 1.0, 0.5, {"azimuth_error": 45.0, "delay_error": delay_of(45) * 1e6}),
        (scene((0.5, -45)), 2 / 3, 0.5, {"azimuth_error": 45.0, "lag": 0.25}),
        (np.zeros((2 * RATE, 2), np.float32), 0.0, 0.0, {"lag": 0.5, "azimuth_error": 90.0}),
        (None, 0.0, 0.0, {"lag": 0.5}),
    ],
)
def test_when_and_where(wave: np.ndarray | None, times: float, places: float | None, parts: dict[str, float]) -> None:
    sounds = SoundModels()
    reward = WeightedSum.of(times=EventTimes(sounds), places=EventPlaces(sounds), clean=Clean(sounds))
    (score,) = score_rollouts(reward, [rollout(wave)])
    assert score is not None
    assert score.parts["times"] == pytest.approx(times, abs=0.01)
    if places is not None:
        assert score.parts["places"] == pytest.approx(places, abs=0.01)
    found = {name.partition("/")[2]: value for name, value in score.parts.items()}
    assert {name: found[name] for name in parts} == pytest.approx(parts, abs=1.0 if "delay_error" in parts else 0.01)
    assert score.parts["clean"] == (1.0 if wave is not None and wave.any() else 0.0)


def test_the_reward_of_options(tmp_path: Path) -> None:
    SoundTagger(TaggerNetwork(2, 2).eval(), ("bell", "rain")).save(tmp_path / "tagger")
    (tmp_path / "reward.py").write_text("def reward(rollout):\n    return 1.0\n")
    tagger, file = {"tagger": str(tmp_path / "tagger")}, {"reward_file": str(tmp_path / "reward.py")}
    for given, channels, parts in (
        (tagger, 2, ["events", "times", "places", "clean"]),
        (tagger, 1, ["events", "times", "clean"]),
        (file, 1, ["user"]),
        ({**file, "parts": ("clean",)}, 2, ["clean", "user"]),
    ):
        found = sound_reward(SoundRewards(**given), channels, "cpu")  # type: ignore[arg-type]
        assert [term.name for term in found.terms] == parts
    found = sound_reward(SoundRewards(parts=("times", "places"), weights={"places": 3}), 2, "cpu")
    assert [term.weight for term in found.terms] == [1, 3]
    with pytest.raises(ValueError, match="--tagger: name a folder of `audiorl data train-tagger`"):
        sound_reward(SoundRewards(), 2, "cpu")
    with pytest.raises(ValueError, match="--weights: no part is called 'places'; there are events, times, clean"):
        sound_reward(SoundRewards(**tagger, weights={"places": 3}), 1, "cpu")  # type: ignore[arg-type]


def test_a_file_on_disk_keeps_its_channels(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", RIGHT, RATE)
    given = replace(rollout(None), spoken_audio=AudioClip(path=str(tmp_path / "a.wav")))
    (score,) = EventPlaces(SoundModels())([given])
    assert score.parts["azimuth_error"] < 0.5


@pytest.mark.parametrize(
    ("tags", "total", "recall", "precision"),
    [
        ((1.0, 1.0, 0.0), 1.0, 1.0, 1.0),
        ((1.0, 0.0, 0.0), 2 / 3, 0.5, 1.0),
        ((1.0, 1.0, 1.0), 4 / 5, 1.0, 2 / 3),
        ((0.0, 0.0, 0.5), 0.0, 0.0, 0.0),
    ],
)
def test_which_events(tags: tuple[float, ...], total: float, recall: float, precision: float) -> None:
    reward = EventsHeard(SoundModels(Told(tags)))
    heard, silent = reward([rollout(RIGHT), rollout(np.zeros((RATE, 2), np.float32))])
    assert heard.total == pytest.approx(total)
    assert heard.parts == pytest.approx({"recall": recall, "precision": precision})
    assert silent.total == 0.0


THOUGHT = write_thought([Event("bell", 0.5, 0.55, 0.0, -45.0), Event("cow", 1.2, 1.25, 0.0, 30.0)])


@pytest.mark.parametrize(
    ("text", "total", "parts"),
    [
        (THOUGHT, 1.0, {"names": 1, "times": 1, "places": 1}),
        (f"<think>{THOUGHT}</think>", 1.0, {"format": 1}),
        (THOUGHT.replace("0.50-0.55", "0.60-0.65"), (1 + 0.9 + 1) / 3, {"times": 0.9}),
        (THOUGHT.replace("left 45", "right 45"), (1 + 1 + 0.5) / 3, {"places": 0.5}),
        (THOUGHT.replace("cow", "dog"), (0.5 + 0.5 + 0.5) / 3, {"names": 0.5, "times": 0.5}),
        (THOUGHT.replace("temporal: bell", "temporal: cow"), 0.0, {"format": 0}),
        ("A bell, I think.", 0.0, {"format": 0, "names": 0}),
    ],
)
def test_the_thought(text: str, total: float, parts: dict[str, float]) -> None:
    (score,) = ThoughtEvents()([rollout(None, text)])
    assert score.total == pytest.approx(total)
    assert {name: score.parts[name] for name in parts} == pytest.approx(parts)


def sample(**changes: Any) -> Sample:
    return replace(SAMPLE, metadata={**SAMPLE.metadata, **changes})


@pytest.mark.parametrize(
    ("reward", "given", "problem"),
    [
        (
            EventsHeard(SoundModels(Told((1, 1), ("bell", "dog")))),
            rollout(RIGHT),
            "'cow' is none of the tagger's classes: bell",
        ),
        (EventsHeard(SoundModels()), rollout(RIGHT), "no tagger; give one"),
        (EventTimes(SoundModels()), rollout(RIGHT, sample=sample(events=[])), "sample 's': no events"),
        (EventPlaces(SoundModels()), rollout(RIGHT[:, 0]), "answer 0.: places asked of a mono sound"),
        (
            EventPlaces(SoundModels()),
            rollout(RIGHT, sample=sample(events=[{"name": "a", "start": 0, "end": 1}])),
            "no event has",
        ),
        (Clean(SoundModels()), rollout(np.full((4, 2), np.nan, np.float32)), "8 of|8 samples that are not finite|NaN"),
        (
            EventTimes(SoundModels()),
            rollout(RIGHT, sample=sample(duration=1.0)),
            "lies past the end of the scene at 1 s",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(reward: Reward, given: Rollout, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        reward([given])
    if isinstance(reward, EventsHeard):
        with pytest.raises(ValueError, match=problem):
            reward.check(given.sample)


def test_a_thought_is_scored_by_the_sound_that_a_frozen_flow_makes_of_it() -> None:
    flow = tiny_flow(channels=2)
    heard: list[AudioClip] = []

    def loudness(rollout: Rollout) -> float:
        assert rollout.spoken_audio is not None and rollout.spoken_audio.array is not None
        heard.append(rollout.spoken_audio)
        return float(np.sqrt(np.mean(rollout.spoken_audio.array**2)))

    reward = SoundOfThought(flow, FunctionReward(loudness), FlowConfig(steps=3))
    sample = replace(SAMPLE, metadata={**SAMPLE.metadata, "caption": "a bell"})
    bell, cow = (write_thought([Event(name, 0.5, 1.0, azimuth=0.0)]) for name in ("bell", "cow"))
    texts = [bell, f"<think>{cow}</think> There.", "a bell, loudly", bell, ""]
    scores = score_rollouts(reward, [rollout(None, text, sample) for text in texts])
    sounds = [clip.array for clip in heard]
    assert all(s is not None and s.shape == (48_000, 2) for s in sounds), "silence is stereo, too"
    assert [s.parts["format"] for s in scores if s] == [1.0, 1.0, 0.0, 1.0, 0.0]
    totals = [s.total for s in scores if s]
    assert totals[0] == totals[3] > 0 and totals[1] > 0 and totals[2] == totals[4] == 0.0
    assert np.array_equal(sounds[0], sounds[3]) and not np.allclose(sounds[0], sounds[1], atol=1e-3)
    request = Request(asked("s", "a bell", 2.0, thought=cow, channels=2), greedy=True)
    (alone,) = FlowEngine(flow, FlowConfig(steps=3)).generate([request])
    np.testing.assert_allclose(alone.spoken_audio.array, sounds[1], atol=0.02)  # type: ignore[union-attr, arg-type]
    whole = WeightedSum.of(sound=SoundOfThought(flow, EventPlaces(SoundModels()), FlowConfig(steps=3)))
    first, bad = score_rollouts(whole, [rollout(None, bell, sample), rollout(None, "", sample)])
    assert first is not None and bad is not None and first.parts.keys() == bad.parts.keys() and bad.total == 0
    with pytest.raises(ValueError, match="up to 2 s"):
        reward.check(replace(sample, metadata={**sample.metadata, "duration": 3.0}))
    with pytest.raises(ValueError, match="no event has an azimuth"):
        whole.check(replace(sample, metadata={**sample.metadata, "events": [{"name": "bell", "start": 0, "end": 1}]}))

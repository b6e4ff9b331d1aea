"""Edits of sounds: all outside of the mask stays bit for bit, all inside is new, and what cannot be made is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.config.flow import FlowConfig
from audiorl.models.flow import FlowPolicy
from audiorl.protocols import Request
from audiorl.rollout.flow import FADE, FlowEngine, spliced
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import Event, read_regions, write_thought
from tests.support.flows import asked, tiny_flow

RATE = 44_100
THOUGHT = write_thought([Event("bell", 0.2, 0.4), Event("dog", 0.5, 0.8), Event("bell", 0.9, 1.0)])


@pytest.fixture(scope="module")
def policy() -> FlowPolicy:
    return tiny_flow()


@pytest.fixture(scope="module")
def stereo() -> FlowPolicy:
    return tiny_flow(channels=2)


def noise(seconds: float = 1.0, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Samples of a file of 16 bits, at full scale."""
    values = np.random.default_rng(seed).integers(-(2**15), 2**15, (round(seconds * RATE), channels))
    return (values / 2**15).astype(np.float32).squeeze()


def before(wave: np.ndarray) -> AudioClip:
    return AudioClip(array=wave, sample_rate=RATE)


def outside(mask: list[tuple[float, float]], total: int) -> np.ndarray:
    stays = np.ones(total, bool)
    for start, end in mask:
        stays[round(start * RATE) : round(end * RATE)] = False
    return stays


@pytest.mark.parametrize(("kind", "mask", "seconds"), [
    ("add", [(0.31, 0.52)], 1.0), ("remove", [(0.0, 0.2)], 1.0), ("inpaint", [(0.1, 0.2), (0.777, 1.0)], 1.0),
    ("extend", [(1.0, 1.5)], 1.5), ("extend", [(0.9, 1.2)], 1.5), ("extend", [], 1.5),
])  # fmt: skip
@pytest.mark.parametrize("channels", [1, 2])
def test_what_is_outside_of_the_mask_stays_bit_for_bit(
    policy: FlowPolicy, stereo: FlowPolicy, kind: str, mask: list[tuple[float, float]], seconds: float, channels: int
) -> None:
    flow = policy if channels == 1 else stereo
    old = noise(channels=channels)
    sample = asked(kind, f"{kind} a dog", seconds, before=before(old), mask=mask)
    (one, other) = FlowEngine(flow, FlowConfig(steps=2, noisy="window", window=1)).generate([Request(sample, 2)])
    for sound in (one.spoken_audio, other.spoken_audio):
        assert sound is not None and sound.sample_rate == RATE and sound.array is not None
        assert sound.array.shape == (round(seconds * RATE), *old.shape[1:]) and sound.array.dtype == np.float32
        stays = outside(mask, len(old))
        assert np.array_equal(sound.array[: len(old)][stays], old[stays])
        assert not stays.any() or not np.array_equal(sound.array[: len(old)][~stays], old[~stays]) or seconds > 1
        assert np.abs(sound.array[len(old) :]).any() == (seconds > 1)
    assert not np.array_equal(one.spoken_audio.array, other.spoken_audio.array)  # type: ignore[union-attr]


def test_the_old_sound_goes_over_into_the_new_one_within_the_mask() -> None:
    ones, fade = np.ones(RATE, np.float32), round(FADE * RATE)
    made = AudioClip(array=-ones, sample_rate=RATE // 2)
    out = spliced(asked("a", "x", 1.2, before=before(ones), mask=[(0.5, 0.6)]), made).array
    assert out is not None
    (first, last), end = (22_050, 26_460), round(1.2 * RATE)
    ramp = 1 - 2 * np.arange(1, fade + 1) / (fade + 1)
    np.testing.assert_allclose(out[first : first + fade], ramp, atol=1e-4)
    np.testing.assert_allclose(out[last - fade : last], ramp[::-1], atol=1e-4)
    np.testing.assert_allclose(out[first + fade : last - fade], -1, atol=1e-4)
    np.testing.assert_allclose(out[RATE : RATE + fade], ramp, atol=1e-2)  # from the last sample that there was
    assert len(out) == end and out[-1] < -0.9


@pytest.mark.parametrize(("about", "message"), [
    ({"before": before(noise(channels=2))}, "has 2 channels, but this flow makes mono; give one of them"),
    ({"before": before(noise(1.5))}, "lasts 1.50 s, but 1.00 s are asked for"),
    ({"mask": []}, "nothing is to be made anew"),
    ({"before": AudioClip(path="nowhere.wav")}, "nowhere.wav"),
    ({"duration": 2.5}, "2.5 s was asked for; this flow makes up to 2 s"),
])  # fmt: skip
def test_an_edit_that_a_flow_cannot_make_is_refused(policy: FlowPolicy, about: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.prompt(asked("a", "x", **{"duration": 1.0, "before": before(noise()), "mask": [(0, 1)], **about}))


def test_a_region_is_a_span_an_event_of_the_thought_or_said() -> None:
    assert read_regions(["0.5:.75", "0:0.2"], "from 1 s", "", 2) == [(0, 0.2), (0.5, 0.75)]
    assert read_regions(["bell"], "", THOUGHT, 2) == [(0.2, 0.4), (0.9, 1.0)]
    assert read_regions([], "Fill the gap from 0.50 to 1.25 s with a dog.", "", 2) == [(0.5, 1.25)]
    assert read_regions([], "Remove the dog from the left.", "", 2) == []
    assert read_regions([], "Remove the dog from 0.5 s to 0.8 s and from 1 to 1.5 s.", "", 2) == [(0.5, 0.8), (1, 1.5)]
    for regions, message in (
        (["0:1", "0.5:1.5"], "0 to 1 s and 0.5 to 1.5 s overlap; join them"),
        (["1:3"], "1 to 3 s lies past the end of the sound at 2 s"),
        (["1:1"], "1 to 1 s is no span"),
        (["cat"], "'cat' is no START:END in seconds, and no event of the thought"),
    ):
        with pytest.raises(ValueError, match=message):
            read_regions(regions, "", THOUGHT, 2)
    with pytest.raises(ValueError, match="'bell' is no START:END in seconds, and no event: a thought has the lines"):
        read_regions(["bell"], "", "a bell", 2)


def test_the_command_changes_a_recording(
    policy: FlowPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy.save("flow")
    policy.codec.save("codec")  # type: ignore[union-attr]
    old = noise()
    soundfile.write("a.flac", (old * 2**15).astype(np.int16), RATE)
    command = ["sound", "flow", "--audio", "a.flac", "--sampling.steps", "2", "--out", "b.wav"]
    for more, mask, seconds in (
        (["--edit", "Remove the dog.", "--region", "0.25:0.5"], [(0.25, 0.5)], 1.0),
        (["--thought", THOUGHT, "--region", "dog"], [(0.5, 0.8)], 1.0),
        (["--edit", "Go on from 0.8 s with a dog.", "--seconds", "1.25"], [(0.8, 1.25)], 1.25),
    ):
        assert main([*command, *more]) == 0
        new, rate = soundfile.read("b.wav", dtype="float32")
        stays = outside(mask, len(old))
        assert rate == RATE and len(new) == round(seconds * RATE)
        assert np.array_equal(new[: len(old)][stays], old[stays]) and not np.array_equal(new[: len(old)], old)
    capsys.readouterr()
    for more, message in (
        (["--edit", "Remove the dog."], "--region: say which part is to be made anew"),
        (["--edit", "x", "--region", "0.5:1.5"], "past the end of the sound at 1 s"),
        (["--edit", "x", "--region", "0:0.5", "--seconds", "0.5"], "an edit never shortens a sound"),
        (["--text", "a dog"], "--text: of --audio say the change"),
        (["--edit", "x", "--region", "0:0.5", "--seconds", "3"], "this flow makes up to 2 s"),
    ):
        assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["sound", "flow", "--edit", "x", "--out", "b.wav"]) == 2
    assert "--audio: name the recording" in capsys.readouterr().err


def test_an_edits_length_is_that_of_what_was_before(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(0.5), RATE)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "Remove the dog.", "before": "a.wav", "mask": [[0.1, 0.2]]}')
    (sample,) = read_sounds(tmp_path / "rows.jsonl").samples
    assert sample.metadata["duration"] == 0.5 and sample.metadata["mask"] == [(0.1, 0.2)]

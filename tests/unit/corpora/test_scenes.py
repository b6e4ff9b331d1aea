"""Scenes of sound: the splits, and sounds, thoughts, videos and edits that are what the rows say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.tasks.sound.places import delay_of
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import Event, events_of, parse_thought
from corpora.scenes.build import KINDS, SETS, Layout, Scene, build_scenes, mix
from corpora.scenes.sounds import SoundFile
from tests.support.scenes import LAYOUT, RATE, scenes, write_sounds


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sounds(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def corpus(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenes(tmp_path_factory.mktemp("scenes"), tree)


def test_a_seed_gives_the_same_bytes_and_another_one_other_scenes(corpus: Path, tree: Path, tmp_path: Path) -> None:
    again, other = scenes(tmp_path / "again", tree), scenes(tmp_path / "other", tree, seed=1)
    files = sorted(file.relative_to(corpus) for file in corpus.rglob("*") if file.is_file())
    assert len(files) > 100
    assert [(corpus / f).read_bytes() for f in files] == [(again / f).read_bytes() for f in files]
    assert (corpus / "train.jsonl").read_bytes() != (other / "train.jsonl").read_bytes()


def test_held_out_files_and_combinations_are_in_no_training_scene(corpus: Path) -> None:
    sets = {name: read_sounds(corpus / f"{name}.jsonl").samples for name in SETS}
    files = {name: {e.file for s in samples for e in events_of(s)} for name, samples in sets.items()}
    assert not files["train"] & files["new_files"]
    assert files["new_combinations"] <= {f for kind in _classes(corpus).values() for f in kind["train"]}
    pairs = {
        name: [set(combinations(sorted(e.name for e in events_of(s)), 2)) for s in samples]
        for name, samples in sets.items()
    }
    trained = set().union(*pairs["train"])
    held_out = [own - trained for own in pairs["new_combinations"]]
    assert all(held_out), "each scene has a pair that no training scene has"
    assert not set().union(*held_out) & set().union(*pairs["new_files"])


def _classes(corpus: Path) -> dict[str, dict[str, list[str]]]:
    return json.loads((corpus / "classes.json").read_text())


def test_a_sound_is_when_and_where_its_row_says(corpus: Path) -> None:
    alone = [s for s in read_sounds(corpus / "train.jsonl").samples if len(events_of(s)) == 1]
    assert len(alone) > 3
    for sample in alone:
        (event,) = events_of(sample)
        wave, rate = soundfile.read(sample.metadata["audio"].path)
        assert wave.shape == (LAYOUT.seconds * RATE, 2) and rate == RATE
        assert parse_thought(sample.metadata["thought"]) == [replace(event, file="")]
        heard = np.flatnonzero(np.abs(wave).max(axis=1) > 1e-3) / RATE
        assert event.start <= heard[0] < event.start + 0.003 and event.end - 0.05 < heard[-1] <= event.end
        left, right = (np.fft.rfft(ear, 8 * len(ear)) for ear in wave.T)
        phase = np.angle(np.sum((left * right.conj())[np.abs(left) > np.abs(left).max() / 2]))  # of its strongest tone
        pitch = np.argmax(np.abs(left)) * RATE / (8 * len(wave))
        turns = np.angle(np.exp(1j * (-2 * np.pi * pitch * delay_of(event.azimuth) - phase)))
        assert abs(turns) < 0.05
        levels = 20 * np.log10(np.sqrt((wave**2).mean(axis=0)))
        assert levels[1] - levels[0] == pytest.approx(10 * np.sin(np.radians(event.azimuth)), abs=0.1)


def test_an_object_of_the_video_strikes_the_floor_when_its_sound_begins(corpus: Path) -> None:
    for sample in read_sounds(corpus / "new_combinations.jsonl").samples:
        frames = np.load(sample.metadata["video"])
        assert frames.shape == (32, 32, 32)
        for event in events_of(sample):
            left = round((event.azimuth / 90) * 11.5 + 12.5)
            others = [e for e in events_of(sample) if e is not event and abs(e.azimuth - event.azimuth) < 75]
            if others:
                continue
            near = frames[:, 23:30, left : left + 7].astype(float).sum(axis=(1, 2))  # the rows above the floor
            strike = int(np.flatnonzero(near > 0.5 * near.max())[0]) / 16
            assert abs(strike - event.start) <= 2 / 16


def test_edits_change_what_they_mask_and_nothing_else(corpus: Path) -> None:
    files = [corpus / f"edits_{name}.jsonl" for name in SETS]
    edits = [edit for file in files for edit in read_sounds(file).samples]
    assert {e.metadata["kind"] for e in edits} == set(KINDS) and len(edits) == 3 * 4 * 2
    for edit in edits:
        before, after = (soundfile.read(edit.metadata[name].path, dtype="int16")[0] for name in ("before", "after"))
        ((start, end),) = edit.metadata["mask"]
        inside = slice(round(start * RATE), round(end * RATE))
        assert (before[inside] != after[inside]).any()
        before[inside] = after[inside]
        assert (before == after).all()
        if edit.metadata["kind"] in ("inpaint", "extend"):
            assert not soundfile.read(edit.metadata["before"].path)[0][inside].any()
        assert [e.name for e in parse_thought(edit.metadata["thought"])] == [e.name for e in events_of(edit)]


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050])
def test_a_sound_that_the_end_cuts_fits_at_any_rate(rate: int) -> None:
    layout = Layout(seconds=4.0, rate=rate)
    sound = SoundFile("bell", "bell.wav", "CC0-1.0", np.ones(4 * rate, np.float32))
    for hundredths in range(100, 370):
        start = hundredths / 100
        scene = Scene("s", (Event("bell", start, 4.0, -10.0, 45.0, "bell.wav"),), (sound,))
        assert mix(scene, layout).shape == (4 * rate, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layout": Layout(seconds=1.0, max_events=4)}, "--max-events 4: needs 1.8 s, a scene lasts 1 s"),
        ({"sources": ["wesnoth"]}, "horn-1.ogg: missing; is wesnoth-1.16-data installed or unpacked here"),
        ({"sources": []}, "fewer than two classes with 3 files"),
        ({"layout": Layout(max_events=1)}, "train: no scene with two events to edit"),
    ],
)
def test_what_cannot_be_built_is_refused(tree: Path, tmp_path: Path, changes: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build_scenes(
            **{"out": tmp_path, "counts": (2, 1, 1), "edits": 1, "sources": ["sonic-pi"], "tree": tree} | changes
        )

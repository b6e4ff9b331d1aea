"""Rows of scenes and edits, published sets, thoughts: what is read, and what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import (
    Event,
    check_mask,
    parse_thought,
    write_thought,
)

EVENTS = [
    {"name": "bell", "start": 0.5, "end": 1.25, "azimuth": -45},
    {"name": "cow", "start": 2, "end": 3, "gain": -6},
]
SCENE = {"id": "a", "caption": "A bell, then a cow.", "events": EVENTS, "duration": 4, "channels": 2}
EDIT = {
    "id": "e",
    "kind": "add",
    "instruction": "Add a cow.",
    "thought": "…",
    "before": "a.wav",
    "after": "b.wav",
    "mask": [[2, 3]],
    "events": EVENTS,
    "duration": 4,
    "channels": 2,
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def test_a_scene_without_a_thought_gets_the_one_that_its_events_make(tmp_path: Path) -> None:
    (sample,) = read_sounds(written(tmp_path, SCENE), scenes=True).samples
    thought = (
        "semantic: bell, cow\ntemporal: bell 0.50-1.25 s; cow 2.00-3.00 s\n"
        "spatial: bell left 45°; cow anywhere\naesthetic: bell 0 dB; cow -6 dB"
    )
    assert sample.metadata["thought"] == thought
    assert sample.messages[0].content == ("A bell, then a cow.",)
    events = [Event("bell", 0.5, 1.25, 0.0, -45.0), Event("cow", 2.0, 3.0, -6.0, None)]
    assert parse_thought(thought) == events
    assert parse_thought(write_thought(events[::-1])) == events[::-1]
    thud = [Event("Thump, thud", 0.5, 1.25), *events]
    assert parse_thought(write_thought(thud)) == thud, "YAMNet's names have commas"
    with pytest.raises(ValueError, match=r"spatial: .* is not about a, b, in"):
        parse_thought(write_thought([Event("a, b", 0, 1)]).replace("a, b anywhere", "a anywhere; b anywhere"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a bell rings", "a thought has the lines semantic, temporal, spatial, aesthetic"),
        (
            "semantic: bell\ntemporal: cow 1.00-2.00 s\nspatial: bell ahead\naesthetic: bell 0 dB",
            "temporal: .* is not about bell",
        ),
        (
            "semantic: bell\ntemporal: bell 2.00-1.00 s\nspatial: bell ahead\naesthetic: bell 0 dB",
            "bell ends at 1.00 s, not after its start",
        ),
    ],
)
def test_a_thought_that_contradicts_itself_is_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_thought(text)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"channels": 1}, r"row 1, field 'events\[0\].azimuth': -45° in a scene of one channel"),
        ({"channels": None}, r"row 1, field 'events\[0\].azimuth': -45° in a scene of one channel"),
        ({"events": None}, "row 1, field 'events': .* no events"),
        ({"video": "v.npy"}, "row 1, field 'video_rate': missing"),
        ({"duration": 2.5}, r"row 1, field 'events\[1\].end': 3 s lies past the end of the scene at 2.5 s"),
        ({"events": []}, "row 1, field 'events': .* is not a list of events; give at least one"),
        ({"events": [{"name": "cow", "start": 2, "end": 2}]}, "2 s is not after the start at 2 s"),
        ({"events": [{**EVENTS[0], "azimuth": 120}]}, r"field 'events\[0\].azimuth': 120 is not an azimuth"),
        ({"events": [{**EVENTS[0], "name": "bell; cow"}]}, r"\[0\].name': 'bell; cow' is not a class; give a name"),
        ({"events": [{**EVENTS[0], "name": "bell\n"}]}, "without semicolons and line ends"),
        ({"events": [{**EVENTS[0], "name": " "}]}, r"field 'events\[0\].name': ' ' is not a class"),
        ({"caption": None}, "row 1, field 'caption'"),
        ({"event": "cow"}, "row 1, field 'event': that of an edit, whose before, mask or kind is missing"),
    ],
)
def test_a_scene_that_cannot_be_made_is_refused(tmp_path: Path, row: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_sounds(written(tmp_path, {**SCENE, **row}), scenes=True)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"mask": [[1, 2.5], [2, 3]]}, "row 1, field 'mask': 1 to 2.5 s and 2 to 3 s overlap; join them"),
        ({"mask": [[3, 5]]}, "3 to 5 s lies past the end of the sound at 4 s"),
        ({"mask": [[2, 2]]}, "2 to 2 s is no span"),
        ({"before": None}, "row 1, field 'mask': of what is made anew in before, which is missing; give it"),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused(tmp_path: Path, row: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_sounds(written(tmp_path, {**EDIT, **row}))
    assert check_mask([[2, 3], [0, 1]], 4) == [(0, 1), (2, 3)]


PUBLISHED = {
    "audiocaps": (
        "test.csv",
        "audiocap_id,youtube_id,start_time,caption\n91139,-r1nicOVtvkQ,130,A woman talks nearby as water pours\n",
        "Y-r1nicOVtvkQ.wav",
        ("91139", "A woman talks nearby as water pours", None),
    ),
    "vggsound": (
        "vggsound.csv",
        '---g-f_I2yQ,1,"people marching",test\n--0PQM4-hqg,30,waterfall burbling,train\n',
        "---g-f_I2yQ_000001.wav",
        ("---g-f_I2yQ_1", "people marching", None),
    ),
    "audiocot": (
        "cot.csv",
        'id,caption,caption_cot\n"dog_01",dog barks,"Begin with one sharp bark, then a pause."\n',
        "dog_01.flac",
        ("dog_01", "dog barks", "Begin with one sharp bark, then a pause."),
    ),
    "audiocanvas": (
        "canvas.json",
        '[{"id": "v7", "caption": "rain", "caption_cot": "Semantic: rain. Temporal: throughout."}]',
        "v7.wav",
        ("v7", "rain", "Semantic: rain. Temporal: throughout."),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_are_read_as_their_authors_publish_them(tmp_path: Path, name: str) -> None:
    file, content, audio, (id, caption, thought) = PUBLISHED[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=r"row 1, field 'audio': .*: no recording"):
        read_sounds(tmp_path / file)
    root = tmp_path / "sounds"
    (root / "part_1").mkdir(parents=True)
    soundfile.write(root / "part_1" / audio, np.zeros(1600), 16_000)
    loaded = read_sounds(tmp_path / file, audio_root=root, on_error="skip")
    (sample,) = loaded.samples
    assert (sample.id, sample.messages[0].content[0], sample.metadata["duration"]) == (id, caption, 0.1)
    assert sample.metadata.get("thought") == thought and sample.metadata["audio"].load().shape == (1600,)
    assert len(loaded.skipped) == (name == "vggsound")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("youtube_id,start_time\nabc,1\n", "row 1, field 'caption': missing; give caption or label"),
        ("caption,caption_cot\nrain,Rain.\n", "row 1, field 'id': missing; give youtube_id or id"),
        ("abc,1,label,test\nabd,1,test\n", "row 2: 3 fields under 4 names .youtube_id, start_time, label, split."),
        (
            "youtube_id,start_time,caption\nabc,soon,rain\n",
            "row 1, field 'start_time': 'soon' is not a time",
        ),
    ],
)
def test_published_rows_without_columns_are_refused(tmp_path: Path, rows: str, problem: str) -> None:
    (tmp_path / "a.csv").write_text(rows)
    soundfile.write(tmp_path / "abc.wav", np.zeros(1600), 16_000)
    with pytest.raises(ValueError, match=problem):
        read_sounds(tmp_path / "a.csv")

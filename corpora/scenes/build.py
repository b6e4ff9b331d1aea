"""Build scenes of sound: rows, recordings, silent videos and edits.

    OUT/train.jsonl                scenes to train on
    OUT/new_files.jsonl            of sound files that no training scene has, in combinations that some has
    OUT/new_combinations.jsonl     of training files, in pairs of classes that no training scene has
    OUT/edits_SET.jsonl            of each set: instructions with the sound before and after
    OUT/classes.json               classes with their files, and YAMNet's names for them
    OUT/audio/ID.flac, video/ID.npy, ATTRIBUTION.md, LICENSE-*.txt

`audiorl.tasks.sound.scenes` says what the rows hold and reads them. The same seed gives the same bytes. A video is grey
frames [F, 32, 32]: each event is a glyph, drawn from the name of its class, that falls from the top, strikes the floor
when its sound begins and bounces until it ends; where it falls is where it is heard, or in mono the middle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from audiorl.data.rows import write_json_lines
from audiorl.tasks.sound.places import placed
from audiorl.tasks.sound.scenes import Event, write_thought
from corpora.scenes.sounds import CLASSES, SOURCES, SoundFile, read_sounds, split_combinations, split_files
from corpora.sources.packages import gpl_2_text, package_files

SETS = ("train", "new_files", "new_combinations")
KINDS = ("add", "remove", "inpaint", "extend")
GAINS = (0, -3, -6, -9, -12)
"""dB."""
AZIMUTHS = tuple(range(-90, 91, 15))
APART = 0.3
"""Seconds between two onsets, at least."""
SIZE = 32
"""Pixels of a video's sides."""
ATTRIBUTION = """\
# Attribution

Every row names the files that its scene is made of and their licences. Sounds were cut, changed in level, placed
between two ears and mixed.

- `sonic-pi/`: the samples of Sonic Pi, from freesound.org, packaged by Debian as sonic-pi-samples. CC0-1.0.
- `wesnoth/`: sounds of The Battle for Wesnoth, copyright 2003-2024 by its contributors (https://www.wesnoth.org),
  packaged by Debian as wesnoth-1.16-data. GPL-2.0-or-later, see LICENSE-GPL-2.0-or-later.txt.
- `tuxpaint/`: the stamps of Tux Paint, copyright 2002-2022 by Bill Kendrick and contributors (https://tuxpaint.org),
  packaged by Debian as tuxpaint-stamps-default. GPL-2.0-or-later, see LICENSE-GPL-2.0-or-later.txt.
"""


@dataclass(frozen=True)
class Layout:
    """What scenes are like."""

    seconds: float = 4.0
    rate: int = 16_000
    channels: int = 2
    max_events: int = 3
    max_event_seconds: float = 1.5
    video_rate: int = 16


@dataclass(frozen=True)
class Scene:
    """A scene before it is rendered: its events by their onset, and the sound of each."""

    id: str
    events: tuple[Event, ...]
    sounds: tuple[SoundFile, ...]


def build_scenes(
    out: Path,
    counts: Sequence[int],
    edits: int,
    sources: Sequence[str],
    layout: Layout = Layout(),
    new_combinations: float = 0.2,
    seed: int = 0,
    packages: Path | None = None,
    tree: Path | None = None,
) -> None:
    """Write the corpus to the new folder `out` and print what it holds.

    counts: scenes of each of SETS; edits: as many of each as there are edits of each kind. packages, tree: as for
    `package_files`. Raises ValueError for a folder that holds other things, for events that do not fit into a scene,
    and for missing packages.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: not empty; name a new folder or empty this one first")
    if layout.seconds < 0.2 + layout.max_events * (APART + 0.1):
        needed = 0.2 + layout.max_events * (APART + 0.1)
        raise ValueError(f"--max-events {layout.max_events}: needs {needed:.1f} s, a scene lasts {layout.seconds:g} s")
    with package_files(list(dict.fromkeys((*(SOURCES[s][0] for s in sources), "base-files"))), packages, tree) as root:
        sounds = read_sounds(root, sources, layout.rate, layout.max_event_seconds)
        licence = gpl_2_text(root) if any(s.licence.startswith("GPL") for s in sounds) else ""
    train, held_out = split_files(sounds, seed)
    held_pairs = split_combinations(sorted(train), new_combinations, seed)
    (out / "audio").mkdir(parents=True, exist_ok=True)
    (out / "video").mkdir(exist_ok=True)
    table = Table("set", "scenes", "events", "classes", "files", "edits")
    for name, count in zip(SETS, counts, strict=True):
        files = held_out if name == "new_files" else train
        scenes = [draw(f"{name}-{n:05d}", files, held_pairs, layout, seed) for n in range(count)]
        for scene in track(scenes, description=name):
            _write_audio(out / f"audio/{scene.id}.flac", mix(scene, layout), layout)
            np.save(out / f"video/{scene.id}.npy", video(scene.events, layout), allow_pickle=False)
        write_json_lines(out / f"{name}.jsonl", (_row(scene, name, layout) for scene in scenes))
        several = [scene for scene in scenes if len(scene.events) > 1]
        if edits and not several:
            raise ValueError(f"{name}: no scene with two events to edit; give more scenes or --max-events 2")
        own = [edit(out, several[n % len(several)], KINDS[n % 4], n, name, layout, seed) for n in range(4 * edits)]
        if own:
            write_json_lines(out / f"edits_{name}.jsonl", own)
        held = {file.file for scene in scenes for file in scene.sounds}
        classes = {e.name for scene in scenes for e in scene.events}
        events = sum(len(scene.events) for scene in scenes)
        table.add_row(name, *map(str, (len(scenes), events, len(classes), len(held), len(own))))
    about = {
        name: {
            "yamnet": list(CLASSES[name].yamnet),
            "train": [s.file for s in train[name]],
            "held_out": [s.file for s in held_out[name]],
        }
        for name in train
    }
    (out / "classes.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    (out / "ATTRIBUTION.md").write_text(ATTRIBUTION, encoding="utf-8")
    if licence:
        (out / "LICENSE-GPL-2.0-or-later.txt").write_text(licence, encoding="utf-8")
    Console().print(table)


def draw(
    id: str, files: dict[str, list[SoundFile]], held_pairs: set[frozenset[str]], layout: Layout, seed: int
) -> Scene:
    """Draw a scene: events of different classes, a file for each, onsets at least APART seconds from each other.

    Scenes whose id begins with "new_combinations" hold one of the held-out pairs, all others none.
    """
    rng = random.Random(f"{seed}/{id}")
    names = sorted(files)
    most = min(layout.max_events, len(names))
    if id.startswith("new_combinations"):
        chosen = sorted(rng.choice(sorted(held_pairs, key=sorted)))
        chosen += rng.sample([n for n in names if n not in chosen], rng.randint(0, max(most - 2, 0)))
    else:
        chosen = []
        for name in rng.sample(names, len(names)):
            if not any(frozenset((name, other)) in held_pairs for other in chosen):
                chosen.append(name)
        chosen = chosen[: rng.randint(1, most)]
    rng.shuffle(chosen)
    # Onsets: the free time is shared out at random, on a grid of 10 ms, so that the thought is exact.
    tail = 0.3  # the last event lasts at least so long
    free = round(100 * (layout.seconds - 0.1 - tail - APART * (len(chosen) - 1)))
    gaps = sorted(rng.randint(0, free) for _ in chosen)
    starts = [0.1 + gap / 100 + APART * i for i, gap in enumerate(gaps)]
    events, sounds = [], []
    for name, start in zip(chosen, starts, strict=True):
        sound = rng.choice(files[name])
        start = round(start, 2)
        azimuth = float(rng.choice(AZIMUTHS)) if layout.channels == 2 else None
        event = Event(name, start, start, float(rng.choice(GAINS)), azimuth, sound.file)
        length = len(_rendered(event, sound, layout)) / layout.rate
        end = min(-(-round((start + length) * 1000) // 10) / 100, layout.seconds)
        events.append(replace(event, end=end))
        sounds.append(sound)
    return Scene(id, tuple(events), tuple(sounds))


def _rendered(event: Event, sound: SoundFile, layout: Layout) -> NDArray[np.float32]:
    """Return the sound of an event from its onset on, [T, channels]. All events of a scene at once cannot clip."""
    wave = sound.wave * np.float32(0.9 / layout.max_events * 10 ** (event.gain / 20))
    out = wave[:, None] if event.azimuth is None else placed(wave, event.azimuth, layout.rate)
    room = round(layout.seconds * layout.rate) - round(event.start * layout.rate)
    if len(out) > room:  # cut by the end of the scene: fade
        out = out[:room].copy()
        fade = min(layout.rate // 20, room)
        out[room - fade :] *= np.linspace(1, 0, fade, dtype=np.float32)[:, None]
    return out


def mix(scene: Scene, layout: Layout) -> NDArray[np.float32]:
    """Return the scene's sound [T, channels]."""
    out = np.zeros((round(layout.seconds * layout.rate), layout.channels), np.float32)
    for event, sound in zip(scene.events, scene.sounds, strict=True):
        start = round(event.start * layout.rate)
        wave = _rendered(event, sound, layout)
        out[start : start + len(wave)] += wave
    return out


def caption(events: Sequence[Event]) -> str:
    """Say what is heard, in order and roughly where: the short text that a user would write.

    >>> caption([Event("bell", 0.5, 1, azimuth=-45.0), Event("ape", 1, 2, azimuth=0.0), Event("cow", 2, 3)])
    'A bell on the left, then an ape in the middle, then a cow.'
    """
    text = ", then ".join(f"{_article(e.name)}{_side(e.azimuth)}" for e in events)
    return f"{text[0].upper()}{text[1:]}."


def _article(name: str) -> str:
    return name if name in ("bones",) else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _side(azimuth: float | None) -> str:
    if azimuth is None:
        return ""
    return " in the middle" if abs(azimuth) < 15 else f" on the {'left' if azimuth < 0 else 'right'}"


def glyph(name: str) -> NDArray[np.float32]:
    """Return the picture of a class: 7 × 7, symmetric, drawn from a hash of its name."""
    bits = np.unpackbits(np.frombuffer(sha256(name.encode()).digest()[:4], np.uint8))[:28].reshape(7, 4)
    return np.concatenate([bits, bits[:, 2::-1]], axis=1).astype(np.float32) * 0.8 + 0.2


def video(events: Sequence[Event], layout: Layout) -> NDArray[np.uint8]:
    """Return the silent video [F, SIZE, SIZE]: frame f shows the time f / video_rate."""
    frames = round(layout.seconds * layout.video_rate)
    out = np.zeros((frames, SIZE + 8, SIZE), np.float32)  # 8 rows above the picture, where objects come from
    out[:, -2:] = 0.5  # the floor
    for event in events:
        picture = glyph(event.name)
        left = round((0.0 if event.azimuth is None else event.azimuth / 90) * (SIZE - 9) / 2 + (SIZE - 7) / 2)
        for f in range(frames):
            since = f / layout.video_rate - event.start
            if since >= event.end - event.start:
                continue
            height = 60 * since**2 if since < 0 else _bounce(since, event.end - event.start)
            top = SIZE + 8 - 2 - 7 - height  # in rows, not whole: the time of the strike is finer than a frame
            row = int(np.floor(top))
            if row < 0:
                continue
            part = np.float32(top - row)
            moved = np.pad(picture * (1 - part), ((0, 1), (0, 0))) + np.pad(picture * part, ((1, 0), (0, 0)))
            area = out[f, row : row + 8, left : left + 7]
            np.maximum(area, moved[: len(area)], out=area)
    return np.round(out[:, 8:] * 255).astype(np.uint8)


def _bounce(since: float, lasts: float) -> float:
    """Return the height in rows of an object `since` seconds after it struck: three bounces, each half as high."""
    third = lasts / 3
    number, at = divmod(since, third)
    return float(8 / 2**number * 4 * (at / third) * (1 - at / third))


def edit(out: Path, scene: Scene, kind: str, number: int, split: str, layout: Layout, seed: int) -> dict[str, Any]:
    """Write the sound before an edit and after it, which are equal outside of the mask; return its row."""
    rng = random.Random(f"{seed}/{split}/edit/{number}")
    at = rng.randrange(len(scene.events)) if kind != "extend" else len(scene.events) - 1
    event = scene.events[at]
    kept = [i for i in range(len(scene.events)) if i != at]
    without = Scene(scene.id, tuple(scene.events[i] for i in kept), tuple(scene.sounds[i] for i in kept))
    what = f"{_article(event.name)}{_side(event.azimuth)}"
    span = (event.start, event.end)
    whole, less = mix(scene, layout), mix(without, layout)
    after, events = (less, without.events) if kind == "remove" else (whole, scene.events)
    if kind in ("add", "remove"):
        before = whole if kind == "remove" else less
        instruction = f"Add {what} at {event.start:.2f} s." if kind == "add" else f"Remove the {event.name}."
    elif kind == "inpaint":
        before = _silent(whole, span, layout)
        instruction = f"Fill the gap from {span[0]:.2f} to {span[1]:.2f} s with {what}."
    else:
        span = (event.start, layout.seconds)
        before = _silent(whole, span, layout)
        instruction = f"Go on from {event.start:.2f} s with {what}."
    id = f"{split}-{kind}-{number // 4:05d}"
    names = {"before": f"audio/{id}-before.flac", "after": f"audio/{id}-after.flac"}
    for name, wave in (("before", before), ("after", after)):
        _write_audio(out / names[name], wave, layout)
    return {
        "id": id,
        "kind": kind,
        "event": event.name,
        "instruction": instruction,
        "thought": write_thought(events),
        **names,
        "mask": [list(span)],
        "events": [asdict(e) for e in events],
        "duration": layout.seconds,
        "channels": layout.channels,
        "split": split,
        "scene": scene.id,
    }


def _silent(wave: NDArray[np.float32], span: tuple[float, float], layout: Layout) -> NDArray[np.float32]:
    out = wave.copy()
    out[round(span[0] * layout.rate) : round(span[1] * layout.rate)] = 0
    return out


def _write_audio(path: Path, wave: NDArray[np.float32], layout: Layout) -> None:
    soundfile.write(path, wave, layout.rate, format="FLAC", subtype="PCM_16")


def _row(scene: Scene, split: str, layout: Layout) -> dict[str, Any]:
    return {
        "id": scene.id,
        "audio": f"audio/{scene.id}.flac",
        "caption": caption(scene.events),
        "thought": write_thought(scene.events),
        "events": [asdict(e) for e in scene.events],
        "duration": layout.seconds,
        "channels": layout.channels,
        "video": f"video/{scene.id}.npy",
        "video_rate": layout.video_rate,
        "split": split,
        "combination": "+".join(sorted(e.name for e in scene.events)),
        "licence": " AND ".join(sorted({s.licence for s in scene.sounds})),
    }

"""Scenes of sound: which events, when, where and how loud; the thought that says so; the rows that ask for them.

A row of a manifest of scenes, as `audiorl data build-scenes` writes it, paths relative to the manifest's folder::

    {"id": "train-00001", "audio": "audio/train-00001.flac", "caption": "A bell on the left, then a cow.",
     "thought": "semantic: …", "duration": 4.0, "channels": 2, "video": "video/train-00001.npy", "video_rate": 16,
     "events": [{"name": "bell", "file": "…", "start": 0.5, "end": 1.7, "gain": -3, "azimuth": -45}, …]}

and of a manifest of edits, where before and after are equal outside of the masks, in seconds::

    {"id": "edit-00001", "kind": "add", "event": "cow", "instruction": "Add a cow at 2.10 s.", "thought": "semantic: …",
     "before": "audio/….flac", "after": "audio/….flac", "mask": [[2.1, 3.0]], "duration": 4.0, "events": […], …}

A thought has four parts, as those of PrismAudio (arXiv 2511.18833), a line each. Times are seconds, azimuths degrees
(negative: left of the listener), levels dB below the loudest that the scenes have::

    semantic: bell, cow
    temporal: bell 0.50-1.70 s; cow 2.10-3.00 s
    spatial: bell left 45°; cow right 30°
    aesthetic: bell -3 dB; cow 0 dB
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip
from audiorl.data.rows import BadRow, Row, checked, converted, read_checked
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.scenes import EventColumns, PublishedColumns
from audiorl.types import Message, Sample

PARTS = ("semantic", "temporal", "spatial", "aesthetic")
"""Lines of a thought, in this order."""
VGGSOUND = ("youtube_id", "start_time", "label", "split")
"""The columns of VGGSound's file, which has no line of their names."""
SUFFIXES = (".flac", ".wav", ".ogg", ".opus", ".mp3", ".m4a", ".mp4", ".webm", ".mkv")


@dataclass(frozen=True)
class Event:
    """A sound in a scene."""

    name: str
    """The class, such as "bell"."""
    start: float
    """Seconds: its onset."""
    end: float
    gain: float = 0.0
    """dB, 0 or less: 0 is the loudest that the scenes have."""
    azimuth: float | None = None
    """Degrees from straight ahead, -90 (left) to 90 (right); None: not placed, as in mono."""
    file: str = ""
    """The recording that it was made of."""


def events_of(sample: Sample) -> list[Event]:
    """Return the events that a sample asks for, by their onset. Raises FieldError where its metadata has none, or where
    one cannot be."""
    given, about = sample.metadata.get("events"), sample.metadata
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise FieldError("events", f"sample {sample.id!r}: no events; give [{{name, start, end}}, …]")
    events = []
    for number, event in enumerate(given):
        where = f"events[{number}]"
        e = event if isinstance(event, Event) else check(event, EventColumns, where)
        if e.end <= e.start:
            raise FieldError(f"{where}.end", f"{e.end:g} s is not after the start at {e.start:g} s; correct the times")
        if (duration := about.get("duration")) is not None and e.end > duration + 1e-6:
            raise FieldError(
                f"{where}.end", f"{e.end:g} s lies past the end of the scene at {duration:g} s; correct one of them"
            )
        if e.azimuth is not None and about.get("channels") == 1:
            raise FieldError(
                f"{where}.azimuth",
                f"{e.azimuth:g}° in a scene of one channel; give channels: 2, or leave the azimuth out",
            )
        events.append(Event(e.name, e.start, e.end, e.gain, e.azimuth, e.file))
    return sorted(events, key=lambda e: e.start)


# -- thoughts ----------------------------------------------------------------------------------------------------------


def write_thought(events: Sequence[Event]) -> str:
    """Write the events as a thought, in their order. `parse_thought` reads them back: times to 10 ms, azimuths to 1°,
    levels to 1 dB."""
    lines = [
        ", ".join(e.name for e in events),
        "; ".join(f"{e.name} {e.start:.2f}-{e.end:.2f} s" for e in events),
        "; ".join(f"{e.name} {_place(e.azimuth)}" for e in events),
        "; ".join(f"{e.name} {e.gain:.0f} dB" for e in events),
    ]
    return "\n".join(f"{part}: {line}" for part, line in zip(PARTS, lines, strict=True))


def _place(azimuth: float | None) -> str:
    if azimuth is None:
        return "anywhere"
    degrees = round(azimuth)
    return "ahead" if not degrees else f"{'left' if degrees < 0 else 'right'} {abs(degrees)}°"


def parse_thought(text: str) -> list[Event]:
    """Read the events of a thought. Raises ValueError that says which part is missing, wrong, or about other events."""
    found = re.findall(r"^\s*(\w+):[ \t]*(.*?)\s*$", text, re.MULTILINE)
    if [name for name, _ in found] != list(PARTS):
        raise ValueError(
            f"a thought has the lines {', '.join(PARTS)}, once each; this has {[name for name, _ in found]}"
        )
    lines = dict(found)
    names = [name.strip() for name in lines["semantic"].split(",")]
    forms = {
        "temporal": r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?) s",
        "spatial": r"(anywhere|ahead|(?:left|right) \d+°?)",
        "aesthetic": r"(-?\d+(?:\.\d+)?) dB",
    }
    values: dict[str, list[tuple[str, ...]]] = {}
    for part, form in forms.items():
        matches = [re.fullmatch(rf"(.+?) {form}", item.strip()) for item in lines[part].split(";")]
        said = [match[1] if match else "" for match in matches]
        if said != names:
            raise ValueError(f"{part}: {lines[part]!r} is not about {', '.join(names)}, in this order and form")
        values[part] = [match.groups()[1:] for match in matches if match]
    events = []
    for name, (start, end), (place,), (gain,) in zip(names, *values.values(), strict=True):
        side, _, degrees = place.removesuffix("°").partition(" ")
        azimuth = {"anywhere": None, "ahead": 0.0}.get(side, 0.0)
        if degrees:
            azimuth = float(degrees) * (-1 if side == "left" else 1)
        if not float(start) < float(end):
            raise ValueError(f"temporal: {name} ends at {end} s, not after its start at {start} s")
        events.append(Event(name, float(start), float(end), float(gain), azimuth))
    return events


# -- rows --------------------------------------------------------------------------------------------------------------


def _unique(path: Path, convert: Callable[[Mapping[str, Any]], Sample], header: Sequence[str] = ()) -> list[Sample]:
    """Read the samples of a file. header: the columns of a CSV file whose first line names none of them."""
    rows: Iterable[tuple[int, Sample]] = read_checked(path, convert)
    if header and path.suffix.lower() == ".csv" and path.is_file():
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
        if lines and len(lines[0]) == len(header) and not {"youtube_id", "id"} & set(lines[0]):
            wrong = next((i for i, line in enumerate(lines, 1) if len(line) != len(header)), None)
            if wrong:
                fields = f"{len(lines[wrong - 1])} fields; give {', '.join(header)}"
                raise ValueError(str(BadRow(str(path), wrong, "", fields)))
            named = (Row(str(path), i, dict(zip(header, line, strict=True))) for i, line in enumerate(lines, 1))
            rows = checked(converted(named, convert))
    first: dict[str, int] = {}
    samples = []
    for number, sample in rows:
        if (earlier := first.setdefault(sample.id, number)) != number:
            message = f"{sample.id!r} also names row {earlier}; give every row its own id"
            raise ValueError(str(BadRow(str(path), number, "id", message)))
        samples.append(sample)
    return samples


def check_mask(mask: Sequence[Sequence[float]], duration: float) -> list[tuple[float, float]]:
    """Return the spans (start, end) of a mask by their start. Raises FieldError for spans that overlap, are empty or
    lie past the end of the sound at `duration` seconds."""
    spans = sorted((float(start), float(end)) for start, end in mask)
    if not spans:
        raise FieldError("mask", "no spans; give [[start, end], …] in seconds")
    for start, end in spans:
        if not 0 <= start < end:
            raise FieldError("mask", f"{start:g} to {end:g} s is no span; give start before end")
        if end > duration + 1e-6:
            raise FieldError("mask", f"{start:g} to {end:g} s lies past the end of the sound at {duration:g} s")
    for (start, end), (next_start, next_end) in pairwise(spans):
        if next_start < end:
            spans_ = f"{start:g} to {end:g} s and {next_start:g} to {next_end:g} s"
            raise FieldError("mask", f"{spans_} overlap; join them")
    return spans


def read_regions(regions: Sequence[str], text: str, thought: str, duration: float) -> list[tuple[float, float]]:
    """Return the spans to be made anew in a sound of `duration` seconds, by their start.

    Each region is START:END, or the name of an event of the thought, which says when it is heard. Without any, the text
    says it, "from 1.5 s" or "from 1.5 to 2 s", as the instructions of edits do; [] if it does not. Raises FieldError.

    >>> read_regions(["1:2.5"], "", "", 4), read_regions([], "Go on from 2.5 s with a dog.", "", 4)
    ([(1.0, 2.5)], [(2.5, 4.0)])
    """
    spans: list[tuple[float, float]] = []
    for region in regions:
        if match := re.fullmatch(r"(\d*\.?\d+):(\d*\.?\d+)", region):
            spans.append((float(match[1]), float(match[2])))
            continue
        try:
            named = [(e.start, e.end) for e in parse_thought(thought) if e.name == region]
        except ValueError as error:
            raise FieldError("region", f"{region!r} is no START:END in seconds, and no event: {error}") from error
        if not named:
            raise FieldError("region", f"{region!r} is no START:END in seconds, and no event of the thought")
        spans += named
    if not regions and (match := re.search(r"\bfrom (\d*\.?\d+)(?: to (\d*\.?\d+))? s\b", text)):
        spans.append((float(match[1]), float(match[2] or duration)))
    return check_mask(spans, duration) if spans else []


def load_video(sample: Sample, rate: float | None = None) -> NDArray[np.uint8]:
    """Return the frames [F, H, W] of a sample's silent video. Raises ValueError where it is missing or no such array,
    where its length is not that of the scene, and where it does not have the frames a second that `rate` wants."""
    path, own, duration = (sample.metadata.get(key) for key in ("video", "video_rate", "duration"))
    where = f"sample {sample.id!r}, video"
    if not path or not own or not duration:
        raise FieldError("video", f"{where}: the row has none; give video, video_rate and duration")
    if rate is not None and not math.isclose(rate, own):
        raise FieldError("video_rate", f"{where}: {own:g} frames a second, the model reads {rate:g}; sample it again")
    try:
        frames = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not readable as .npy ({error}); write it with numpy.save") from error
    if frames.ndim != 3 or frames.dtype != np.uint8:
        raise ValueError(f"{path}: {frames.dtype} of shape {frames.shape}; give uint8 frames [F, height, width]")
    if abs(len(frames) - own * duration) > 1:
        lasts = f"{len(frames)} frames at {own:g} a second last {len(frames) / own:.2f} s"
        raise ValueError(f"{path}: {lasts}, the scene {duration:g} s; correct video_rate or duration")
    return np.asarray(frames)


def read_published(path: str | Path, audio_root: str | Path | None = None, missing: bool = False) -> list[Sample]:
    """Read the captions of a published set of sounds, in the layout of its own files.

    AudioCaps: audiocap_id,youtube_id,start_time,caption. VGGSound: no header, youtube_id,start,label,split. AudioCoT
    and AudioCanvas: id,caption,caption_cot, as CSV, JSON or JSON lines. Files of audio are looked for in
    `audio_root`, by default the folder of the file, as ID, YID (AudioSet's), ID_START or ID_00START with any suffix.
    Metadata have `audio`, and where there is one `thought` and `split`. Raises ValueError for rows that cannot be used,
    and for those without audio unless `missing`: then they have no `audio`.
    """
    path = Path(path)
    root = Path(audio_root or path.parent)
    files = {file.stem: file for file in sorted(root.rglob("*")) if file.suffix.lower() in SUFFIXES}

    def sample(data: Mapping[str, Any]) -> Sample:
        row = check(data, PublishedColumns)
        name = row.youtube_id or row.id
        if name is None:
            raise FieldError("id", f"missing; give youtube_id or id (the columns are {', '.join(data)})")
        caption = row.caption if row.caption is not None else row.label
        if caption is None:
            raise FieldError("caption", f"missing; give caption or label (the columns are {', '.join(data)})")
        name, start = str(name), row.start_time
        number = "" if start in (None, "") else f"{float(str(start)):g}"
        stems = [name, f"Y{name}", *(f"{n}{s}" for n in (name, f"Y{name}") for s in (f"_{number}", f"_{number:0>6}"))]
        file = next((files[stem] for stem in stems if stem in files), None)
        if file is None and not missing:
            raise FieldError("audio", f"{root}: no file {name} with {', '.join(SUFFIXES[:3])} …; name its folder")
        more: dict[str, Any] = {} if file is None else {"audio": AudioClip(path=str(file))}
        more |= {"thought": row.caption_cot} if row.caption_cot else {}
        more |= {"split": row.split} if row.split else {}
        id = f"{row.audiocap_id or name}" if not number or row.audiocap_id else f"{name}_{number}"
        return Sample(id, (Message("user", (caption,)),), (caption,), task="sound", metadata=more)

    return _unique(path, sample, header=VGGSOUND)

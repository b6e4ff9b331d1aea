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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from audiorl.data.schema import FieldError, check
from audiorl.data.schema.scenes import EventColumns
from audiorl.types import Sample

PARTS = ("semantic", "temporal", "spatial", "aesthetic")
"""Lines of a thought, in this order."""


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
    semantic = re.sub(" *, *", ", ", lines["semantic"])
    forms = {
        "temporal": r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?) s",
        "spatial": r"(anywhere|ahead|(?:left|right) \d+°?)",
        "aesthetic": r"(-?\d+(?:\.\d+)?) dB",
    }
    values: dict[str, list[tuple[str, ...]]] = {}
    names: list[str] = []
    for part, form in forms.items():
        matches = [re.fullmatch(rf"(.+?) {form}", item.strip()) for item in lines[part].split(";")]
        said = [match[1] if match else "" for match in matches]
        names = names or said  # in which those with commas are told apart
        if said != names or re.sub(" *, *", ", ", ", ".join(said)) != semantic:
            raise ValueError(f"{part}: {lines[part]!r} is not about {semantic}, in this order and form")
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
    if not regions:
        number = r"(\d*\.?\d+)"
        said = re.findall(rf"\bfrom {number}(?:(?: s)? to {number})? s\b", text)
        spans = [(float(start), float(end or duration)) for start, end in said]
    return check_mask(spans, duration) if spans else []

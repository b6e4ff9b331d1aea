"""Rows of scenes of sound, of edits of them, and of published sets of captioned sounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from audiorl.data.schema.types import AnyText, Id, Seconds, Text

Task = Literal["sound", "enhance", "tts"]
"""What a row of sounds asks for."""
EditKind = Literal["add", "remove", "inpaint", "extend"]
"""What an edit does with a sound."""
Degrees = Annotated[float, Meta(ge=-90, le=90, description="an azimuth; give degrees, -90 (left) to 90 (right)")]
Decibels = Annotated[float, Meta(ge=-60, le=0, description="a level; give dB, -60 to 0")]
Channels = Annotated[int, Meta(ge=1, le=2, description="a number of channels; give 1 or 2")]
Length = Annotated[float, Meta(gt=0, le=600, description="a length; give seconds, more than 0, at most 600")]
EventName = Annotated[
    str,
    Meta(pattern=r"^[^\s;]([^;\n]*[^\s;])?\Z", description="a class; give a name without semicolons and line ends"),
]
FrameRate = Annotated[float, Meta(gt=0, le=240, description="a frame rate; give frames a second")]


class EventColumns(Struct):
    """A sound in a scene."""

    name: EventName
    start: Seconds
    end: Seconds
    gain: Decibels = 0.0
    azimuth: Degrees | None = None
    file: AnyText = ""


Events = Annotated[list[EventColumns], Meta(min_length=1, description="a list of events; give at least one")]
Mask = Annotated[list[tuple[Seconds, Seconds]], Meta(description="a list; give [[start, end], …] in seconds")]


class SoundColumns(Struct):
    """A sound to learn or to ask for, a scene of events, or an edit of one."""

    id: Id | None = None
    task: Annotated[Task | None, Meta(description="a task; give sound, enhance or tts")] = None
    caption: Text | None = None
    text: Text | None = None
    instruction: Text | None = None
    thought: Text | None = None
    prompt_text: Text | None = None
    duration: Length | None = None
    channels: Channels | None = None
    events: Events | None = None
    kind: Annotated[EditKind | None, Meta(description="a kind of edit; give add, remove, inpaint or extend")] = None
    event: Text | None = None
    video: Text | None = None
    video_rate: FrameRate | None = None
    mask: Mask | None = None


class PublishedColumns(Struct):
    """AudioCaps, VGGSound, AudioCoT and AudioCanvas."""

    audiocap_id: Id | None = None
    youtube_id: Text | None = None
    id: Id | None = None
    start_time: Seconds | None = None
    caption: Text | None = None
    label: Text | None = None
    caption_cot: AnyText | None = None
    split: AnyText | None = None

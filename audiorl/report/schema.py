"""What the report reads of eval.json, eval/*.jsonl and rollouts/*.jsonl: checked when a run folder is loaded.

Fields that are not named here are only shown, and may hold anything. A field may be null.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from audiorl.data.schema.types import Finite

Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Label = str | Annotated[int, Meta(ge=-(2**53), le=2**53)]
Value = float | bool | str | list[Any] | dict[str, Any] | None


class Clip(Struct):
    """A reference to audio."""

    path: str | None = None
    start: Seconds | None = None
    duration: Seconds | None = None


class Turn(Struct):
    """A chunk of a stream."""

    end: Seconds | None = None
    reference: str | None = None
    source: str | None = None
    reference_seconds: Seconds | None = None


class Prompt(Struct):
    """What was asked."""

    id: Label | None = None
    prompt: str | None = None
    references: list[Value] | None = None
    choices: list[Value] | None = None
    task: str | None = None
    audio: list[Clip] | None = None
    turns: list[Turn] | None = None


class Segment(Struct):
    """A part of a response."""

    text: str | None = None
    stop_reason: str | None = None
    num_tokens: Count | None = None
    source_time: Seconds | None = None
    emit_time: float | None = None


class Score(Struct):
    """A reward."""

    total: float | None = None
    parts: dict[str, float] | None = None
    per_segment: list[float | None] | None = None
    segment_parts: dict[str, list[float | None]] | None = None


class Rollout(Struct):
    """A line of rollouts/step_*.jsonl."""

    group_id: Label | None = None
    index: Label | None = None
    sample: Prompt | None = None
    segments: list[Segment] | None = None
    text: str | None = None
    score: Score | None = None
    advantage: float | None = None
    spoken_audio: Clip | None = None
    said: Clip | None = None


class Answer(Prompt):
    """A line of eval/NAME.jsonl."""

    text: str | None = None
    correct: bool | float | None = None
    parts: dict[str, float] | None = None
    sample: Prompt | None = None
    segments: list[Segment] | None = None
    score: Score | None = None
    spoken_audio: Clip | None = None
    said: Clip | None = None
    original: Clip | None = None
    decoded: Clip | None = None
    transcript: str | None = None
    transcript_of_0_1: str | None = msgspec.field(name="heard", default=None)
    cer: float | None = None
    seconds: float | None = None
    reference_audio: Clip | None = None
    f0_range: float | None = None
    energy_range: float | None = None
    pauses: float | None = None
    reference_prosody: dict[str, float] | None = None
    mel_distance: float | None = None
    stft_distance: float | None = None


class Measured(Struct):
    """What an evaluation measured on some samples."""

    n: Count | None = None
    accuracy: Share | None = None
    low: Finite | None = None
    high: Finite | None = None
    changes: dict[str, tuple[Finite, Finite, Finite]] = {}
    outside: dict[str, Value] | list[str] = []


class Evaluation(Measured):
    """An entry of eval.json."""

    by_task: dict[str, Measured] | None = None


def check(value: Any, schema: Any, where: str) -> None:
    """Raise ValueError that begins with `where` and names the field that is not what `schema` says."""
    try:
        msgspec.convert(value, schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character is no text
        raise ValueError(f"{where}: edited or damaged: {error}") from error

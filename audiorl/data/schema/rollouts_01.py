"""Rollouts as release 0.1 wrote them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from audiorl.data.schema.types import AnyText, Id, Name, Object, Seconds, Text


class RecordedFile(Struct):
    path: Text


class ClipRow01(Struct):
    """A clip in a rollout row of 0.1."""

    path: AnyText | None
    start: Seconds
    duration: Seconds | None


class TurnRow01(Struct):
    end: Seconds
    reference: AnyText
    source: AnyText
    reference_seconds: Seconds | None


class SegmentRow01(Struct):
    num_tokens: Annotated[int, Meta(ge=0, le=10**7, description="a number of tokens; give 0 or more")]
    text: AnyText
    stop_reason: Literal["eos", "stop", "length"]
    policy_version: Annotated[int, Meta(ge=0, description="a number of updates; give 0 or more")]
    source_time: Seconds | None
    emit_time: Seconds | None


class SampleRow01(Struct):
    id: Id
    prompt: AnyText
    audio: list[ClipRow01]
    references: list[AnyText]
    choices: list[AnyText]
    task: AnyText
    metadata: Object
    turns: list[TurnRow01] = []


class RolloutRow01(Struct):
    """A row of a run's rollouts as 0.1 wrote it."""

    sample: SampleRow01
    segments: Annotated[list[SegmentRow01], Meta(min_length=1, description="a list of segments; give at least one")]
    group_id: Name
    index: Annotated[int, Meta(ge=-1, description="a number within the group; give -1 (greedy) or more")]

"""Rollouts and scores as documents: what `audiorl.data.serialization` and `score_rows` read and write."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from audiorl.data.schema.types import AnyText, Integer, Object, Rate, Seconds

Index = Annotated[int, Meta(ge=0, le=2**53, description="a number from 0; give a whole one")]
Real = Annotated[float, Meta(ge=-1.7e308, le=1.7e308, description="a finite number; give one")]


class TensorDocument(Struct):
    shape: list[Index]
    data: AnyText


class ClipDocument(Struct):
    path: AnyText | None
    audio: Index | None
    sample_rate: Rate | None
    start: Seconds
    duration: Seconds | None
    context: Seconds


class ContentDocument(Struct):
    text: AnyText | None = None
    clip: Index | None = None


class MessageDocument(Struct):
    role: Literal["system", "user", "assistant"]
    content: list[ContentDocument]


class TurnDocument(Struct):
    audio: Index
    end: Seconds
    reference: AnyText
    source: AnyText
    reference_seconds: Seconds | None
    speech: list[Index]


class SampleDocument(Struct):
    id: AnyText
    messages: list[MessageDocument]
    references: list[AnyText]
    choices: list[AnyText]
    task: AnyText
    metadata: Object
    turns: list[TurnDocument]


class SegmentDocument(Struct):
    prompt_ids: TensorDocument
    ids: TensorDocument
    logprobs: TensorDocument
    codes: TensorDocument | None
    prompt_codes: TensorDocument | None
    code_mask: TensorDocument | None
    text: AnyText
    audio: list[Index]
    stop_reason: Literal["eos", "stop", "length"]
    policy_version: Index
    source_time: Seconds | None
    emit_time: Seconds | None
    decoder_passes: Index | None = None


class RolloutDocument(Struct):
    sample: Index
    segments: list[SegmentDocument]
    group_id: AnyText
    index: Annotated[Integer, Meta(description="a whole number; give that of the rollout in its group")]
    spoken_audio: Index | None


class VersionDocument(Struct):
    version: Index


class RolloutsDocument(Struct):
    audio: list[AnyText]
    clips: list[ClipDocument]
    samples: list[SampleDocument]
    rollouts: list[RolloutDocument]


class ScoreDocument(Struct):
    total: Real
    parts: dict[str, Real]
    per_segment: list[Real | None] | None
    per_token: list[Real] | None
    segment_parts: dict[str, list[Real | None]]
    weights: dict[str, Real] = {}


class ScoresDocument(Struct):
    scores: list[ScoreDocument | None]

"""Rows of results that are scored, of recordings and of scripts of speech."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from audiorl.data.schema.types import (
    AnyText,
    Channel,
    Choices,
    Finite,
    Hotwords,
    Id,
    Language,
    Name,
    OwnId,
    Seconds,
    Text,
)

Group = Annotated[str | list[str], Meta(description="a name; give a text or a list of texts")]


class RubricItem(Struct):
    """A criterion of MMAR-Rubrics and the points that it may give."""

    name: AnyText
    choices: Annotated[list[Finite], Meta(min_length=1, description="a list of numbers; give the points")]


class BenchmarkRow(Struct):
    """A question of MMAU, MMAR or MMSU, with the model's outputs and the raters'."""

    id: OwnId
    question: AnyText | None = None
    choices: Annotated[list[str], Choices] | None = None
    answer: AnyText | None = None
    model_output: AnyText | None = None
    model_prediction: AnyText | None = None
    answer_prediction: AnyText | None = None
    answer_gt: AnyText | None = None
    choice_a: AnyText | None = None
    choice_b: AnyText | None = None
    choice_c: AnyText | None = None
    choice_d: AnyText | None = None
    response: AnyText | None = None
    rubric: Annotated[list[RubricItem], Meta(description="a list; give the rubric's criteria")] | None = None
    raw_responses: Annotated[list[AnyText], Meta(description="a list of texts; give the raters' responses")] | None = (
        None
    )
    task: Group | None = None
    modality: Group | None = None
    category: Group | None = None
    sub_category: Group | None = msgspec.field(name="sub-category", default=None)
    sub_sub_category: Group | None = msgspec.field(name="sub-sub-category", default=None)
    task_name: Group | None = None
    difficulty: Group | None = None


class ResultRow(Struct):
    """A row of an evaluation's results."""

    id: OwnId
    text: AnyText | None = None
    reference: AnyText | None = None
    hypothesis: AnyText | None = None
    language: Language | None = None
    speaker: Name | None = None
    seconds: Seconds | None = None
    hotwords: Hotwords | None = None


class RecordingRow(Struct):
    """A row of a corpus's manifest: of the bundled one, or one that `data build` or `annotate` wrote."""

    id: Text
    language: Text
    text: Text
    audio: Text
    duration: Seconds
    speaker: Text
    licence: Annotated[str, Meta(pattern=r"\S", description="a licence; write the recording's licence there")]
    key: AnyText = ""
    translation: AnyText = ""
    start: Seconds | None = None
    channel: Channel | None = None


class CaseRow(Struct):
    """A text of EmergentTTS-Eval."""

    category: Text
    unique_id_eval: Id | None = None
    id: Id | None = None
    text_to_synthesize: Text | None = None
    text: Text | None = None
    evolution_depth: (
        Annotated[int, Meta(ge=0, le=1000, description="a depth; give a whole number from 0, or leave it out")] | None
    ) = None


class TurnRow(Struct):
    """A turn of a conversation of voices: a part of the conversation's recording, or one of its own."""

    speaker: Text
    text: Text
    audio: Text | None = None
    start: Seconds | None = None
    duration: Annotated[float, Meta(gt=0, le=1e9, description="a duration; give seconds, more than 0")] | None = None
    channel: Channel | None = None


class VoiceRow(Struct):
    """A speaker's voice: a recording, or a part of it, and what is said there."""

    audio: Text
    text: Text
    start: Seconds | None = None
    duration: Annotated[float, Meta(gt=0, le=1e9, description="a duration; give seconds, more than 0")] | None = None
    channel: Channel | None = None


class ConversationRow(Struct):
    id: Text
    turns: Annotated[list[TurnRow], Meta(min_length=1, description="a list of turns; give at least one")]
    voices: Annotated[dict[str, VoiceRow], Meta(description='an object; give {"SPEAKER": {audio, text}}')] = {}
    audio: Text | None = None

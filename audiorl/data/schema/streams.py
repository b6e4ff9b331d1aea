"""Rows of streams to interpret, of published sets of talks, and of the logs that SimulEval writes."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from audiorl.data.schema.types import AnyText, Id, Language, LogTime, Milliseconds, Name, Object, Seconds, Text


class TargetAudio(Struct):
    """A recording of a unit's translation."""

    path: Text
    start: Seconds = 0.0
    duration: Seconds | None = None


class UnitColumns(Struct):
    start: Seconds
    end: Seconds
    target: AnyText
    source: AnyText | None = None
    target_seconds: Seconds | None = None
    target_audio: TargetAudio | None = None
    speaker: AnyText | None = None


class WordColumns(Struct):
    word: AnyText
    start: Seconds
    end: Seconds


class StreamColumns(Struct):
    """A stream with its units, or a sentence pair."""

    id: Id | None = None
    units: (
        Annotated[
            list[Annotated[UnitColumns, Meta(description="an object; give {start, end, source, target}")]],
            Meta(description="a list; give [{start, end, source, target}, …]"),
        ]
        | None
    ) = None
    source: AnyText | None = None
    target: AnyText | None = None
    words: Annotated[list[WordColumns], Meta(description="a list of words; give [{word, start, end}, …]")] | None = None
    source_language: Language | None = None
    target_language: Language | None = None
    seconds: Seconds | None = None
    duration: Seconds | None = None
    metadata: Object | None = None


class RealSIUtterance(Struct):
    sub_start_time: Milliseconds
    sub_end_time: Milliseconds
    sub_trg_text: AnyText
    sub_src_text: AnyText
    term: list[Any] | None = None


class RealSITalk(Struct):
    vid: Text
    segment: Annotated[list[Any], Meta(min_length=1, description="a list of segments; give at least one")]
    duration: Milliseconds | None = None


class RealSISegment(Struct):
    utterance: Annotated[list[Any], Meta(description="a list; give the utterances")]


class MuSTCRecording(Struct):
    wav: Text


class MuSTCSegment(MuSTCRecording):
    """A segment of MuST-C and IWSLT, times in seconds."""

    offset: Seconds
    duration: Seconds
    speaker_id: Name | None = None


class ReferenceColumns(Struct):
    """A segment of a reference segmentation."""

    wav: Annotated[str, Meta(pattern=r"\S", description="a name; name the recording")]
    offset: Seconds
    duration: Annotated[float, Meta(gt=0, le=1e9, description="a duration; give seconds, more than 0")]
    reference: Annotated[str, Meta(description="a text; write it here, or give a file of references")]


class LogLine(Struct):
    """A line of instances.log. Times in ms of audio, or in words of a text source."""

    index: Annotated[int, Meta(ge=0, le=2**53, description="a whole number from 0; number the instances")]
    prediction: AnyText
    delays: Annotated[list[LogTime], Meta(description="a list of numbers; give one a word or character")]
    elapsed: Annotated[list[LogTime], Meta(description="a list of numbers; give one a delay, or none")]
    prediction_length: LogTime
    reference: AnyText | None
    source: Annotated[str | list[str], Meta(description="text or a list of texts; name the source")]
    source_length: Annotated[
        Annotated[int, Meta(gt=0, le=10**12)] | Annotated[float, Meta(gt=0, le=1e12)],
        Meta(description="a length; give ms, more than 0"),
    ]


class SpeechLogLine(LogLine):
    """A line of instances.log whose output is speech."""

    durations: list[Annotated[float, Meta(gt=0, le=1e12, description="a duration; leave out chunks without sound")]]
    prediction_offset: LogTime
    intervals: Annotated[
        list[Annotated[tuple[LogTime, LogTime], Meta(description="[start, duration]; give both in ms")]],
        Meta(description="a list; give [start, duration] of each chunk"),
    ]

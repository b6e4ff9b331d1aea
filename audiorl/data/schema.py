"""What the fields of rows may hold: one struct a kind of row, checked with msgspec where the row is read.

    columns = check(row.data, SampleColumns)    # FieldError, field 'language': ['en'] is not a language; give an ISO …

Fields that a struct does not name are not checked. The description of a type completes "3 is not …" and says what to do
after the semicolon. None is a field that is not given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")


class FieldError(ValueError):
    """A field that cannot be used, with the reason and the remedy."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


# -- types -------------------------------------------------------------------------------------------------------------

Text = Annotated[str, Meta(pattern=r"\S", description="a text; give one that is not empty")]
AnyText = Annotated[str, Meta(description="a text; give the text")]
Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
Seconds = Annotated[float, Meta(ge=0, le=1e9, description="a time; give seconds, 0 or more")]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12, description="a time; give ms, 0 or more")]
LogTime = Annotated[
    Annotated[int, Meta(ge=0, le=10**12)] | Annotated[float, Meta(ge=0, le=1e12)],
    Meta(description="a number from 0; write ms (or source words)"),
]
Rate = Annotated[
    int, Meta(ge=1000, le=1_000_000, description="a sampling rate; give Hz as a whole number, 1000 to 1000000")
]
Id = Annotated[
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Text,
    Meta(description="an id; give a text or a whole number, or leave the column out"),
]
Name = Annotated[Integer | str, Meta(description="a name; give a text, or leave the column out")]
Language = Annotated[str, Meta(pattern=r"^(\S.*)?$", description="a language; give an ISO code such as en")]
Task = Annotated[str, Meta(description="the name of a task; give a text, or leave the column out")]
Object = Annotated[dict[str, Any], Meta(description="an object; give {…}, or leave it out")]
Answer = str | Integer | Finite
_CHOICES = Meta(description="a list of texts; give every choice as a text that is not empty")
Question = Annotated[str, Meta(pattern=r"\S", description="a text; give the question")]
Transcript = Annotated[str, Meta(description="a text; give the transcript")]


class AudioObject(Struct):
    """Audio as `datasets` stores it."""

    path: AnyText | None = None
    bytes_: Annotated[bytes, Meta(description="bytes; give those of an audio file")] | None = msgspec.field(
        name="bytes", default=None
    )
    array: Any = None
    sampling_rate: Rate | None = None


Audio = Annotated[Text | AudioObject, Meta(description="audio; give a path, or an object with path, bytes or array")]


# -- manifests ---------------------------------------------------------------------------------------------------------


class AudioColumns(Struct):
    """The audio of a row, under one of several names, its part that is meant, and its sampling rate."""

    audio: Audio | None = None
    audio_path: Audio | None = None
    audio_filepath: Audio | None = None
    audio_id: Audio | None = None
    prompt_audio: Audio | None = None
    video_name: Audio | None = None

    start: Seconds | None = None
    offset: Seconds | None = None
    duration: Seconds | None = None
    sample_rate: Rate | None = None
    sampling_rate: Rate | None = None


class SampleColumns(Struct):
    """A question, or speech with its text."""

    id: Id | None = None
    question: Question | None = None
    question_text: Question | None = None
    choices: Annotated[list[str], _CHOICES] | None = None
    multi_choice: Annotated[list[Answer], _CHOICES] | None = None
    answer: (
        Annotated[Answer | list[Answer], Meta(description="a text; give the text of the answer, or its index from 0")]
        | None
    ) = None
    text: Transcript | None = None
    transcript: Transcript | None = None
    sentence: Transcript | None = None
    language: Language | None = None
    lang: Language | None = None
    task: Task | None = None
    speaker: Name | None = None
    video_name: Text | None = None


class MMSUColumns(Struct):
    """A question of MMSU: its choices in columns, the answer as the text of one."""

    question: Question
    choice_a: Text
    choice_b: Text
    choice_c: AnyText | None = None
    choice_d: AnyText | None = None
    answer_gt: AnyText | None = None
    task_name: Task | None = None


class UtteranceColumns(Struct):
    """A text to say, in the voice of `prompt_audio` if there is one."""

    id: Id | None = None
    text: Text | None = None
    transcript: Text | None = None
    sentence: Text | None = None
    speaker: Name | None = None
    language: Language | None = None
    prompt_text: Text | None = None


class WenetSpeechRecording(Struct):
    """A recording of WenetSpeech.json."""

    path: Text
    segments: Annotated[list[Any], Meta(min_length=1, description="a list of segments; give at least one")]
    aid: Id | None = None


class WenetSpeechSegment(Struct):
    begin_time: Seconds
    end_time: Seconds
    sid: Id | None = None


class CutSource(Struct):
    """Where the audio of lhotse's recording is."""

    type: Text
    source: AnyText


class CutRecording(Struct):
    sources: Annotated[list[CutSource], Meta(min_length=1, description="a list; give where the recording is")]


class CutSupervision(Struct):
    text: AnyText = ""
    start: Annotated[float, Meta(ge=-1e9, le=1e9, description="a time; give seconds")] = 0.0
    language: Name | None = None
    speaker: Name | None = None


class Cut(Struct):
    """A line of lhotse's cuts."""

    id: Text
    start: Seconds
    duration: Seconds
    recording: CutRecording
    supervisions: list[CutSupervision]
    type: Text = "MonoCut"
    custom: dict[str, Any] | None = None


class MusicBenchColumns(Struct):
    """A row of MusicBench as published."""

    location: Annotated[str, Meta(pattern=r"\S", description="a path; give that of the clip")]
    key: Annotated[list[str | None], Meta(description="a list; give the root and the mode")] | None = None
    prompt_bpm: AnyText | None = None
    prompt_bt: AnyText | None = None


class TextQuestionColumns(Struct):
    """A question without audio."""

    question: Question
    choices: Annotated[list[Text], Meta(min_length=2, description="a list of texts; give two or more")]
    answer: Annotated[str, Meta(description="a text; give that of the right choice")]


class PassageColumns(Struct):
    text: Annotated[str, Meta(pattern=r"\S", description="a text; give a passage")]


# -- preferences -------------------------------------------------------------------------------------------------------


class ContentPart(AudioColumns, kw_only=True):
    """A piece of a message, as chat templates have it."""

    type: Literal["text", "audio"]
    text: AnyText | None = None


Content = Annotated[str | ContentPart, Meta(description='text or audio; give "…" or {"type": "audio", "audio": "…"}')]


class ChatMessage(Struct):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        str | ContentPart | list[Content],
        Meta(description='text or audio; give "…" or [{"type": "audio", "audio": "…"}, …]'),
    ]


Reply = Annotated[
    str | list[ChatMessage], Meta(description='a text; give "…" or [{"role": "assistant", "content": "…"}]')
]
TextList = Annotated[list[Text] | Text, Meta(description="a list of texts; give each as a text that is not empty")]
Verdict = Annotated[bool | Finite, Meta(description="a verdict; give true or false")]


class PairColumns(Struct):
    chosen: Reply
    rejected: Reply
    margin: (
        Annotated[Finite, Meta(description="a finite number; give by how much chosen is better, or leave it out")]
        | None
    ) = None


class JudgedColumns(Struct):
    answer: Reply | None = None
    completion: Reply | None = None
    desirable: Verdict | None = None
    label: Verdict | None = None


class StepsColumns(Struct):
    steps: Annotated[list[str], Meta(description="a list of texts; give one text a step")]
    labels: Annotated[
        list[
            Annotated[
                bool | Annotated[float, Meta(ge=0, le=1)],
                Meta(description="a label; give a number from 0 (wrong) to 1 (right)"),
            ]
        ],
        Meta(description="a list; give one label a step"),
    ]


class ConversationColumns(Struct):
    """A row whose `prompt` is the whole conversation."""

    prompt: Annotated[
        list[Annotated[ChatMessage, Meta(description="a message; give role (system, user or assistant) and content")]],
        Meta(description="a list of messages; a plain question belongs in question"),
    ]
    id: Id | None = None
    references: TextList | None = None
    answer: TextList | None = None
    choices: TextList | None = None
    task: Task | None = None
    metadata: Object | None = None


# -- streams -----------------------------------------------------------------------------------------------------------


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


# -- results and recordings --------------------------------------------------------------------------------------------


Group = Annotated[str | list[str], Meta(description="a name; give a text or a list of texts")]


class RubricItem(Struct):
    """A criterion of MMAR-Rubrics and the points that it may give."""

    name: AnyText
    choices: Annotated[list[Finite], Meta(min_length=1, description="a list of numbers; give the points")]


class BenchmarkRow(Struct):
    """A question of MMAU, MMAR or MMSU, with the model's outputs and the raters'."""

    id: Id
    question: AnyText | None = None
    choices: Annotated[list[str], _CHOICES] | None = None
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

    id: Id
    text: AnyText | None = None
    reference: AnyText | None = None
    hypothesis: AnyText | None = None
    language: Language | None = None
    speaker: Name | None = None
    seconds: Seconds | None = None


class RecordingRow(Struct):
    """A row of the bundled corpus's manifest."""

    id: Text
    key: Text
    language: Text
    text: Text
    audio: Text
    duration: Seconds
    speaker: Text
    licence: Annotated[str, Meta(pattern=r"\S", description="a licence; write the recording's licence there")]
    translation: AnyText = ""


class TurnRow(Struct):
    """A turn of a conversation of voices: a part of the conversation's recording, or one of its own."""

    speaker: Text
    text: Text
    audio: Text | None = None
    start: Seconds | None = None
    duration: Annotated[float, Meta(gt=0, le=1e9, description="a duration; give seconds, more than 0")] | None = None


class ConversationRow(Struct):
    id: Text
    turns: Annotated[list[TurnRow], Meta(min_length=1, description="a list of turns; give at least one")]
    audio: Text | None = None


# -- rollouts as documents (audiorl.data.serialization) ----------------------------------------------------------------

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


# -- rollouts as 0.1 wrote them ----------------------------------------------------------------------------------------


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


# -- checking ----------------------------------------------------------------------------------------------------------


def check(data: Any, schema: type[T], prefix: str = "") -> T:
    """`data` as `schema`. Raises FieldError naming the field, after `prefix`, that is missing or wrong."""
    try:
        return msgspec.convert(data, schema, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `")
    place = place.partition("[...]")[0]  # a key of a mapping is not named
    path: list[str | int] = [name or int(index) for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place)]
    missing = re.search(r"missing required field `(.+)`", reason)
    if missing:
        path.append(missing[1])
    depth, expected = max(_descriptions(schema, path), key=lambda described: described[0], default=(0, "an object"))
    value: Any = None if missing else data
    for step in () if missing else path[:depth]:
        value = value[step]
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[:depth])
    field = f"{prefix}{field}".removeprefix(".")
    if value is not None:
        raise FieldError(field, f"{_short(value)} is not {expected}")
    columns = f" (the columns are {', '.join(map(str, data))})" if missing and len(path) == 1 else ""
    raise FieldError(field, f"missing; {expected.partition('; ')[2] or f'give {expected}'}{columns}")


def check_limit(limit: int | None) -> None:
    """Raise ValueError for a number of rows below 1."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a whole number from 1, or None for all rows, got {limit!r}")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for what is not JSON or UTF-8, and for half a surrogate pair."""
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\ud" in text.lower():
        check_characters(value)
    return value


def check_characters(value: Any, field: str = "") -> None:
    """Raise FieldError for a text with half a surrogate pair, which JSON can escape and UTF-8 cannot hold."""
    if isinstance(value, str) and _HALF.search(value):
        raise FieldError(field, f"{_short(value)} holds half a character; write both halves of its surrogate pair")
    if isinstance(value, dict):
        for name, held in value.items():
            check_characters(name, field)
            check_characters(held, f"{field}.{name}".removeprefix("."))
    if isinstance(value, list):
        for number, held in enumerate(value):
            check_characters(held, f"{field}[{number}]")


_HALF = re.compile("[\ud800-\udfff]")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _descriptions(hint: Any, path: Sequence[str | int], depth: int = 0) -> Iterator[tuple[int, str]]:
    """(steps of `path`, description) of every type on the way to a place, each before the types that it consists of."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        yield from ((depth, meta.description) for meta in arguments[1:] if meta.description)
        yield from _descriptions(arguments[0], path, depth)
    elif kind in (Union, UnionType):
        for member in arguments:
            yield from _descriptions(member, path, depth)
    elif kind is Literal:
        yield depth, f"one of {', '.join(map(str, arguments))}"
    elif kind in (list, tuple):
        yield depth, "a list"
        if depth < len(path):
            yield from _descriptions(arguments[0], path, depth + 1)
    elif isinstance(hint, type) and issubclass(hint, Struct):
        fields = msgspec.structs.fields(hint)
        yield depth, f"an object; give {{{', '.join(f.encode_name for f in fields)}}}"
        for f in fields:
            if depth < len(path) and f.encode_name == path[depth]:
                yield from _descriptions(f.type, path, depth + 1)

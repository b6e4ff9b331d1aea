"""Rows of manifests: questions about audio, utterances, and the formats of published sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from audiorl.data.schema.types import (
    Answer,
    AnyText,
    Audio,
    Channel,
    Choices,
    Finite,
    Hotwords,
    Id,
    Integer,
    Language,
    Name,
    Object,
    Question,
    Rate,
    Seconds,
    Task,
    Text,
    Transcript,
)


class AudioColumns(Struct):
    """The audio of a row, under one of several names, its part that is meant, and its sampling rate."""

    audio: Audio | None = None
    audio_path: Audio | None = None
    audio_filepath: Audio | None = None
    audio_id: Audio | None = None
    file_name: Audio | None = None
    audio_url: Audio | None = None
    path: Audio | None = None
    url: Audio | None = None
    prompt_audio: Audio | None = None
    clean_audio: Audio | None = None
    video_name: Audio | None = None

    start: Seconds | None = None
    offset: Seconds | None = None
    end: Seconds | None = None
    end_time: Seconds | None = None
    duration: Seconds | None = None
    channel: Channel | None = None
    channel_selector: Channel | Literal["average"] | None = None
    sample_rate: Rate | None = None
    sampling_rate: Rate | None = None


class SampleColumns(Struct):
    """A question, or speech with its text."""

    id: Id | None = None
    question: Question | None = None
    question_text: Question | None = None
    choices: Annotated[list[str], Choices] | None = None
    multi_choice: Annotated[list[Answer], Choices] | None = None
    answer: (
        Annotated[Answer | list[Answer], Meta(description="a text; give the text of the answer, or its index from 0")]
        | None
    ) = None
    text: Transcript | None = None
    transcript: Transcript | None = None
    transcription: Transcript | None = None
    sentence: Transcript | None = None
    language: Language | None = None
    lang: Language | None = None
    task: Task | None = None
    speaker: Name | None = None
    rationale: Text | None = None
    hotwords: Hotwords | None = None
    video_name: Text | None = None


class ContentPart(AudioColumns, kw_only=True):
    """A piece of a message, as chat templates have it; audio and images without a source are the row's next."""

    type: Literal["text", "audio", "image"]
    text: AnyText | None = None
    image: Any = None
    image_url: Any = None


Content = Annotated[
    str | ContentPart,
    Meta(description='text, audio or an image; give "…" or {"type": "audio", "audio": "…"}'),
]
Contents = Annotated[
    str | ContentPart | list[Content],
    Meta(description='text, audio or images; give "…" or [{"type": "audio", "audio": "…"}, …]'),
]


class ChatMessage(Struct):
    role: Literal["system", "user", "assistant"]
    content: Contents
    loss: bool | Finite | None = None


Turn = Annotated[ChatMessage, Meta(description="a message; give role (system, user or assistant) and content")]
Reply = Annotated[str | list[Turn], Meta(description='a text; give "…" or [{"role": "assistant", "content": "…"}]')]
Turns = Annotated[
    list[Turn],
    Meta(min_length=1, description="a list of messages; give at least the user's"),
]
Texts = Annotated[
    Text | Integer | Finite | list[Text | Integer | Finite],
    Meta(description="a list of texts; give each as a text that is not empty"),
]


class ConversationColumns(Struct):
    """A conversation, under one of several names, and what its answer is."""

    messages: Turns | None = None
    conversations: Turns | None = None
    conversation: Turns | None = None
    prompt: Turns | None = None
    query: Turns | None = None
    instruction: Turns | None = None
    system: AnyText | None = None
    audios: Audio | list[Audio] | None = None
    images: Any = None
    image: Any = None
    id: Id | None = None
    references: Texts | None = None
    solution: Texts | None = None
    answer: Texts | None = None
    choices: Annotated[list[Text], Choices] | None = None
    task: Task | None = None
    metadata: Object | None = None


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
    transcription: Text | None = None
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
    channels: tuple[int, ...] | None = None


class CutRecording(Struct):
    sources: Annotated[list[CutSource], Meta(min_length=1, description="a list; give where the recording is")]
    transforms: list[Any] | None = None


class CutSupervision(Struct):
    text: AnyText = ""
    start: Annotated[float, Meta(ge=-1e9, le=1e9, description="a time; give seconds")] = 0.0
    language: Name | None = None
    speaker: Name | None = None
    channel: Channel | None = None


class Cut(Struct):
    """A line of lhotse's cuts."""

    id: Text
    start: Seconds
    duration: Seconds
    recording: Annotated[
        CutRecording, Meta(description="a recording; cuts with features alone hold no audio: save them with recordings")
    ]
    supervisions: list[CutSupervision]
    channel: Channel | None = None
    transforms: list[Any] | None = None
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

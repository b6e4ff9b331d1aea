"""Formats of manifests: a row becomes a Sample, or a FieldError that names the field and the remedy.

docs/reference/data.md lists the columns of each format; others are kept in `Sample.metadata`. MMAU and MMAR have rows
that offer a choice twice or an empty one: it is offered once, or not at all. AVQA and MusicBench as their authors
publish them become questions about audio as Ke-Omni-R made them, with these differences: the questions are in our
words, keys that sound the same (F# and Gb) are one choice, and a question that two rows ask about one clip is asked
once. Wrong choices and their order are drawn from the question's id, so that every reading gives the same.
"""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import EllipsisType
from typing import Any

import numpy as np

from audiorl.audio import AUDIO_SUFFIXES, AudioClip
from audiorl.data.hotwords import checked_hotwords
from audiorl.data.prompts import asr_prompt, choice_question, how_to_answer, open_question
from audiorl.data.rows import AnyRow, BadRow, LeftOut, Row, stored
from audiorl.data.schema import FieldError, check, check_language
from audiorl.data.schema.manifests import (
    AudioColumns,
    ChatMessage,
    ContentPart,
    ConversationColumns,
    MMSUColumns,
    MusicBenchColumns,
    SampleColumns,
)
from audiorl.data.schema.types import AudioObject
from audiorl.pictures import Picture
from audiorl.types import Message, Sample

AUDIO_FIELDS = ("audio", "audio_path", "audio_filepath", "audio_id", "file_name")
TEXT_FIELDS = ("text", "transcript", "transcription", "sentence")
CONVERSATIONS = ("messages", "conversations", "conversation", "prompt")
"""Columns that hold the turns of a conversation."""
ASKED = {"prompt": "completion", "query": "response", "instruction": "output"}
"""Columns that ask, with those of the answers, where no column holds turns: TRL's, ms-swift's, Alpaca's."""
PLACEHOLDER = "<audio>"
"""Where the next clip of the row stands in a text, as in ms-swift and LLaMA-Factory."""
PICTURE_FIELDS = ("images", "image")
IMAGE = "<image>"
"""Where the next picture of the row stands in a text."""
BEGINS, ENDS = ("start", "offset"), ("end", "end_time")
PART = (*BEGINS, *ENDS, "duration", "channel", "channel_selector")
"""Columns that select a part of the audio, ours and NeMo's."""


Answer = str | AudioClip  # a written answer, or the recording of a spoken one


@dataclass(frozen=True)
class Style:
    """How rows become prompts: where relative paths start, whether to ask for thinking, a question for rows without,
    whether a question must have an answer, whether conversations stay as they are."""

    root: Path
    think: bool = True
    question: str | None = None
    need_answer: bool = True
    keep_conversations: bool = False


def native(row: Row, style: Style) -> Sample:
    columns = check(row.data, SampleColumns)
    asks = columns.question is not None or columns.choices is not None
    if asks or (style.question and not any(row.data.get(name) for name in TEXT_FIELDS)):
        sample = _question_sample(row, style, columns, audio_field(row), open_ended=True)
    else:
        sample = asr(row, style)
    if row.data.get("clean_audio") is None:
        return sample
    return replace(sample, metadata={**sample.metadata, "clean_audio": clip_of(row, style, "clean_audio")})


def avqa(row: Row, style: Style) -> Sample:
    """AVQA and MusicBench. AVQA's questions speak of a video, of which the model gets the audio only."""
    columns = check(row.data, SampleColumns)
    data = dict(row.data)
    if columns.video_name is not None:
        data.setdefault("recording", columns.video_name)
        if data.get("audio_path") is None:
            files = (columns.video_name + suffix for suffix in (*AUDIO_SUFFIXES, ".mp4", ".mkv"))
            there = (file for file in files if (style.root / file).exists())
            data["audio_path"] = next(there, f"{columns.video_name}.wav")
        if columns.question_text is not None:
            data["question_text"] = _about_audio(columns.question_text)
    if columns.multi_choice:
        choices = [str(choice).strip() for choice in columns.multi_choice]
        answer = columns.answer
        if isinstance(answer, str) and answer.strip().isdecimal() and answer.strip() not in choices:
            answer = float(answer)
        if isinstance(answer, float) and answer.is_integer():  # an index, as some files hold it
            answer = int(answer)
        if 1 < len(set(choices)) < len(choices):  # some questions offer a choice twice
            if isinstance(answer, int) and 0 <= answer < len(choices):
                answer = choices[answer]
            choices = list(dict.fromkeys(choices))
        data |= {"multi_choice": choices, "answer": answer}
    row = replace(row, data=data)
    columns = check(data, SampleColumns)
    return _question_sample(row, style, columns, "audio_path", "question_text", "multi_choice")


def _about_audio(question: str) -> str:
    """
    >>> _about_audio("What are the main sound sources in the video?")
    'What are the main sound sources in the audio?'
    """
    return re.sub(r"\bvideo(s?)\b", lambda m: ("A" if m[0][0] == "V" else "a") + "udio", question, flags=re.IGNORECASE)


def mmau(row: Row, style: Style) -> Sample:
    return _benchmark_sample(row, style, "audio_id")


def mmar(row: Row, style: Style) -> Sample:
    return _benchmark_sample(row, style, "audio_path")


def mmsu(row: Row, style: Style) -> Sample:
    check(row.data, SampleColumns)  # columns of other formats, which are replaced here
    columns = check(row.data, MMSUColumns)
    choices = [columns.choice_a, columns.choice_b, columns.choice_c, columns.choice_d]
    replaced = ("choice_a", "choice_b", "choice_c", "choice_d", "answer_gt")
    data = {name: value for name, value in row.data.items() if name not in replaced}
    answer = (columns.answer_gt or "").strip() or None
    data |= {"choices": [c for c in choices if c], "answer": answer, "task": columns.task_name}
    try:
        return _benchmark_sample(replace(row, data=data), style, audio_field(row))
    except FieldError as error:
        column = {"answer": "answer_gt", "choices": "choice_a"}.get(error.field, error.field)
        raise FieldError(column, error.message) from error


def _benchmark_sample(row: Row, style: Style, audio: str) -> Sample:
    """Return a question with every choice once and without empty ones."""
    choices = [str(choice).strip() for choice in check(row.data, SampleColumns).choices or ()]
    row = replace(row, data={**row.data, "choices": list(dict.fromkeys(c for c in choices if c))})
    return _question_sample(row, style, check(row.data, SampleColumns), audio)


def asr(row: Row, style: Style) -> Sample:
    columns = check(row.data, SampleColumns)
    text = next((name for name in TEXT_FIELDS if row.data.get(name) is not None), None)
    if text is None:
        raise FieldError("text", f"missing; give the transcript in text{existing_columns(row, 'text')}")
    transcript = row.data[text].strip()
    if not transcript and columns.task != "no_speech":
        raise FieldError(text, "empty; give the transcript")
    clip = clip_of(row, style, audio_field(row))
    check_language(columns.language)
    check_language(columns.lang, "lang")
    hotwords, language = checked_hotwords(columns.hotwords or ()), columns.language or columns.lang or ""
    messages = asr_prompt(clip, language, style.think, ask=style.question or "", hotwords=hotwords)
    messages = _looking(messages, row, style)
    metadata = {**_rest(row, text), "text": transcript} | ({"hotwords": list(hotwords)} if hotwords else {})
    return Sample(_id(row, clip), messages, (transcript,), task=columns.task or "asr", metadata=metadata)


# -- conversations -----------------------------------------------------------------------------------------------------


def conversation(row: Row, style: Style) -> Sample:
    """Return the prompt of a conversation, with the last turn as its reference unless a column says another.

    Unless conversations are to stay as they are, the last user turn asks for the answer in tags, if nothing does yet.
    SFT learns `metadata["last_turn"]` where it is there, else the reference, and the assistant's earlier messages whose
    numbers `metadata["learned_turns"]` holds. `prompt` is taken as a whole; of other columns the last turn comes off.
    """
    pictures_in, pictures = _pictures_of(row, style)
    field, given = turns_of(row)
    columns = check({**row.data, field: given}, ConversationColumns)
    turns: list[ChatMessage] = getattr(columns, field)
    contents = [[piece for part in _parts(turn) for piece in _pieces(part, style, bool(pictures))] for turn in turns]
    if pictures and not any(piece is ... or isinstance(piece, Picture) for content in contents for piece in content):
        asking = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
        contents[asking][:0] = [...] * len(pictures)
    looks = sum(piece is ... for content in contents for piece in content)
    if looks != len(pictures):
        count = f"{len(pictures)} picture{'' if len(pictures) == 1 else 's'}, {looks} place{'' if looks == 1 else 's'}"
        raise FieldError(pictures_in, f"{count} for one in {field}; write {IMAGE} once for each, where it is seen")
    clips_in, clips = ("audios" if row.data.get("audios") is not None else audio_field(row)), list[AudioClip]()
    if clips_in == "audios" or not any(isinstance(piece, AudioClip) for content in contents for piece in content):
        clips = _clips_of(row, style, clips_in)
    places = sum(piece is None for content in contents for piece in content)
    if clips and not any(piece is None or isinstance(piece, AudioClip) for content in contents for piece in content):
        asking = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
        contents[asking][:0] = [None] * len(clips)  # where ms-swift and TRL put them, too
    elif places != len(clips):
        count = f"{len(clips)} clip{'' if len(clips) == 1 else 's'}, {places} place{'' if places == 1 else 's'} for one"
        raise FieldError(clips_in, f"{count} in {field}; write {PLACEHOLDER} once for each clip, where it is heard")
    waiting, unseen = iter(clips), iter(pictures)
    messages, learned = list[Message](), list[int]()
    for turn, content in zip(turns, contents, strict=True):
        pieces = tuple(
            next(waiting) if piece is None else next(unseen) if piece is ... else piece
            for piece in content
            if piece != ""
        )
        if turn.role == "assistant" and turn.loss is not False and all(isinstance(piece, str) for piece in pieces):
            learned.append(len(messages))
        messages.append(Message(turn.role, pieces or ("",)))
    last, answered = "", field != "prompt" or row.data.get("completion") is not None
    answered = answered and messages[-1].role == "assistant"
    before = messages[:-1] if answered else messages
    if not any(m.role == "user" for m in before) or (answered and before[-1].role != "user"):
        raise FieldError(field, "no user's turn before the assistant's last; give what is asked")
    if answered:
        answer = spoken_or_written(messages.pop().content, f"{field}[{len(messages)}].content")
        if isinstance(answer, AudioClip):
            raise FieldError(field, "ends with a spoken answer; give a text, or give the answers in pairs")
        last = answer
    gold = next((name for name in ("references", "solution", "answer") if getattr(columns, name) is not None), None)
    texts = getattr(columns, gold) if gold else last or []
    references = tuple(_inside_tags(str(text)) for text in (texts if isinstance(texts, list) else [texts]))
    if style.need_answer and not references:
        remedy = f"end with the assistant's turn, or give solution or answer{existing_columns(row, 'answer')}"
        raise FieldError("answer", f"missing; {remedy}")
    used = {
        field,
        ASKED.get(field),
        gold,
        "system",
        "choices",
        "task",
        "metadata",
        "id",
        "audios",
        "images",
        "image",
        "videos",
    }
    used |= {"history", "input"} if isinstance(row.data[field], str) else set()
    used |= {clips_in} if clips else set()
    metadata = {name: value for name, value in row.data.items() if name not in used and value is not None}
    system = bool(columns.system) and messages[0].role != "system"
    if field != "prompt" and (earlier := [i + system for i in learned if i < len(messages)]):
        metadata["learned_turns"] = earlier
    if system:
        messages.insert(0, Message("system", (columns.system or "",)))
    said = "".join(piece for m in messages for piece in m.content if isinstance(piece, str))
    if not (style.keep_conversations or "<answer>" in said or "<think>" in said) and messages[-1].role == "user":
        *heard, end = messages[-1].content
        asked = [f"{end}\n{how_to_answer(style.think)}"] if isinstance(end, str) else [end, how_to_answer(style.think)]
        messages[-1] = Message("user", (*heard, *asked))
    if last and (style.keep_conversations or "<answer>" in last):
        metadata["last_turn"] = last
    sample = Sample(
        id=f"{Path(row.file).stem}:{row.number}" if columns.id is None else str(columns.id).strip(),
        messages=tuple(messages),
        references=references,
        choices=tuple(columns.choices or ()),
        task="qa" if columns.task is None else columns.task,
        metadata={**(columns.metadata or {}), **metadata},
    )
    if not sample.audio and not sample.images and sample.metadata.get("respond") != "speech":
        raise FieldError(field, 'holds no audio; name it in audios, or put {"type": "audio", "audio": "…"} in a turn')
    offered = list(sample.choices)
    if len(set(offered)) < len(offered):
        raise FieldError("choices", f"{offered} hold one twice; give every choice once")
    if offered and references and references[0] not in offered:
        raise FieldError(gold or field, f"{references[0]!r} is not among the choices {offered}; give the exact text")
    return sample


def is_conversation(row: Row) -> bool:
    """Tell if a column holds turns, or one asks and no other column of a question or an utterance is there."""
    columns = {name for name, value in row.data.items() if value is not None}
    turns = any(isinstance(row.data.get(name), list | tuple) for name in CONVERSATIONS)
    return turns or bool(columns & ASKED.keys() and not columns & {"question", *TEXT_FIELDS})


def turns_of(row: Row) -> tuple[str, list[Any]]:
    """Return the column of a conversation and its turns as {"role", "content"}, whatever a project calls these."""
    data = row.data
    if field := next((name for name in CONVERSATIONS if isinstance(data.get(name), list | tuple)), None):
        turns = renamed_turns(data[field])
    elif field := next((name for name in ASKED if data.get(name) is not None), None):
        more = data.get("input") if field == "instruction" else None
        pairs = [*(data.get("history") or ()), (f"{data[field]}\n{more}" if more else data[field],)]
        if not all(isinstance(pair, list | tuple) for pair in pairs):
            raise FieldError("history", "not pairs of a question and its answer; give [[question, answer], …]")
        roles = ("user", "assistant")
        turns = [dict(role=role, content=text) for pair in pairs for role, text in zip(roles, pair, strict=False)]
    else:
        raise FieldError("messages", f"missing; give the turns{existing_columns(row, 'messages')}")
    answer = data.get(ASKED.get(field, ""))
    if answer is not None:
        turns += renamed_turns(answer) if isinstance(answer, list | tuple) else [dict(role="assistant", content=answer)]
    return field, turns


def renamed_turns(entries: Iterable[Any]) -> list[Any]:
    """Return turns as {"role", "content"}: sharegpt's from and value, and pairs of human and assistant, are renamed."""
    turns: list[Any] = []
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("from") is not None:
            role = {"human": "user", "gpt": "assistant"}.get(entry["from"], entry["from"])
            turns.append({"role": role, "content": entry.get("value")})
        elif isinstance(entry, Mapping) and entry.get("human") is not None:
            turns += [dict(role="user", content=entry["human"]), dict(role="assistant", content=entry.get("assistant"))]
        else:
            turns.append(entry)  # what is no message is refused where the turns are checked
    return turns


def _parts(message: ChatMessage) -> Sequence[str | ContentPart]:
    return message.content if isinstance(message.content, list) else [message.content]


_Piece = str | AudioClip | Picture | EllipsisType | None
"""None: the next of the row's clips; ...: the next of its pictures."""


def _pieces(part: str | ContentPart, style: Style, pictures: bool = False) -> list[_Piece]:
    """Return the texts, clips and pictures of a part. pictures: whether the row has some, whose places texts name."""
    if isinstance(part, ContentPart) and part.type == "image":
        source = next((name for name in ("image", "image_url", "path", "url") if getattr(part, name) is not None), None)
        return [_picture(getattr(part, source), style, source) if source else ...]
    if isinstance(part, ContentPart) and part.type == "audio":
        source = next((name for name in ("audio", "audio_url", "path", "url") if getattr(part, name) is not None), None)
        return [clip_from(part, style, source) if source else None]
    text = (part if isinstance(part, str) else part.text) or ""
    places: dict[str, _Piece] = {PLACEHOLDER: None, **({IMAGE: ...} if pictures else {})}
    return [places.get(piece, piece) for piece in re.split(f"({'|'.join(places)})", text)]


def _pictures_of(row: Row, style: Style) -> tuple[str, list[Picture]]:
    """Return the column of a row's pictures and what it holds, beside a conversation or a question."""
    if row.data.get("videos"):
        raise FieldError("videos", "videos are not read; give frames as images, and the sound as audio")
    field = picture_column([name for name, value in row.data.items() if value is not None], "image")
    given = row.data.get(field)
    if given is None or field not in PICTURE_FIELDS:
        return field, []
    several = isinstance(given, list | tuple)
    return field, [
        _picture(x, style, f"{field}[{i}]" if several else field) for i, x in enumerate(given if several else [given])
    ]


def picture_column(columns: Collection[str], otherwise: str = "images") -> str:
    """Return which of the columns that a row fills names its pictures: of a conversation perhaps that of its turns."""
    return next((name for name in (*PICTURE_FIELDS, *CONVERSATIONS) if name in columns), otherwise)


def _looking(messages: tuple[Message, ...], row: Row, style: Style) -> tuple[Message, ...]:
    """Return a question with the row's pictures before its recording."""
    *before, asked = messages
    return (*before, replace(asked, content=(*_pictures_of(row, style)[1], *asked.content)))


def _picture(given: Any, style: Style, field: str) -> Picture:
    """Return a picture that is given as a path, as {"path"} or {"bytes"} as `datasets` has it, or decoded by Pillow."""
    if hasattr(given, "save") and hasattr(given, "mode"):
        encoded = io.BytesIO()
        given.save(encoded, "PNG")
        given = {"bytes": encoded.getvalue()}
    if isinstance(given, Mapping) and isinstance(given.get("bytes"), bytes):
        return Picture(str(stored(given["bytes"], Path(given.get("path") or "").suffix)))
    path = (given.get("path") or given.get("url")) if isinstance(given, Mapping) else given
    if not isinstance(path, str) or not path.strip():
        raise FieldError(field, "no picture; give a path, or an object with path or bytes")
    path = path.removeprefix("file://")
    if re.match(r"[A-Za-z][\w+.-]+://|data:", path):
        raise FieldError(field, f"{path[:80]!r} is a URL, which is not read; download the file and give its path")
    return Picture(os.path.abspath(style.root / path))


def _clips_of(row: Row, style: Style, field: str) -> list[AudioClip]:
    """Return the clips that a row has beside its conversation: of a list, or the one of its audio column.

    Columns that select a part are those of one clip; of several each has the rate that the row names.
    """
    given, part = row.data.get(field), _part(row)
    if given is None or (field != "audios" and not isinstance(given, list | tuple)):
        return [] if given is None else [clip_of(row, style, field)]
    several = given if isinstance(given, list | tuple) else [given]
    selects = (name for name in PART if name != "duration" and part.get(name) not in (None, "average"))
    if len(several) > 1 and (name := next(selects, None)):
        remedy = f'put each clip in a turn, {{"type": "audio", "audio": "…", "{name}": …}}'
        raise FieldError(name, f"that of one clip, and {field} holds {len(several)}; {remedy}")
    clips = []
    for i, audio in enumerate(several):
        try:
            clips.append(clip_from(check({"audio": audio, **part}, AudioColumns), style, "audio"))
        except FieldError as error:
            raise FieldError(error.field.replace("audio", f"{field}[{i}]", 1), error.message) from error
    return clips


def message_pieces(message: ChatMessage, style: Style) -> tuple[str | AudioClip, ...]:
    """Return the content of a message that names its own clips."""
    pieces = [PLACEHOLDER if p is None else p for part in _parts(message) for p in _pieces(part, style)]
    said = tuple(piece for piece in pieces if isinstance(piece, str | AudioClip))
    if len(said) < len(pieces):
        raise FieldError("content", "an answer holds a picture; pictures belong to the prompt")
    return said


def spoken_or_written(parts: Sequence[str | AudioClip | Picture], field: str) -> Answer:
    """Return an answer's text, or its recording. Raises FieldError for one that is neither, or empty."""
    if len(parts) == 1 and isinstance(parts[0], AudioClip):
        return parts[0]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise FieldError(field, "holds audio besides something else; give a text, or one audio part that says it all")
    if not "".join(texts).strip():
        raise FieldError(field, f"the {field} text is empty; give an answer")
    return "".join(texts)


def _inside_tags(text: str) -> str:
    """Return what is in the <answer> tags of a text that ends with them, as solutions of R1-like data do."""
    match = re.search(r"<answer>\s*((?:(?!<answer>).)*?\S)\s*</answer>\s*$", text, re.DOTALL)
    return match[1] if match else text


FORMATS: Mapping[str, Callable[[Row, Style], Sample]] = {
    "native": native,
    "avqa": avqa,
    "musicbench": avqa,
    "mmau": mmau,
    "mmar": mmar,
    "mmsu": mmsu,
    "asr": asr,
    "conversation": conversation,
}


def detect(row: Row) -> str:
    """Return the format that has this row's columns. Raises ValueError for none."""
    columns = row.data.keys()
    if is_conversation(row):
        return "conversation"
    for kind, present, absent in (
        ("avqa", {"multi_choice", "video_name"}, None),
        ("musicbench", {"multi_choice"}, None),
        ("musicbench", {"location", "prompt_key"}, None),
        ("mmsu", {"choice_a", "choice_b"}, None),
        ("mmau", {"audio_id", "question"}, None),
        ("asr", {"audio_filepath"}, "question"),
        ("mmar", {"audio_path", "question", "choices", "modality"}, None),
        *(("native", {name}, None) for name in AUDIO_FIELDS),
    ):
        if present <= columns and absent not in columns:
            return kind
    raise ValueError(
        f"{row.file}: row {row.number}: no known kind of manifest has the columns {', '.join(columns)}; give "
        "audio with text, audio with question and answer, or messages with audios; --columns audio=NAME text=NAME … "
        "says which columns of other names these are"
    )


def audio_field(row: Row) -> str:
    """Return the column that names the row's audio; of AVQA as published the video's."""
    otherwise = "video_name" if "video_name" in row.data else "audio"
    return next((name for name in AUDIO_FIELDS if row.data.get(name) is not None), otherwise)


def clip_of(row: Row, style: Style, field: str) -> AudioClip:
    """Return the row's audio by reference; the file is not looked at."""
    return clip_from(check({field: row.data.get(field), **_part(row)}, AudioColumns), style, field)


def _part(row: Row) -> dict[str, Any]:
    """Return the row's columns that select a part of its audio, or say its rate. Without a start an end is metadata."""
    begins = any(row.data.get(name) is not None for name in BEGINS)
    names = (*PART, "sample_rate", "sampling_rate")
    return {name: row.data.get(name) for name in names if begins or name not in ENDS}


def clip_from(columns: AudioColumns, style: Style, field: str) -> AudioClip:
    """Return the audio in `field`; the file is not looked at."""
    start = columns.offset if columns.start is None else columns.start
    ends = "end" if columns.end is not None else "end_time"
    end, duration = getattr(columns, ends), columns.duration
    if start is not None and end is not None and duration is None:
        if end <= start:
            raise FieldError(ends, f"{end:g} does not lie after the start, {start:g}; correct the times")
        duration = round(end - start, 6)
    part: dict[str, Any] = {} if start is None else {"start": start, "duration": duration}
    if part and duration == 0:
        raise FieldError("duration", "0 s; give how long the part lasts, or leave it out")
    channel = columns.channel_selector if columns.channel is None else columns.channel
    if channel is not None and channel != "average":
        part["channel"] = channel
    rate = columns.sample_rate or columns.sampling_rate
    source = getattr(columns, field)
    if isinstance(source, AudioObject):
        if source.bytes_:  # from a table: in a file the recordings of all rows take no memory
            suffix = Path(source.path or "").suffix
            return AudioClip(path=str(stored(source.bytes_, suffix)), sample_rate=rate, **part)
        if source.array is not None:
            rate = source.sampling_rate or rate
            if rate is None:
                raise FieldError(f"{field}.sampling_rate", "missing; give that of the array in Hz")
            return AudioClip(array=_samples(source.array, f"{field}.array"), sample_rate=rate, **part)
        source = source.path
    if source is None or not source.strip():
        raise FieldError(
            field, "missing or empty; give a path, or an object with path, bytes, or array and sampling_rate"
        )
    source = source.removeprefix("file://")
    if re.match(r"[A-Za-z][\w+.-]+://|data:", source):
        shown = source if len(source) <= 80 else f"{source[:79]}…"
        raise FieldError(field, f"{shown!r} is a URL, which is not read; download the file and give its path")
    return AudioClip(path=str(style.root / source), sample_rate=rate, **part)


def _samples(values: Any, field: str) -> np.ndarray:
    """Float32 [T] or [T, channels]."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise FieldError(field, f"no array ({error}); give [T] or [T, channels]") from error
    if array.size == 0:
        raise FieldError(field, "empty; give samples, or leave the row out")
    if array.dtype.kind != "f":
        kind = "whole numbers" if array.dtype.kind in "iu" else f"{array.dtype}"
        raise FieldError(field, f"its samples are {kind}; give floats in [-1, 1] (divide int16 by 32768)")
    return array.astype(np.float32)


def existing_columns(row: Row, wanted: str) -> str:
    """Return how to name a column as `wanted`, and which there are, for the end of a message that it is missing."""
    return f", or name its column with --columns {wanted}=NAME (the columns are {', '.join(row.data)})"


def _question_sample(
    row: Row,
    style: Style,
    columns: SampleColumns,
    audio: str,
    question: str = "question",
    choices: str = "choices",
    open_ended: bool = False,
) -> Sample:
    """`open_ended`: questions without choices are allowed."""
    text = (getattr(columns, question) or style.question or "").strip()
    if not text:
        remedy = "missing; give the question, here or for all rows with question=…"
        raise FieldError(question, remedy + existing_columns(row, question))
    values = row.data.get(choices)
    if not values and not open_ended:
        raise FieldError(choices, f"{_lack(row, choices)}; give the list of choices{existing_columns(row, choices)}")
    options = tuple(str(choice).strip() for choice in values or ())
    if not all(options):
        raise FieldError(choices, f"{values!r} is not a list of texts; give every choice as a text that is not empty")
    unanswered = not style.need_answer and columns.answer in (None, "")
    references = () if unanswered else _answers(row, options)
    clip = clip_of(row, style, audio)
    try:
        if options:
            messages = choice_question(clip, text, options, style.think)
        else:
            messages = open_question(clip, text, style.think)
    except ValueError as error:
        raise FieldError(choices, str(error)) from error
    metadata = _rest(row, question, choices, "answer")
    messages = _looking(messages, row, style)
    return Sample(_id(row, clip), messages, references, options, columns.task or "qa", metadata)


def _lack(row: Row, field: str) -> str:
    return "empty" if field in row.data else "missing"


def _answers(row: Row, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the gold text: of an index the choice it points to. An open question may list several."""
    value = row.data.get("answer")
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value) and choices and value.strip() not in choices:
        value = int(value)  # as text files hold an index
    if isinstance(value, int) and choices:
        if not 0 <= value < len(choices):
            raise FieldError("answer", f"index {value} lies outside the {len(choices)} choices; count from 0")
        return (choices[value],)
    texts = tuple(str(v).strip() for v in (value if isinstance(value, list) else [value]))
    if value is None:
        fault = (
            f"{_lack(row, 'answer')}; give the text of the answer, or its index from 0{existing_columns(row, 'answer')}"
        )
    elif isinstance(value, list) and choices:
        fault = f"{value!r} is a list; a question with choices has one answer, give its text"
    elif not texts or not all(texts):
        fault = "empty; give the text of the answer"
    elif choices and texts[0] not in choices:
        fault = f"{texts[0]!r} is not among the choices {list(choices)}; give the exact text, or its index from 0"
    else:
        return texts
    raise FieldError("answer", fault)


def _id(row: Row, clip: AudioClip) -> str:
    """Return the row's id; without one the audio's path as given with its start and channel, or the row's number."""
    value = row.data.get("id")
    if value is not None:
        return str(value).strip()
    if "id" in row.data:
        raise FieldError("id", "empty; give every row its own id, or leave the column out")
    given = row.data.get(audio_field(row))
    if clip.path is None or not isinstance(given, str):
        return f"{Path(row.file).stem}:{row.number}"
    return given + (f"@{clip.start}" if clip.start else "") + "".join(f"#{channel}" for channel in clip.channels)


def _rest(row: Row, *used: str) -> dict[str, Any]:
    used = (*used, audio_field(row), *PICTURE_FIELDS, "id")
    return {name: value for name, value in row.data.items() if name not in used and value is not None}


# -- AVQA and MusicBench as published ----------------------------------------------------------------------------------

KEYS = ("C", "Db", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B")
SAME_KEY = {"B#": "C", "C#": "Db", "D#": "Eb", "Fb": "E", "E#": "F", "Gb": "F#", "G#": "Ab", "A#": "Bb", "Cb": "B"}
TIME_SIGNATURES = ("2/4", "3/4", "4/4", "5/4", "6/8", "7/8", "9/8", "12/8")
_TEMPI = """Larghissimo 0-25, Grave 25-45, Largo 40-60, Lento 45-60, Larghetto 60-66, Adagio 66-76, Adagietto 72-76,
    Andante 76-108, Andantino 80-108, Andante moderato 92-112, Moderato 108-120, Allegretto 112-120,
    Allegro moderato 116-120, Allegro 120-168, Vivace 140-176, Vivacissimo 172-176, Allegrissimo 172-176,
    Presto 168-200, Prestissimo 200-inf"""
TEMPO_MARKS = {
    name: (float(low), float(high)) for name, low, high in re.findall(r"([A-Z][a-z]+(?: [a-z]+)?) (\d+)-(\w+)", _TEMPI)
}
"""Beats per minute of each mark, from Ke-Omni-R."""
_MARK = re.compile(r"\b(" + "|".join(sorted(TEMPO_MARKS, key=len, reverse=True)) + r")\b", re.IGNORECASE)
_COPY = re.compile(r"(.{11})_\d+")  # a YouTube id; the number tells copies at another pitch, tempo or volume


def _avqa_rows(rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """Yield the rows whose questions the audio may answer: neither by the picture alone, nor about a color."""
    for row in rows:
        if isinstance(row, Row) and row.data.get("audio_path") is None:
            question = row.data.get("question_text")
            if row.data.get("question_relation") == "View":
                row = LeftOut(row.file, row.number, "answered by the picture alone")
            elif isinstance(question, str) and re.search(r"colou?r", question, re.IGNORECASE):
                row = LeftOut(row.file, row.number, "asks for a color")
        yield row


def _musicbench_rows(rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """Yield the questions that each row gives, up to three about the clip at `location`."""
    ids: set[str] = set()
    for row in rows:
        if not isinstance(row, Row) or "multi_choice" in row.data:
            yield row
            continue
        try:
            columns = check(row.data, MusicBenchColumns)
        except FieldError as error:
            yield BadRow.of(row, error)
            continue
        clip = PurePosixPath(columns.location).stem
        questions = list(_music_questions(columns, clip))
        if not questions:
            yield LeftOut(row.file, row.number, "gives no key, tempo mark or time signature")
        copy_of = _COPY.fullmatch(clip)
        about = {"recording": copy_of[1] if copy_of else clip, "audio_path": columns.location}
        for question in questions:
            if question["id"] in ids:
                yield LeftOut(row.file, row.number, "asks what an earlier row asks")
                continue
            ids.add(question["id"])
            yield Row(row.file, row.number, {**question, **about, "dataset_name": "MusicBench"})


def _music_questions(columns: MusicBenchColumns, clip: str) -> Iterator[dict[str, Any]]:
    mark = _MARK.search(columns.prompt_bpm or "")
    metre = re.search(r"\b\d+/\d+\b", columns.prompt_bt or "")
    for kind, text, right, wrong in (
        ("key", "Which key is this piece in?", *_key(columns.key or ())),
        ("tempo", "Which tempo mark fits this piece?", *_tempo(mark[0].capitalize() if mark else "")),
        ("metre", "Which time signature fits this piece?", *_metre(metre[0] if metre else "")),
    ):
        if not right or len(wrong) < 3:
            continue
        id = f"{kind}_{clip}"
        draw = random.Random(id)
        choices = [right, *draw.sample(wrong, 3)]
        draw.shuffle(choices)
        answer = choices.index(right)
        yield {"id": id, "question_text": text, "multi_choice": choices, "answer": answer, "task": kind}


def _key(key: Sequence[str | None]) -> tuple[str, list[str]]:
    """(the right choice, the wrong ones of its mode); "" where there is no question."""
    root, mode = (str(part) for part in key) if len(key) == 2 else ("", "")
    root, mode = SAME_KEY.get(root, root), mode.lower()
    if root not in KEYS or mode not in ("major", "minor"):
        return "", []
    return f"{root} {mode}", [f"{other} {mode}" for other in KEYS if other != root]


def _tempo(right: str) -> tuple[str, list[str]]:
    """(the right mark, those whose ranges do not overlap its)."""
    low, high = TEMPO_MARKS.get(right, (0.0, float("inf")))
    return right, [mark for mark, (start, end) in TEMPO_MARKS.items() if start > high or end < low]


def _metre(right: str) -> tuple[str, list[str]]:
    """(the right signature, the others); 3/4 and 6/8 are never both offered."""
    ambiguous = {"3/4", "6/8"} if right in ("3/4", "6/8") else {right}
    return right, [other for other in TIME_SIGNATURES if other not in ambiguous]


QUESTIONS_OF: Mapping[str, Callable[[Iterable[AnyRow]], Iterator[AnyRow]]] = {
    "avqa": _avqa_rows,
    "musicbench": _musicbench_rows,
}
"""Functions that make questions of a format's rows as published; rows that were prepared before stay as they are."""

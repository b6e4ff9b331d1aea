"""One function a manifest format: a row becomes a Sample, or a FieldError that names the field and the remedy.

Fields (others are kept in `Sample.metadata`):

    native      id?, audio, question?, choices?, answer | text | transcript, language?, start?, duration?, sample_rate?
    avqa        id, video_name, audio_path?, question_text, multi_choice, answer (an index), question_relation,
                question_type; questions about the video are asked about the audio
    musicbench  id, audio_path, question_text, multi_choice, answer (an index or the text); or, as published, location,
                key, prompt_bpm, prompt_bt
    mmau        id, audio_id, question, choices, answer (the text), task, category, difficulty, …
    mmar        id, audio_path, question, choices, answer (the text), modality, category, …
    asr         audio_filepath | audio | audio_path, text | transcript | sentence, offset?, duration? (NeMo); an empty
                text only in a row whose task is "no_speech"

`audiorl.data.published` makes questions of AVQA and MusicBench rows as published. MMAU and MMAR have rows that offer a
choice twice or an empty one: it is offered once, or not at all.

`audio` is a path, or {"path"} or {"bytes"} or {"array", "sampling_rate"} as `datasets` stores it. A row with `start` or
`offset` selects `duration` seconds from there; `duration` alone only describes the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.audio import AudioClip
from audiorl.data.folders import AUDIO_SUFFIXES
from audiorl.data.prompts import asr_prompt, choice_question, open_question
from audiorl.data.rows import Row
from audiorl.types import Sample

AUDIO_FIELDS = ("audio", "audio_path", "audio_filepath", "audio_id")
TEXT_FIELDS = ("text", "transcript", "sentence")


class FieldError(ValueError):
    """A field that cannot be used, with the reason and the remedy."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


@dataclass(frozen=True)
class Style:
    """How rows become prompts: where relative paths start, whether to ask for thinking, a question for rows without,
    whether a question must have an answer."""

    root: Path
    think: bool = True
    question: str | None = None
    need_answer: bool = True


def native(row: Row, style: Style) -> Sample:
    data = row.data
    asks = any(data.get(name) is not None for name in ("question", "choices"))
    if asks or (style.question and not any(data.get(name) for name in TEXT_FIELDS)):
        return _question_sample(row, style, audio_field(row), "question", "choices", open_ended=True)
    return asr(row, style)


def avqa(row: Row, style: Style) -> Sample:
    """AVQA and MusicBench. AVQA's questions speak of a video, of which the model gets the audio only."""
    data = dict(row.data)
    video = data.get("video_name")
    if isinstance(video, str):
        data.setdefault("recording", video)
        if data.get("audio_path") is None:
            data["audio_path"] = _sound_of(video, style.root)
        if isinstance(data.get("question_text"), str):
            data["question_text"] = about_audio(data["question_text"])
    choices = data.get("multi_choice")
    if isinstance(choices, list | tuple):
        choices = [str(c) if isinstance(c, int | float) and not isinstance(c, bool) else c for c in choices]
        data["multi_choice"] = choices
        data["answer"] = _published_answer(data.get("answer"), choices)
        texts = [c.strip() for c in choices if isinstance(c, str)]
        if len(texts) == len(choices) and 1 < len(set(texts)) < len(texts):
            if isinstance(data["answer"], int) and 0 <= data["answer"] < len(texts):
                data["answer"] = texts[data["answer"]]
            data["multi_choice"] = list(dict.fromkeys(texts))  # some questions offer a choice twice
    return _question_sample(replace(row, data=data), style, "audio_path", "question_text", "multi_choice")


def _sound_of(video: str, root: Path) -> str:
    """The file in `root` that has the video's name and sound: .wav, unless there is only another."""
    suffixes = (*AUDIO_SUFFIXES, ".m4a", ".mp4", ".webm", ".mkv")
    return video + next((suffix for suffix in suffixes if (root / f"{video}{suffix}").exists()), ".wav")


def about_audio(question: str) -> str:
    """A question about a video as one about its audio.

    >>> about_audio("What are the main sound sources in the video?")
    'What are the main sound sources in the audio?'
    """
    return re.sub(r"\bvideo(s?)\b", lambda m: ("A" if m[0][0] == "V" else "a") + "udio", question, flags=re.IGNORECASE)


def _published_answer(answer: Any, choices: Sequence[Any]) -> Any:
    """An index as a whole number, which some files hold as text or as a float; a text as it is."""
    if isinstance(answer, float) and answer.is_integer():
        return int(answer)
    if isinstance(answer, str) and answer.strip().isdecimal() and answer.strip() not in choices:
        return int(answer)
    return answer


def mmau(row: Row, style: Style) -> Sample:
    return _question_sample(_distinct_choices(row), style, "audio_id", "question", "choices")


def mmar(row: Row, style: Style) -> Sample:
    return _question_sample(_distinct_choices(row), style, "audio_path", "question", "choices")


def _distinct_choices(row: Row) -> Row:
    """The row with every choice once and without empty ones."""
    choices = row.data.get("choices")
    if not isinstance(choices, list | tuple) or not all(isinstance(c, str) for c in choices):
        return row
    return replace(row, data={**row.data, "choices": list(dict.fromkeys(c.strip() for c in choices if c.strip()))})


def asr(row: Row, style: Style) -> Sample:
    text = next((name for name in TEXT_FIELDS if row.data.get(name) is not None), None)
    if text is None:
        raise FieldError("text", f"missing; give the transcript in text (the columns are {', '.join(row.data)})")
    silent = row.data.get("task") == "no_speech" and row.data[text] == ""
    transcript = "" if silent else _string(row, text, "give the transcript")
    language = row.data.get("language") or row.data.get("lang") or ""
    clip = clip_of(row, style, audio_field(row))
    return Sample(
        id=_id(row, clip),
        messages=asr_prompt(clip, str(language), style.think, ask=style.question or ""),
        references=(transcript,),
        task=str(row.data.get("task") or "asr"),
        metadata=_rest(row, text),
    )


FORMATS: Mapping[str, Callable[[Row, Style], Sample]] = {
    "native": native,
    "avqa": avqa,
    "musicbench": avqa,
    "mmau": mmau,
    "mmar": mmar,
    "asr": asr,
}


def detect(row: Row) -> str:
    """The format that has this row's columns. Raises ValueError for none."""
    columns = row.data.keys()
    if "multi_choice" in columns:
        return "avqa" if "video_name" in columns else "musicbench"
    if {"location", "prompt_key"} <= columns:
        return "musicbench"
    if "audio_id" in columns and "question" in columns:
        return "mmau"
    if "audio_filepath" in columns and "question" not in columns:
        return "asr"
    if {"audio_path", "question", "choices"} <= columns and "modality" in columns:
        return "mmar"
    if any(name in columns for name in AUDIO_FIELDS):
        return "native"
    raise ValueError(
        f"{row.file}: row {row.number}: no known kind of manifest has the columns {', '.join(columns)}; "
        "give at least audio with text, or audio with question and answer"
    )


def audio_field(row: Row) -> str:
    """The column that names the row's audio; of AVQA as published the video's."""
    otherwise = "video_name" if "video_name" in row.data else "audio"
    return next((name for name in AUDIO_FIELDS if row.data.get(name) is not None), otherwise)


def clip_of(row: Row, style: Style, field: str) -> AudioClip:
    """The row's audio by reference; the file is not looked at."""
    value = row.data.get(field)
    start = next((row.data[name] for name in ("start", "offset") if row.data.get(name) is not None), None)
    part: dict[str, Any] = {}
    if start is not None:
        part = {"start": _number(start, "start" if "start" in row.data else "offset")}
        if row.data.get("duration") is not None:
            part["duration"] = _number(row.data["duration"], "duration")
    rate = row.data.get("sample_rate") or row.data.get("sampling_rate")
    if rate is not None and (not isinstance(rate, int) or rate <= 0):
        raise FieldError("sample_rate", f"{rate!r} is no sampling rate; give Hz as a whole number")
    if isinstance(value, Mapping):
        if value.get("bytes"):
            return AudioClip(data=bytes(value["bytes"]), sample_rate=rate, **part)
        if value.get("array") is not None:
            array = np.asarray(value["array"], dtype=np.float32)
            own_rate = value.get("sampling_rate") or rate
            if not own_rate:
                raise FieldError(field, "an array without sampling_rate; give it in Hz")
            return AudioClip(array=array, sample_rate=int(own_rate), **part)
        value = value.get("path")
    if not isinstance(value, str) or not value.strip():
        raise FieldError(field, "missing or empty; give a path, or an object with bytes or path")
    return AudioClip(path=str(style.root / value), sample_rate=rate, **part)


def _question_sample(
    row: Row, style: Style, audio: str, question: str, choices: str, open_ended: bool = False
) -> Sample:
    """`open_ended`: questions without choices are allowed."""
    data = row.data
    question_text = _string(row, question, "give the question") if data.get(question) is not None else style.question
    if not question_text:
        raise FieldError(question, "missing; give the question, here or for all rows with question=…")
    options = _choices(row, choices, open_ended)
    unanswered = not style.need_answer and data.get("answer") in (None, "")
    references = () if unanswered else _answers(row, "answer", options)
    clip = clip_of(row, style, audio)
    try:
        messages = (
            choice_question(clip, question_text, options, style.think)
            if options
            else open_question(clip, question_text, style.think)
        )
    except ValueError as error:
        raise FieldError(choices, str(error)) from error
    return Sample(
        id=_id(row, clip),
        messages=messages,
        references=references,
        choices=options,
        task=str(data.get("task") or "qa"),
        metadata=_rest(row, question, choices, "answer"),
    )


def _choices(row: Row, field: str, optional: bool) -> tuple[str, ...]:
    value = row.data.get(field)
    if not value:
        if not optional:
            raise FieldError(field, f"{'empty' if field in row.data else 'missing'}; give the list of choices")
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(c, str) and c.strip() for c in value):
        raise FieldError(field, f"{value!r} is no list of texts; give every choice as a text that is not empty")
    return tuple(c.strip() for c in value)


def _answers(row: Row, field: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    """The gold text: of an index the choice it points to. An open question may list several."""
    value = row.data.get(field)
    if value is None:
        state = "empty" if field in row.data else "missing"
        raise FieldError(field, f"{state}; give the text of the answer, or its index from 0")
    if isinstance(value, int) and not isinstance(value, bool) and choices:
        if not 0 <= value < len(choices):
            raise FieldError(field, f"index {value} lies outside the {len(choices)} choices; count from 0")
        return (choices[value],)
    several = isinstance(value, list | tuple) and value and not choices
    values = list(value) if several else [value]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        raise FieldError(field, f"{value!r} is no text; give the text of the answer")
    texts = tuple(str(v).strip() for v in values)
    if not all(texts):
        raise FieldError(field, "empty; give the text of the answer")
    if choices and texts[0] not in choices:
        raise FieldError(
            field, f"{texts[0]!r} is not among the choices {list(choices)}; give the exact text, or its index from 0"
        )
    return texts


def _string(row: Row, field: str, remedy: str) -> str:
    value = row.data.get(field)
    if value is None:
        raise FieldError(field, f"missing; {remedy} (the columns are {', '.join(row.data)})")
    if not isinstance(value, str) or not value.strip():
        raise FieldError(field, f"{value!r} is no text; {remedy}")
    return value.strip()


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise FieldError(field, f"{value!r} is no time; give seconds, 0 or more")
    return float(value)


def _id(row: Row, clip: AudioClip) -> str:
    """The row's id; without one the audio's path as given with its start, or the row's number."""
    value = row.data.get("id")
    if value is not None and str(value).strip():
        return str(value).strip()
    if "id" in row.data:
        raise FieldError("id", "empty; give every row its own id, or leave the column out")
    given = row.data.get(audio_field(row))
    if clip.path is None or not isinstance(given, str):
        return f"{Path(row.file).stem}:{row.number}"
    return f"{given}@{clip.start}" if clip.start else given


def _rest(row: Row, *used: str) -> dict[str, Any]:
    used = (*used, *AUDIO_FIELDS, "id")
    return {name: value for name, value in row.data.items() if name not in used and value is not None}

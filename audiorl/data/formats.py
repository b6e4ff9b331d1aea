"""Formats of manifests: a row becomes a Sample, or a FieldError that names the field and the remedy.

Fields (others are kept in `Sample.metadata`):

    native      id?, audio, question?, choices?, answer | text | transcript, language?, start?, duration?, sample_rate?;
                for views of the prompt: clean_audio? (the same part of a recording without noise), rationale?
    avqa        id, video_name, audio_path?, question_text, multi_choice, answer (an index), question_relation,
                question_type; questions about the video are asked about the audio
    musicbench  id, audio_path, question_text, multi_choice, answer (an index or the text); or, as published, location,
                key, prompt_bpm, prompt_bt
    mmau        id, audio_id, question, choices, answer (the text), task, category, difficulty, …
    mmar        id, audio_path, question, choices, answer (the text), modality, category, …
    mmsu        id, audio | audio_path, question, choice_a, choice_b, choice_c?, choice_d?, answer_gt (the text),
                task_name, category, …
    asr         audio_filepath | audio | audio_path, text | transcript | sentence, offset?, duration? (NeMo); an empty
                text only in a row whose task is "no_speech"

`audio` is a path, or {"path"} or {"bytes"} or {"array", "sampling_rate"} as `datasets` stores it. A row with `start` or
`offset` selects `duration` seconds from there; `duration` alone only describes the file. MMAU and MMAR have rows that
offer a choice twice or an empty one: it is offered once, or not at all.

AVQA and MusicBench as their authors publish them become questions about audio as Ke-Omni-R made them. AVQA's
`train_qa.json` asks about videos: a question is left out if the picture alone answers it (`question_relation` is View)
or if it asks for a color; the audio is in a file of the video's name, such as `-HIPq7T3eFI_000011.wav`. A row of
MusicBench's `MusicBench_train.json` gives up to three questions about the clip at `location`:

    key     which of four keys of the same mode; from `key`
    tempo   which of four tempo marks whose ranges do not overlap the right one's; from the mark in `prompt_bpm`
    metre   which of four time signatures; from the one in `prompt_bt`; 3/4 and 6/8 are never both offered

The wrong choices and their order are drawn from the question's id, so that every reading gives the same. Different from
Ke-Omni-R: the questions are in our words, keys that sound the same (F# and Gb) are one choice, and a question that two
rows ask about one clip is asked once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from audiorl.audio import AudioClip
from audiorl.data.containers import AUDIO_SUFFIXES
from audiorl.data.prompts import asr_prompt, choice_question, open_question
from audiorl.data.rows import AnyRow, BadRow, LeftOut, Row, stored
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.manifests import AudioColumns, MMSUColumns, MusicBenchColumns, SampleColumns
from audiorl.data.schema.types import AudioObject
from audiorl.types import Sample

AUDIO_FIELDS = ("audio", "audio_path", "audio_filepath", "audio_id")
TEXT_FIELDS = ("text", "transcript", "sentence")
KEYS = ("C", "Db", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B")
SAME_KEY = {"B#": "C", "C#": "Db", "D#": "Eb", "Fb": "E", "E#": "F", "Gb": "F#", "G#": "Ab", "A#": "Bb", "Cb": "B"}
TIME_SIGNATURES = ("2/4", "3/4", "4/4", "5/4", "6/8", "7/8", "9/8", "12/8")
TEMPO_MARKS: Mapping[str, tuple[float, float]] = {
    "Larghissimo": (0, 25),
    "Grave": (25, 45),
    "Largo": (40, 60),
    "Lento": (45, 60),
    "Larghetto": (60, 66),
    "Adagio": (66, 76),
    "Adagietto": (72, 76),
    "Andante": (76, 108),
    "Andantino": (80, 108),
    "Andante moderato": (92, 112),
    "Moderato": (108, 120),
    "Allegretto": (112, 120),
    "Allegro moderato": (116, 120),
    "Allegro": (120, 168),
    "Vivace": (140, 176),
    "Vivacissimo": (172, 176),
    "Allegrissimo": (172, 176),
    "Presto": (168, 200),
    "Prestissimo": (200, float("inf")),
}
"""Beats per minute of each mark, from Ke-Omni-R."""
_MARK = re.compile(r"\b(" + "|".join(sorted(TEMPO_MARKS, key=len, reverse=True)) + r")\b", re.IGNORECASE)
_COPY = re.compile(r"(.{11})_\d+")  # a YouTube id; the number tells copies at another pitch, tempo or volume
_PART = ("start", "offset", "duration", "sample_rate", "sampling_rate")


@dataclass(frozen=True)
class Style:
    """How rows become prompts: where relative paths start, whether to ask for thinking, a question for rows without,
    whether a question must have an answer."""

    root: Path
    think: bool = True
    question: str | None = None
    need_answer: bool = True


def native(row: Row, style: Style) -> Sample:
    columns = check(row.data, SampleColumns)
    asks = columns.question is not None or columns.choices is not None
    if asks or (style.question and not any(row.data.get(name) for name in TEXT_FIELDS)):
        sample = _question_sample(row, style, audio_field(row), "question", "choices", open_ended=True)
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
            data["audio_path"] = _sound_of(columns.video_name, style.root)
        if columns.question_text is not None:
            data["question_text"] = about_audio(columns.question_text)
    if columns.multi_choice:
        choices = [str(choice).strip() for choice in columns.multi_choice]
        answer = _published_answer(columns.answer, choices)
        if 1 < len(set(choices)) < len(choices):  # some questions offer a choice twice
            if isinstance(answer, int) and 0 <= answer < len(choices):
                answer = choices[answer]
            choices = list(dict.fromkeys(choices))
        data |= {"multi_choice": choices, "answer": answer}
    return _question_sample(replace(row, data=data), style, "audio_path", "question_text", "multi_choice")


def _sound_of(video: str, root: Path) -> str:
    """Return the file in `root` that has the video's name and sound: .wav, unless there is only another."""
    suffixes = (*AUDIO_SUFFIXES, ".m4a", ".mp4", ".webm", ".mkv")
    return video + next((suffix for suffix in suffixes if (root / f"{video}{suffix}").exists()), ".wav")


def about_audio(question: str) -> str:
    """Return a question about a video as one about its audio.

    >>> about_audio("What are the main sound sources in the video?")
    'What are the main sound sources in the audio?'
    """
    return re.sub(r"\bvideo(s?)\b", lambda m: ("A" if m[0][0] == "V" else "a") + "udio", question, flags=re.IGNORECASE)


def _published_answer(answer: Any, choices: Sequence[Any]) -> Any:
    """Return an index as a whole number, which some files hold as text or as a float; a text as it is."""
    if isinstance(answer, float) and answer.is_integer():
        return int(answer)
    if isinstance(answer, str) and answer.strip().isdecimal() and answer.strip() not in choices:
        return int(answer)
    return answer


def mmau(row: Row, style: Style) -> Sample:
    return _question_sample(_distinct_choices(row), style, "audio_id", "question", "choices")


def mmar(row: Row, style: Style) -> Sample:
    return _question_sample(_distinct_choices(row), style, "audio_path", "question", "choices")


def mmsu(row: Row, style: Style) -> Sample:
    check(row.data, SampleColumns)  # columns of other formats, which are replaced here
    columns = check(row.data, MMSUColumns)
    choices = [c.strip() for c in (columns.choice_a, columns.choice_b, columns.choice_c, columns.choice_d) if c]
    replaced = ("choice_a", "choice_b", "choice_c", "choice_d", "answer_gt")
    data = {name: value for name, value in row.data.items() if name not in replaced}
    data |= {"choices": choices, "answer": (columns.answer_gt or "").strip() or None, "task": columns.task_name}
    row = _distinct_choices(replace(row, data=data))
    try:
        return _question_sample(row, style, audio_field(row), "question", "choices")
    except FieldError as error:
        column = {"answer": "answer_gt", "choices": "choice_a"}.get(error.field, error.field)
        raise FieldError(column, error.message) from error


def _distinct_choices(row: Row) -> Row:
    """Return the row with every choice once and without empty ones."""
    choices = [str(choice).strip() for choice in check(row.data, SampleColumns).choices or ()]
    return replace(row, data={**row.data, "choices": list(dict.fromkeys(c for c in choices if c))})


def asr(row: Row, style: Style) -> Sample:
    columns = check(row.data, SampleColumns)
    text = next((name for name in TEXT_FIELDS if row.data.get(name) is not None), None)
    if text is None:
        raise FieldError("text", f"missing; give the transcript in text{existing_columns(row)}")
    transcript = row.data[text].strip()
    if not transcript and columns.task != "no_speech":
        raise FieldError(text, "empty; give the transcript")
    clip = clip_of(row, style, audio_field(row))
    return Sample(
        id=_id(row, clip),
        messages=asr_prompt(clip, columns.language or columns.lang or "", style.think, ask=style.question or ""),
        references=(transcript,),
        task=columns.task or "asr",
        metadata={**_rest(row, text), "text": transcript},
    )


FORMATS: Mapping[str, Callable[[Row, Style], Sample]] = {
    "native": native,
    "avqa": avqa,
    "musicbench": avqa,
    "mmau": mmau,
    "mmar": mmar,
    "mmsu": mmsu,
    "asr": asr,
}


def detect(row: Row) -> str:
    """Return the format that has this row's columns. Raises ValueError for none."""
    columns = row.data.keys()
    if "multi_choice" in columns:
        return "avqa" if "video_name" in columns else "musicbench"
    if {"location", "prompt_key"} <= columns:
        return "musicbench"
    if {"choice_a", "choice_b"} <= columns:
        return "mmsu"
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
    """Return the column that names the row's audio; of AVQA as published the video's."""
    otherwise = "video_name" if "video_name" in row.data else "audio"
    return next((name for name in AUDIO_FIELDS if row.data.get(name) is not None), otherwise)


def clip_of(row: Row, style: Style, field: str) -> AudioClip:
    """Return the row's audio by reference; the file is not looked at."""
    return clip_from(check({name: row.data.get(name) for name in (field, *_PART)}, AudioColumns), style, field)


def clip_from(columns: AudioColumns, style: Style, field: str) -> AudioClip:
    """Return the audio in `field`; the file is not looked at."""
    start = columns.offset if columns.start is None else columns.start
    part: dict[str, Any] = {} if start is None else {"start": start, "duration": columns.duration}
    if part and columns.duration == 0:
        raise FieldError("duration", "0 s; give how long the part lasts, or leave it out")
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
        raise FieldError(field, "missing or empty; give a path, or an object with bytes or path")
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


def existing_columns(row: Row) -> str:
    """Return the row's columns, for the end of a message that one is missing."""
    return f" (the columns are {', '.join(row.data)})"


def _question_sample(
    row: Row, style: Style, audio: str, question: str, choices: str, open_ended: bool = False
) -> Sample:
    """`open_ended`: questions without choices are allowed."""
    columns = check(row.data, SampleColumns)
    question_text = getattr(columns, question) or style.question
    if not question_text:
        raise FieldError(
            question, f"missing; give the question, here or for all rows with question=…{existing_columns(row)}"
        )
    options = _choices(row, choices, open_ended)
    unanswered = not style.need_answer and columns.answer in (None, "")
    references = () if unanswered else _answers(row, "answer", options)
    clip = clip_of(row, style, audio)
    try:
        messages = (
            choice_question(clip, question_text.strip(), options, style.think)
            if options
            else open_question(clip, question_text.strip(), style.think)
        )
    except ValueError as error:
        raise FieldError(choices, str(error)) from error
    return Sample(
        id=_id(row, clip),
        messages=messages,
        references=references,
        choices=options,
        task=columns.task or "qa",
        metadata=_rest(row, question, choices, "answer"),
    )


def _choices(row: Row, field: str, optional: bool) -> tuple[str, ...]:
    values = row.data.get(field)
    if not values and not optional:
        state, columns = ("empty", "") if field in row.data else ("missing", existing_columns(row))
        raise FieldError(field, f"{state}; give the list of choices{columns}")
    choices = tuple(str(choice).strip() for choice in values or ())
    if not all(choices):
        raise FieldError(field, f"{values!r} is not a list of texts; give every choice as a text that is not empty")
    return choices


def _answers(row: Row, field: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the gold text: of an index the choice it points to. An open question may list several."""
    value = row.data.get(field)
    if value is None:
        state, columns = ("empty", "") if field in row.data else ("missing", existing_columns(row))
        raise FieldError(field, f"{state}; give the text of the answer, or its index from 0{columns}")
    if isinstance(value, int) and choices:
        if not 0 <= value < len(choices):
            raise FieldError(field, f"index {value} lies outside the {len(choices)} choices; count from 0")
        return (choices[value],)
    if isinstance(value, list) and choices:
        raise FieldError(field, f"{value!r} is a list; a question with choices has one answer, give its text")
    texts = tuple(str(v).strip() for v in (value if isinstance(value, list) else [value]))
    if not texts or not all(texts):
        raise FieldError(field, "empty; give the text of the answer")
    if choices and texts[0] not in choices:
        raise FieldError(
            field, f"{texts[0]!r} is not among the choices {list(choices)}; give the exact text, or its index from 0"
        )
    return texts


def _id(row: Row, clip: AudioClip) -> str:
    """Return the row's id; without one the audio's path as given with its start, or the row's number."""
    value = row.data.get("id")
    if value is not None:
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


# -- AVQA and MusicBench as published ----------------------------------------------------------------------------------


def avqa_rows(rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """Yield the rows whose questions the audio may answer."""
    for row in rows:
        if isinstance(row, Row) and row.data.get("audio_path") is None:
            question = row.data.get("question_text")
            if row.data.get("question_relation") == "View":
                row = LeftOut(row.file, row.number, "answered by the picture alone")
            elif isinstance(question, str) and re.search(r"colou?r", question, re.IGNORECASE):
                row = LeftOut(row.file, row.number, "asks for a color")
        yield row


def musicbench_rows(rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """Yield the questions that each row gives."""
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
        questions = list(_music_questions(columns, PurePosixPath(columns.location).stem))
        if not questions:
            yield LeftOut(row.file, row.number, "gives no key, tempo mark or time signature")
        for question in questions:
            if question["id"] in ids:
                yield LeftOut(row.file, row.number, "asks what an earlier row asks")
                continue
            ids.add(question["id"])
            yield Row(row.file, row.number, {**question, "audio_path": columns.location, "dataset_name": "MusicBench"})


def _music_questions(columns: MusicBenchColumns, clip: str) -> Iterator[dict[str, Any]]:
    for kind, text, right, wrong in (
        ("key", "Which key is this piece in?", *_key(columns.key or ())),
        ("tempo", "Which tempo mark fits this piece?", *_tempo(columns.prompt_bpm or "")),
        ("metre", "Which time signature fits this piece?", *_metre(columns.prompt_bt or "")),
    ):
        if len(wrong) < 3:
            continue
        id = f"{kind}_{clip}"
        draw = random.Random(id)
        choices = [right, *draw.sample(wrong, 3)]
        draw.shuffle(choices)
        copy_of = _COPY.fullmatch(clip)
        yield {
            "id": id,
            "question_text": text,
            "multi_choice": choices,
            "answer": choices.index(right),
            "task": kind,
            "recording": copy_of[1] if copy_of else clip,
        }


def _key(key: Sequence[str | None]) -> tuple[str, list[str]]:
    """(the right choice, the wrong ones); no wrong ones where there is no question."""
    if len(key) != 2 or key[0] is None or key[1] is None:
        return "", []
    root, mode = SAME_KEY.get(key[0], key[0]), key[1].lower()
    if root not in KEYS or mode not in ("major", "minor"):
        return "", []
    return f"{root} {mode}", [f"{other} {mode}" for other in KEYS if other != root]


def _tempo(sentence: str) -> tuple[str, list[str]]:
    match = _MARK.search(sentence)
    if match is None:
        return "", []
    right = match[0].capitalize()
    low, high = TEMPO_MARKS[right]
    return right, [mark for mark, (start, end) in TEMPO_MARKS.items() if start > high or end < low]


def _metre(sentence: str) -> tuple[str, list[str]]:
    match = re.search(r"\b\d+/\d+\b", sentence)
    if match is None:
        return "", []
    ambiguous = {"3/4", "6/8"} if match[0] in ("3/4", "6/8") else {match[0]}
    return match[0], [other for other in TIME_SIGNATURES if other not in ambiguous]


QUESTIONS_OF: Mapping[str, Callable[[Iterable[AnyRow]], Iterator[AnyRow]]] = {
    "avqa": avqa_rows,
    "musicbench": musicbench_rows,
}
"""Functions that make questions of a format's rows as published; rows that were prepared before stay as they are."""

"""AVQA and MusicBench as their authors publish them, made into questions about audio as Ke-Omni-R made them.

AVQA's `train_qa.json` asks about videos. A question is left out if the picture alone answers it (`question_relation` is
View) or if it asks for a color. The audio is the video's sound in a file of the video's name, such as
`-HIPq7T3eFI_000011.wav`.

MusicBench's `MusicBench_train.json` describes music. A row gives up to three questions about the clip at `location`:

    key     which of four keys of the same mode; from `key`
    tempo   which of four tempo marks whose ranges do not overlap the right one's; from the mark in `prompt_bpm`
    metre   which of four time signatures; from the one in `prompt_bt`; 3/4 and 6/8 are never both offered

The wrong choices and their order are drawn from the question's id, so that every reading gives the same. Rows that have
`audio_path` were prepared before; they are read as they are. Different from Ke-Omni-R: the questions are in our words,
keys that sound the same (F# and Gb) are one choice, and a question that two rows ask about one clip is asked once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from audiorl.data.rows import BadRow, LeftOut, Row
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.manifests import MusicBenchColumns

AnyRow = Row | BadRow | LeftOut

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


def avqa_rows(rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """The rows whose questions the audio may answer; see above."""
    for row in rows:
        if isinstance(row, Row) and row.data.get("audio_path") is None:
            question = row.data.get("question_text")
            if row.data.get("question_relation") == "View":
                row = LeftOut(row.file, row.number, "answered by the picture alone")
            elif isinstance(question, str) and re.search(r"colou?r", question, re.IGNORECASE):
                row = LeftOut(row.file, row.number, "asks for a color")
        yield row


def musicbench_rows(rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """The questions that each row gives; see above."""
    ids: set[str] = set()
    for row in rows:
        if not isinstance(row, Row) or "multi_choice" in row.data:
            yield row
            continue
        try:
            columns = check(row.data, MusicBenchColumns)
        except FieldError as error:
            yield BadRow(row.file, row.number, error.field, error.message)
            continue
        questions = list(_questions(columns, PurePosixPath(columns.location).stem))
        if not questions:
            yield LeftOut(row.file, row.number, "gives no key, tempo mark or time signature")
        for question in questions:
            if question["id"] in ids:
                yield LeftOut(row.file, row.number, "asks what an earlier row asks")
                continue
            ids.add(question["id"])
            yield Row(row.file, row.number, {**question, "audio_path": columns.location, "dataset_name": "MusicBench"})


def _questions(columns: MusicBenchColumns, clip: str) -> Iterator[dict[str, Any]]:
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

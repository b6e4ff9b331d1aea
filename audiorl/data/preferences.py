"""Answers with a verdict: which of two is better, whether one is good, which of its steps are right.

A row is any that `read_samples` knows, its gold answer optional, with these columns::

    read_pairs    chosen, rejected, margin?                     (or messages, which end with chosen, rejected_response)
    read_judged   answer | completion, desirable | label        (with completion, answer stays the gold answer)
    read_steps    steps, labels

    {"audio": "a.wav", "question": "Which animal?", "chosen": "a cat", "rejected": "a dog"}

Answers may be TRL's `[{"role": "assistant", "content": "…"}]`, whose content may be an audio part: a spoken answer, to
a prompt whose `metadata` has `"respond": "speech"`. A whole conversation stands in `prompt`, `messages` or
`conversations`, with gold texts in `references`; it is taken as it is, with no request for tags added (`pair_row`
writes such rows). An audio part may select `duration` seconds from `start`. A prompt may come again, with the same id,
for other answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Unpack

from msgspec import Meta, Struct

from audiorl.audio import AudioClip, name
from audiorl.data.formats import (
    Answer,
    Style,
    conversation,
    existing_columns,
    is_conversation,
    message_pieces,
    renamed_turns,
    spoken_or_written,
    turns_of,
)
from audiorl.data.manifest import Format, Kind, Loaded, ReadOptions, read_values
from audiorl.data.rows import Row
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.manifests import ChatMessage, Reply
from audiorl.data.schema.types import Finite, Text
from audiorl.pictures import Picture
from audiorl.types import Sample

_PAIR = {"chosen", "rejected"}
_VERDICTS = {"true": True, "false": False, "1": True, "0": False}
"""How text files write a verdict."""
ROLLOUT_COLUMNS = ("step", "group_id", "index", "sample", "segments", "text", "score", "advantage", "spoken_audio")
"""Columns of a recorded rollout; a labelled one has them besides those of a judged answer, and they are no metadata."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; `margin` is by how much the chosen one is better, 0 if unknown.

    Raises ValueError for answers that are the same.
    """

    sample: Sample
    chosen: Answer
    rejected: Answer
    margin: float = 0.0

    def __post_init__(self) -> None:
        both = (answer.strip() if isinstance(answer, str) else answer.key for answer in (self.chosen, self.rejected))
        if len(set(both)) == 1:
            raise FieldError("rejected", "chosen and rejected are the same answer; give two different ones")


@dataclass(frozen=True)
class Judged:
    """One answer to a prompt, good or bad."""

    sample: Sample
    answer: Answer
    desirable: bool


@dataclass(frozen=True)
class Steps:
    """An answer step by step, each with the probability in [0, 1] that it is right; 0 and 1 are hard labels."""

    sample: Sample
    steps: tuple[str, ...]
    labels: tuple[float, ...]


# -- columns of the rows ----------------------------------------------------------------------------------------------


Verdict = Annotated[bool | Finite, Meta(description="a verdict; give true or false")]
Margin = Annotated[Finite, Meta(description="a finite number; give by how much chosen is better, or leave it out")]
Probability = Annotated[float, Meta(ge=0, le=1)]
Label = Annotated[bool | Probability, Meta(description="a label; give a number from 0 (wrong) to 1 (right)")]


class PairColumns(Struct):
    chosen: Reply
    rejected: Reply
    margin: Margin | None = None


class JudgedColumns(Struct):
    answer: Reply | None = None
    completion: Reply | None = None
    desirable: Verdict | None = None
    label: Verdict | None = None


class StepsColumns(Struct):
    steps: Annotated[list[Text], Meta(min_length=1, description="a list of texts; give one text a step")]
    labels: Annotated[list[Label], Meta(description="a list; give one label a step")]


# -- reading and writing ----------------------------------------------------------------------------------------------


def read_pairs(path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Pair]:
    """Read pairs for preference losses and reward models; arguments and errors are those of `read_samples`."""
    return read_values(path, kind, _pair, repeats=True, **options)


def read_judged(path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Judged]:
    """Read single answers, good or bad (KTO); arguments and errors are those of `read_samples`."""
    return read_values(path, kind, _judged, repeats=True, **options)


def read_pairs_and_judged(
    path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]
) -> Loaded[Pair | Judged]:
    """Read rows of `read_pairs`, which have a rejected answer, and of `read_judged` (KTO learns from both); arguments
    and errors are those of `read_samples`."""

    def either(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Pair | Judged]:
        pair = any(row.data.get(field) is not None for field in ("chosen", "rejected", "rejected_response"))
        return _pair(row, style, to_sample) if pair else _judged(row, style, to_sample)

    return read_values(path, kind, either, repeats=True, **options)


def read_steps(path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Steps]:
    """Read labelled steps for process reward models; arguments and errors are those of `read_samples`."""
    return read_values(path, kind, _steps, repeats=True, **options)


def pairs_to_judged(items: Iterable[Pair | Judged]) -> list[Judged]:
    """Take each pair's chosen answer as a good one, then its rejected answer as a bad one; others stay."""
    judged: list[Judged] = []
    for i in items:
        both = [i] if isinstance(i, Judged) else [Judged(i.sample, i.chosen, True), Judged(i.sample, i.rejected, False)]
        judged += both
    return judged


def pair_row(pair: Pair) -> dict[str, Any]:
    """Return a row that `read_pairs` reads back equal. Raises ValueError for audio that is not a file."""
    s = pair.sample

    def reply(answer: Answer) -> str | list[dict[str, Any]]:
        return answer if isinstance(answer, str) else [{"role": "assistant", "content": [part_row(answer)]}]

    return {
        "id": s.id,
        "prompt": [{"role": m.role, "content": [part_row(c) for c in m.content]} for m in s.messages],
        "references": s.references,
        "choices": s.choices,
        "task": s.task,
        "metadata": dict(s.metadata),
        "chosen": reply(pair.chosen),
        "rejected": reply(pair.rejected),
        "margin": pair.margin,
    }


def part_row(content: str | AudioClip | Picture) -> dict[str, Any]:
    """Return a part of a message as a row holds it. Raises ValueError for audio that is not a file."""
    if isinstance(content, str):
        return {"type": "text", "text": content}
    if isinstance(content, Picture):
        return {"type": "image", "image": os.path.abspath(content.path)}
    if content.path is None:
        raise ValueError(f"{name(content)} has no path; write the audio to a file and refer to it by path")
    part: dict[str, Any] = {"type": "audio", "audio": os.path.abspath(content.path)}
    part |= content.part
    return part if content.sample_rate is None else {**part, "sample_rate": content.sample_rate}


def _pair(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Pair]:
    if row.data.get("rejected_response") is not None and row.data.get("chosen") is None:  # as ms-swift has pairs
        row = _with_last_turn(row, "chosen", rejected=row.data["rejected_response"])
    columns = check({**row.data, **{name: _renamed(row.data[name]) for name in _PAIR & row.data.keys()}}, PairColumns)
    sample = _sample(row, style, to_sample, *_PAIR, "rejected_response", "margin")
    chosen, rejected = _answer(columns.chosen, "chosen", style), _answer(columns.rejected, "rejected", style)
    return sample, Pair(sample, chosen, rejected, columns.margin or 0.0)


def _judged(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Judged]:
    if _either(row, "completion", "answer", "messages", "conversations") in ("messages", "conversations"):
        row = _with_last_turn(row, "completion")
    field = "answer" if row.data.get("completion") is None else "completion"
    verdict = _either(row, "desirable", "label")
    written = row.data.get(verdict)
    given = _VERDICTS.get(written.strip().lower(), written) if isinstance(written, str) else written
    columns = check({field: row.data.get(field), verdict: given}, JudgedColumns)
    sample = _sample(row, style, to_sample, field, verdict)
    desirable, answer = getattr(columns, verdict), getattr(columns, field)
    if desirable not in (True, False):  # 0 and 1 are equal to these
        what = f"missing; give true or false{existing_columns(row, verdict)}"
        raise FieldError(verdict, what if desirable is None else f"{desirable!r} is not a verdict; give true or false")
    if answer is None:
        raise FieldError(field, f"missing; give the text of the answer{existing_columns(row, field)}")
    return sample, Judged(sample, _answer(answer, field, style), bool(desirable))


def _steps(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Steps]:
    columns = check(row.data, StepsColumns)
    sample = _sample(row, style, to_sample, "steps", "labels")
    counts = len(columns.labels), len(columns.steps)
    if counts[0] != counts[1]:
        raise FieldError("labels", "{} label(s) for {} step(s); give one label a step".format(*counts))
    return sample, Steps(sample, tuple(columns.steps), tuple(map(float, columns.labels)))


def _sample(row: Row, style: Style, to_sample: Format, *own: str) -> Sample:
    """Return the sample of a row without the reader's `own` columns; its gold answer may be missing.

    A conversation stays as it is.
    """
    unused = (*own, *(ROLLOUT_COLUMNS if "segments" in row.data else ()))
    row = replace(row, data={field: value for field, value in row.data.items() if field not in unused})
    style = replace(style, need_answer=False, keep_conversations=True)
    return conversation(row, style) if is_conversation(row) else to_sample(row, style)


def _with_last_turn(row: Row, column: str, **more: Any) -> Row:
    """Return the row with the last turn of its conversation in a column of its own."""
    field, turns = turns_of(row)
    return replace(row, data={**row.data, field: turns[:-1], column: turns[-1:], **more})


def _renamed(reply: Any) -> Any:
    turns = [reply] if isinstance(reply, Mapping) else reply
    return renamed_turns(turns) if isinstance(turns, list | tuple) else reply


def _answer(reply: str | list[ChatMessage], field: str, style: Style) -> Answer:
    if isinstance(reply, str):
        return spoken_or_written((reply,), field)
    if len(reply) != 1 or reply[0].role != "assistant":
        raise FieldError(field, "is not one assistant message; what comes before it belongs in prompt")
    return spoken_or_written(message_pieces(reply[0], style), field)


def _either(row: Row, *fields: str) -> str:
    """Return the first of the columns that the row fills, or else the first of all."""
    return next((field for field in fields if row.data.get(field) is not None), fields[0])

"""Answers with a verdict: which of two is better, whether one is good, which of its steps are right.

A row is any that `read_samples` knows, its gold answer optional, with these columns::

    read_pairs    chosen, rejected, margin?
    read_judged   answer | completion, desirable | label        (with completion, answer stays the gold answer)
    read_steps    steps, labels

    {"audio": "a.wav", "question": "Which animal?", "chosen": "a cat", "rejected": "a dog"}

Answers may be TRL's `[{"role": "assistant", "content": "…"}]`, whose content may be an audio part: a spoken answer, to
a prompt whose `metadata` has `"respond": "speech"`. A whole conversation stands in `prompt`, with gold texts in
`references`; it is taken as it is, with no request for tags added (`pair_row` writes such rows). An audio part may
select `duration` seconds from `start`. A prompt may come again, with the same id, for other answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

from msgspec import Meta, Struct

from audiorl.audio import AudioClip, name
from audiorl.data.formats import Style, clip_from, detect, existing_columns
from audiorl.data.manifest import Format, Kind, Loaded, ReadOptions, read_values
from audiorl.data.rows import Row
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.manifests import AudioColumns
from audiorl.data.schema.types import AnyText, Finite, Id, Object, Task, Text
from audiorl.types import Message, Sample

ROLLOUT_COLUMNS = ("step", "group_id", "index", "sample", "segments", "text", "score", "advantage", "spoken_audio")
"""Columns of a recorded rollout; a labelled one has them besides those of a judged answer, and they are no metadata."""

Answer = str | AudioClip  # A written answer, or the recording of a spoken one


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


class ContentPart(AudioColumns, kw_only=True):
    """A piece of a message, as chat templates have it."""

    type: Literal["text", "audio"]
    text: AnyText | None = None


Content = Annotated[str | ContentPart, Meta(description='text or audio; give "…" or {"type": "audio", "audio": "…"}')]
Contents = Annotated[
    str | ContentPart | list[Content],
    Meta(description='text or audio; give "…" or [{"type": "audio", "audio": "…"}, …]'),
]


class ChatMessage(Struct):
    role: Literal["system", "user", "assistant"]
    content: Contents


Reply = Annotated[
    str | list[ChatMessage], Meta(description='a text; give "…" or [{"role": "assistant", "content": "…"}]')
]
TextList = Annotated[list[Text] | Text, Meta(description="a list of texts; give each as a text that is not empty")]
Verdict = Annotated[bool | Finite, Meta(description="a verdict; give true or false")]
Margin = Annotated[Finite, Meta(description="a finite number; give by how much chosen is better, or leave it out")]
Probability = Annotated[float, Meta(ge=0, le=1)]
Label = Annotated[bool | Probability, Meta(description="a label; give a number from 0 (wrong) to 1 (right)")]
ChatTurn = Annotated[ChatMessage, Meta(description="a message; give role (system, user or assistant) and content")]


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


class ConversationColumns(Struct):
    """A row whose `prompt` is the whole conversation."""

    prompt: Annotated[list[ChatTurn], Meta(description="a list of messages; a plain question belongs in question")]
    id: Id | None = None
    references: TextList | None = None
    answer: TextList | None = None
    choices: TextList | None = None
    task: Task | None = None
    metadata: Object | None = None


# -- reading and writing ----------------------------------------------------------------------------------------------


def read_pairs(path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Pair]:
    """Read pairs for preference losses and reward models; arguments and errors are those of `read_samples`."""
    return read_values(path, kind, _pair, detect=_detect, repeats=True, **options)


def read_judged(path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Judged]:
    """Read single answers, good or bad (KTO); arguments and errors are those of `read_samples`."""
    return read_values(path, kind, _judged, detect=_detect, repeats=True, **options)


def read_steps(path: str | Path, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Steps]:
    """Read labelled steps for process reward models; arguments and errors are those of `read_samples`."""
    return read_values(path, kind, _steps, detect=_detect, repeats=True, **options)


def pairs_to_judged(pairs: Iterable[Pair]) -> list[Judged]:
    """Take each pair's chosen answer as a good one, then its rejected answer as a bad one."""
    return [j for p in pairs for j in (Judged(p.sample, p.chosen, True), Judged(p.sample, p.rejected, False))]


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


def part_row(content: str | AudioClip) -> dict[str, Any]:
    """Return a part of a message as a row holds it. Raises ValueError for audio that is not a file."""
    if isinstance(content, str):
        return {"type": "text", "text": content}
    if content.path is None:
        raise ValueError(f"{name(content)} has no path; write the audio to a file and refer to it by path")
    part: dict[str, Any] = {"type": "audio", "audio": os.path.abspath(content.path)}
    part |= content.part
    return part if content.sample_rate is None else {**part, "sample_rate": content.sample_rate}


def _detect(row: Row) -> str:
    return "native" if row.data.get("prompt") is not None else detect(row)


def _pair(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Pair]:
    columns = check(row.data, PairColumns)
    sample = _sample(row, style, to_sample, "chosen", "rejected", "margin")
    chosen, rejected = _answer(columns.chosen, "chosen", style), _answer(columns.rejected, "rejected", style)
    return sample, Pair(sample, chosen, rejected, columns.margin or 0.0)


def _judged(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Judged]:
    field = "answer" if row.data.get("completion") is None else "completion"
    verdict = _either(row, "desirable", "label")
    columns = check({name: row.data.get(name) for name in (field, verdict)}, JudgedColumns)
    sample = _sample(row, style, to_sample, field, verdict)
    desirable, answer = getattr(columns, verdict), getattr(columns, field)
    if desirable not in (True, False):  # 0 and 1 are equal to these
        what = f"missing; give true or false{existing_columns(row)}"
        raise FieldError(verdict, what if desirable is None else f"{desirable!r} is not a verdict; give true or false")
    if answer is None:
        raise FieldError(field, f"missing; give the text of the answer{existing_columns(row)}")
    return sample, Judged(sample, _answer(answer, field, style), bool(desirable))


def _steps(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Steps]:
    columns = check(row.data, StepsColumns)
    sample = _sample(row, style, to_sample, "steps", "labels")
    counts = len(columns.labels), len(columns.steps)
    if counts[0] != counts[1]:
        raise FieldError("labels", "{} label(s) for {} step(s); give one label a step".format(*counts))
    return sample, Steps(sample, tuple(columns.steps), tuple(map(float, columns.labels)))


def _sample(row: Row, style: Style, to_sample: Format, *own: str) -> Sample:
    """Return the sample of a row without the reader's `own` columns; its gold answer may be missing."""
    data = {field: value for field, value in row.data.items() if field not in own}
    if data.get("prompt") is None:
        return to_sample(Row(row.file, row.number, data), replace(style, need_answer=False))
    columns = check(data, ConversationColumns)
    gold = _either(row, "references", "answer")
    used = ("id", "prompt", "choices", "task", "metadata", gold, *(ROLLOUT_COLUMNS if "segments" in data else ()))
    rest = {field: value for field, value in data.items() if field not in used and value is not None}

    def texts(value: list[str] | str | None) -> tuple[str, ...]:
        return () if value is None else (value,) if isinstance(value, str) else tuple(value)

    sample = Sample(
        id=f"{Path(row.file).stem}:{row.number}" if columns.id is None else str(columns.id).strip(),
        messages=tuple(Message(m.role, _pieces(m, style)) for m in columns.prompt),
        references=texts(getattr(columns, gold)),
        choices=texts(columns.choices),
        task="qa" if columns.task is None else columns.task,
        metadata={**(columns.metadata or {}), **rest},
    )
    if not sample.audio and sample.metadata.get("respond") != "speech":
        raise FieldError("prompt", 'holds no audio; put {"type": "audio", "audio": "…"} where it belongs')
    offered = list(sample.choices)
    if len(set(offered)) < len(offered):
        raise FieldError("choices", f"{offered} hold one twice; give every choice once")
    if offered and sample.references and sample.references[0] not in offered:
        raise FieldError(gold, f"{sample.references[0]!r} is not among the choices {offered}; give the exact text")
    return sample


def _answer(reply: str | list[ChatMessage], field: str, style: Style) -> Answer:
    parts: tuple[str | AudioClip, ...]
    if isinstance(reply, str):
        parts = (reply,)
    elif len(reply) == 1 and reply[0].role == "assistant":
        parts = _pieces(reply[0], style)
    else:
        raise FieldError(field, "is not one assistant message; what comes before it belongs in prompt")
    if len(parts) == 1 and isinstance(parts[0], AudioClip):
        return parts[0]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise FieldError(field, "holds audio besides something else; give a text, or one audio part that says it all")
    if not "".join(texts).strip():
        raise FieldError(field, f"the {field} text is empty; give an answer")
    return "".join(texts)


def _pieces(message: ChatMessage, style: Style) -> tuple[str | AudioClip, ...]:
    parts = message.content if isinstance(message.content, list) else [message.content]
    pieces: list[str | AudioClip] = []
    for part in parts:
        if isinstance(part, ContentPart):
            pieces.append(clip_from(part, style, "audio") if part.type == "audio" else part.text or "")
        else:
            pieces.append(part)
    return tuple(pieces)


def _either(row: Row, *fields: str) -> str:
    """Return the first of the columns that the row fills, or else the first of all."""
    return next((field for field in fields if row.data.get(field) is not None), fields[0])

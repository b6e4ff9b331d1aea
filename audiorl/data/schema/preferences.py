"""Rows of preference data: pairs, judged answers, steps and conversations."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from audiorl.data.schema.manifests import AudioColumns
from audiorl.data.schema.types import AnyText, Finite, Id, Object, Task, Text


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

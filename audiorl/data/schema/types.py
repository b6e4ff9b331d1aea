"""Types that the fields of several kinds of rows share."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

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
_Channel = Annotated[int, Meta(ge=0, lt=2**16)]
Channel = Annotated[
    _Channel | Annotated[tuple[_Channel, ...], Meta(min_length=1)],
    Meta(description="a channel; give its number from 0, or a list of those whose mean is meant"),
]
_Id = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Text
Id = Annotated[_Id, Meta(description="an id; give a text or a whole number, or leave the column out")]
OwnId = Annotated[_Id, Meta(description="an id; give every row its own, a text or a whole number")]
Name = Annotated[Integer | str, Meta(description="a name; give a text, or leave the column out")]
Language = Annotated[str, Meta(pattern=r"^(\S.*)?$", description="a language; give an ISO code such as en")]
Hotwords = Annotated[
    list[Text], Meta(min_length=1, description="a list of words; give one or more, or leave the column out")
]
Task = Annotated[str, Meta(description="the name of a task; give a text, or leave the column out")]
Object = Annotated[dict[str, Any], Meta(description="an object; give {…}, or leave it out")]
Answer = str | Integer | Finite
Choices = Meta(description="a list of texts; give every choice as a text that is not empty")
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

"""What a reader of stream files makes of a row before its audio is looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.data.formats import FieldError
from audiorl.simulst.streams import Unit

SUFFIXES = (".wav", ".flac", ".mp3", ".m4a", ".opus", ".ogg")
OVERLAP = 1.0
"""Seconds by which annotated units may overlap: up to 0.5 s in RealSI."""


@dataclass(frozen=True)
class StreamDefaults:
    """What the caller says of every stream: languages, "" to take them from the file, and where audio paths start."""

    source_language: str = ""
    target_language: str = ""
    root: Path | None = None

    def language(self, given: Any, field: str) -> str:
        """The language of a row that says `given`. Raises FieldError when the two disagree or neither says it."""
        asked = getattr(self, field)
        if given is not None and (not isinstance(given, str) or not given.strip()):
            raise FieldError(field, f"{given!r} is no language; give an ISO code such as en")
        if given and asked and given != asked:
            raise FieldError(field, f"{given!r} where {asked!r} was asked for; leave {field} out to take all streams")
        if not given and not asked:
            raise FieldError(field, f"missing; give it in the file or as {field}=…")
        return str(given or asked)


@dataclass(frozen=True)
class ParsedStream:
    """A stream whose audio has not been opened. `units`: one Unit alone stands for the whole clip, whatever its times.

    field, units_field: what errors call the audio and the units. seconds: how long the audio is said to last.
    """

    file: str
    row: int
    field: str
    id: str
    clip: AudioClip
    units: tuple[Unit, ...] | Unit
    seconds: float | None
    source_language: str
    target_language: str
    metadata: Mapping[str, Any] = default(default_factory=dict)
    units_field: str = "units"


def text(data: Mapping[str, Any], field: str) -> str:
    """A text, perhaps an empty one. Raises FieldError."""
    value = data.get(field)
    if not isinstance(value, str):
        raise FieldError(field, "missing; give the text" if value is None else f"{value!r} is no text; give one")
    return value.strip()


def time(data: Mapping[str, Any], field: str) -> float:
    """A finite number, 0 or more. Raises FieldError."""
    value = data.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise FieldError(field, "missing; give a time" if value is None else f"{value!r} is no time; give 0 or more")
    return float(value)


class UnitError(FieldError):
    """A unit that does not follow the one ahead; `index` counts from 0."""

    def __init__(self, index: int, field: str, message: str) -> None:
        super().__init__(field, message)
        self.index = index


def resolve_overlaps(units: Sequence[Unit], field: str) -> tuple[Unit, ...]:
    """Annotated units without overlap: one that begins up to OVERLAP before the one ahead ends begins where that ends.

    Its end, and with it when it can be translated, is not touched. Raises UnitError for other overlaps, units that are
    not in order, and those that last no time.
    """
    out: list[Unit] = []
    for k, unit in enumerate(units):
        lasts = f"lasts from {unit.start:g} to {unit.end:g} s"
        if unit.end <= unit.start:
            raise UnitError(k, field, f"{lasts}; give an end after the start")
        end = out[-1].end if out else 0.0
        if unit.start < end - OVERLAP or unit.end <= end:
            raise UnitError(k, field, f"{lasts}, but the one ahead until {end:g} s; sort them, or correct the times")
        out.append(unit if unit.start >= end else replace(unit, start=end))
    return tuple(out)

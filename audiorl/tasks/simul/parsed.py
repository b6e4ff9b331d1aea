"""Rows of stream files as they are parsed, before their audio is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.data.schema import FieldError
from audiorl.tasks.simul.streams import Unit

SUFFIXES = (".wav", ".flac", ".mp3", ".m4a", ".opus", ".ogg")
OVERLAP = 1.0
"""Seconds by which annotated units may overlap: up to 0.5 s in RealSI."""


@dataclass(frozen=True)
class StreamDefaults:
    """The arguments of `read_streams` that hold for all rows.

    Languages are "" where the rows name them. `root`: the folder of relative audio paths, None for the file's own.
    """

    source_language: str = ""
    target_language: str = ""
    root: Path | None = None

    def language(self, given: str | None, field: str) -> str:
        """The language of a row whose own field is `given`. FieldError if it differs or is missing everywhere."""
        wanted = getattr(self, field)
        if given and wanted and given != wanted:
            raise FieldError(field, f"{given!r} where {wanted!r} was asked for; leave {field} out to take all streams")
        if not given and not wanted:
            raise FieldError(field, f"missing; give it in the file or as {field}=…")
        return str(given or wanted)


@dataclass(frozen=True)
class ParsedStream:
    """A stream whose audio has not been opened.

    units: the units, or one Unit for the whole clip, whose times are filled in from the audio. field, units_field,
    seconds_field: the names of the fields in errors. seconds: the duration that the file claims; it may be off by
    `tolerance` (s), since manifests round.
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
    seconds_field: str = "seconds"
    tolerance: float = 0.5


class UnitError(FieldError):
    """A unit that is not in order; `index` counts from 0."""

    def __init__(self, index: int, field: str, message: str) -> None:
        super().__init__(field, message)
        self.index = index


def resolve_overlaps(units: Sequence[Unit], field: str) -> tuple[Unit, ...]:
    """Annotated units without overlap: a start up to OVERLAP before the previous unit's end is moved to that end.

    Ends are not changed, so that references stay in their chunks. Raises UnitError for larger overlaps, units that are
    not in order, and units without duration.
    """
    out: list[Unit] = []
    for k, unit in enumerate(units):
        lasts = f"lasts from {unit.start:g} to {unit.end:g} s"
        if unit.end <= unit.start:
            raise UnitError(k, field, f"{lasts}; give an end after the start")
        end = out[-1].end if out else 0.0
        if unit.start < end - OVERLAP or unit.end <= end:
            raise UnitError(k, field, f"{lasts}, but the previous one until {end:g} s; sort them, or correct the times")
        out.append(unit if unit.start >= end else replace(unit, start=end))
    return tuple(out)

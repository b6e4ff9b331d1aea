"""RealSI (arXiv 2407.21646): talks of 3 to 8 minutes between Chinese and English, one JSON file each.

https://github.com/byteresearchcla/RealSI, annotations CC BY 4.0. The audio is fetched by the set's own script, to
data/zh2en/audio/VID.mp3. The declared `duration` is up to 1.2 s short of the last utterance, and six utterances begin
up to 0.5 s before the previous one ends; both are accepted. Utterances are grouped into segments, which convey a
complete meaning: the stream's metadata holds the segments' bounds in seconds, and the terms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.data.rows import BadRow
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.streams import RealSISegment, RealSITalk, RealSIUtterance
from audiorl.tasks.simul.parsed import SUFFIXES, ParsedStream, StreamDefaults, UnitError, resolve_overlaps
from audiorl.tasks.simul.streams import Unit


def is_realsi(document: Any) -> bool:
    """Whether a document is a talk, or a list of talks."""
    first = document[0] if isinstance(document, list) and document else document
    return isinstance(first, Mapping) and "vid" in first and "segment" in first


def realsi(path: Path, document: Any, defaults: StreamDefaults) -> Iterator[ParsedStream | BadRow]:
    """One parsed stream a talk. Errors name as the row the utterance's number in the file, or the talk's."""
    talks = document if isinstance(document, list) else [document]
    before = 0
    for number, talk in enumerate(talks, 1):
        if not is_realsi(talk):
            yield BadRow(str(path), number, "vid", "no RealSI talk; give {vid, duration, segment}")
            continue
        yield _talk(path, talk, defaults, number, before)
        segments = talk["segment"] if isinstance(talk["segment"], list) else []
        utterances = [segment.get("utterance") for segment in segments if isinstance(segment, Mapping)]
        before += sum(len(u) for u in utterances if isinstance(u, list))


def _talk(
    path: Path, talk: Mapping[str, Any], defaults: StreamDefaults, number: int, before: int
) -> ParsedStream | BadRow:
    row = before
    units: list[Unit] = []
    segments: list[list[float]] = []
    terms: list[Any] = []
    try:
        about = check(talk, RealSITalk)
        for segment in about.segment:
            first = len(units)
            for utterance in check(segment, RealSISegment).utterance:
                row += 1
                u = check(utterance, RealSIUtterance)
                start, end = u.sub_start_time / 1000, u.sub_end_time / 1000
                units.append(Unit(start, end, u.sub_trg_text.strip(), u.sub_src_text.strip()))
                terms += u.term or []
            if len(units) > first:
                segments.append([units[first].start, units[-1].end])
        ordered = resolve_overlaps(units, "sub_start_time")
        row = number
        source, target = _languages(about.vid)
        return ParsedStream(
            str(path),
            number,
            "vid",
            about.vid,
            AudioClip(path=str(_audio(path, about.vid, defaults.root))),
            ordered,
            None if about.duration is None else about.duration / 1000,
            defaults.language(source, "source_language"),
            defaults.language(target, "target_language"),
            {"segments": segments, "terms": terms},
            "sub_end_time",
            tolerance=math.inf,
        )
    except UnitError as error:
        return BadRow(str(path), before + error.index + 1, error.field, error.message)
    except FieldError as error:
        return BadRow(str(path), max(row, 1), error.field, error.message)


def _languages(vid: str) -> tuple[str | None, str | None]:
    """zh2en-01-tech: from zh to en."""
    match = re.match(r"([a-z]{2,3})2([a-z]{2,3})\b", vid)
    return (match[1], match[2]) if match else (None, None)


def _audio(path: Path, vid: str, root: Path | None) -> Path:
    """The recording named after the talk, or the path where it is expected."""
    folders = [root] if root is not None else [path.parent, path.parent / "audio", path.parent.parent / "audio"]
    places = [folder / f"{vid}{suffix}" for folder in folders for suffix in SUFFIXES]
    return next((p for p in places if p.is_file()), folders[0] / f"{vid}.wav")

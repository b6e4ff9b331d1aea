"""RealSI (arXiv 2407.21646): talks of 3 to 8 minutes between Chinese and English, one JSON file each.

https://github.com/byteresearchcla/RealSI, annotations CC BY 4.0. The audio is fetched by the set's own script, to
data/zh2en/audio/VID.mp3. The declared `duration` is up to 1.2 s short of the last utterance, and six utterances begin
up to 0.5 s before the previous one ends; both are accepted. Utterances are grouped into segments, which convey a
complete meaning: the stream's metadata holds the segments' bounds in seconds, and the terms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.data.formats import FieldError
from audiorl.data.rows import BadRow
from audiorl.simulst.parsed import SUFFIXES, ParsedStream, StreamDefaults, UnitError, resolve_overlaps, text, time
from audiorl.simulst.streams import Unit


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
        before += sum(len(s.get("utterance") or ()) for s in talk["segment"] if isinstance(s, Mapping))


def _talk(
    path: Path, talk: Mapping[str, Any], defaults: StreamDefaults, number: int, before: int
) -> ParsedStream | BadRow:
    row = before
    units: list[Unit] = []
    segments: list[list[float]] = []
    terms: list[Any] = []
    try:
        vid = text(talk, "vid")
        if not isinstance(talk["segment"], list):
            raise FieldError("segment", f"{talk['segment']!r} is not a list; give the segments")
        for segment in talk["segment"]:
            utterances = segment.get("utterance") if isinstance(segment, Mapping) else None
            if not isinstance(utterances, list):
                raise FieldError("utterance", f"missing in the segment after utterance {row}; give a list")
            first = len(units)
            for utterance in utterances:
                row += 1
                units.append(_unit(utterance))
                terms += utterance.get("term") or []
            if len(units) > first:
                segments.append([units[first].start, units[-1].end])
        ordered = resolve_overlaps(units, "sub_start_time")
        row = number
        source, target = _languages(vid)
        return ParsedStream(
            str(path),
            number,
            "vid",
            vid,
            AudioClip(path=str(_audio(path, vid, defaults.root))),
            ordered,
            time(talk, "duration") / 1000 if talk.get("duration") is not None else None,
            defaults.language(source, "source_language"),
            defaults.language(target, "target_language"),
            {"segments": segments, "terms": terms},
            "sub_end_time",
        )
    except UnitError as error:
        return BadRow(str(path), before + error.index + 1, error.field, error.message)
    except FieldError as error:
        return BadRow(str(path), max(row, 1), error.field, error.message)


def _unit(utterance: Any) -> Unit:
    if not isinstance(utterance, Mapping):
        raise FieldError("utterance", f"{utterance!r} is not an object; give {{sub_start_time, sub_end_time, …}}")
    start, end = (time(utterance, field) / 1000 for field in ("sub_start_time", "sub_end_time"))
    return Unit(start, end, text(utterance, "sub_trg_text"), text(utterance, "sub_src_text"))


def _languages(vid: str) -> tuple[str | None, str | None]:
    """zh2en-01-tech: from zh to en."""
    match = re.match(r"([a-z]{2,3})2([a-z]{2,3})\b", vid)
    return (match[1], match[2]) if match else (None, None)


def _audio(path: Path, vid: str, root: Path | None) -> Path:
    """The recording named after the talk, or the path where it is expected."""
    folders = [root] if root is not None else [path.parent, path.parent / "audio", path.parent.parent / "audio"]
    places = [folder / f"{vid}{suffix}" for folder in folders for suffix in SUFFIXES]
    return next((p for p in places if p.is_file()), folders[0] / f"{vid}.wav")

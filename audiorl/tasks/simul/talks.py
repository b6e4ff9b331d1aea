"""Published sets of talks as streams, and the reference segmentation of long streams.

RealSI (arXiv 2407.21646, https://github.com/byteresearchcla/RealSI, annotations CC BY 4.0): talks of 3 to 8 minutes
between Chinese and English, one JSON file each. The set's own script fetches the audio to data/zh2en/audio/VID.mp3. The
declared `duration` is up to 1.2 s short of the last utterance, and six utterances begin up to 0.5 s before the
previous one ends; both are accepted. The stream's metadata holds the bounds of its segments in seconds, and the terms.

MuST-C and the IWSLT sets: a YAML list of segments, and a text file a language with one line a segment. The segments of
one wav are one stream. Without a source text the units have none::

    data/tst-COMMON/txt/tst-COMMON.yaml      - {duration: 3.5, offset: 16.08, speaker_id: spk.767, wav: ted_767.wav}
    data/tst-COMMON/txt/tst-COMMON.es        En Nueva York, soy jefe de desarrollo de una ONG …
    data/tst-COMMON/wav/ted_767.wav

A reference segmentation, as MuST-C, simulstream and OmniSTEval keep it, is a list in YAML or JSON, or one JSON object a
line (.jsonl); times in seconds. The references stand under `reference`, or in a text file, one line a segment::

    - {wav: talk.wav, offset: 2.43, duration: 9.05, reference: Guten Morgen.}
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta, Struct

from audiorl.audio import AudioClip
from audiorl.data.rows import BadRow
from audiorl.data.schema import FieldError, check, check_characters, parse_json
from audiorl.data.schema.types import AnyText, Milliseconds, Name, Seconds, Text
from audiorl.eval.metrics.longform import ReferenceSegment
from audiorl.tasks.simul.logs import Instance
from audiorl.tasks.simul.streams import Unit

MAX_DEPTH = 100
"""Lists and objects within each other; segmentations have two."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def load_yaml(text: str | bytes) -> Any:
    """Return the document in `text`. Raises yaml.YAMLError, also for more than MAX_DEPTH levels, and ValueError."""
    if _may_be_deep(text if isinstance(text, str) else text.replace(b"\0", b"").decode("latin-1")):
        depth = 0
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise yaml.YAMLError(f"nested in more than {MAX_DEPTH} levels")
    return yaml.load(text, _LOADER)


def _may_be_deep(text: str) -> bool:
    """Return whether brackets, dashes in a line or indentation allow so many levels. Fast, since files have 200,000
    lines."""
    brackets = accumulate(_STEP[bracket] for bracket in re.findall(r"[\[\]{}]", text))
    levels = MAX_DEPTH // 4
    indented = re.search(rf"(?:[-?:]\s+){{{levels}}}|^[ -]{{{levels}}}", text, re.MULTILINE)
    return max(brackets, default=0) > levels or indented is not None


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


class RealSIUtterance(Struct):
    sub_start_time: Milliseconds
    sub_end_time: Milliseconds
    sub_trg_text: AnyText
    sub_src_text: AnyText
    term: list[Any] | None = None


class RealSITalk(Struct):
    vid: Text
    segment: Annotated[list[Any], Meta(min_length=1, description="a list of segments; give at least one")]
    duration: Milliseconds | None = None


class RealSISegment(Struct):
    utterance: Annotated[list[Any], Meta(description="a list; give the utterances")]


class MuSTCRecording(Struct):
    wav: Text


class MuSTCSegment(MuSTCRecording):
    """A segment of MuST-C and IWSLT, times in seconds."""

    offset: Seconds
    duration: Seconds
    speaker_id: Name | None = None


class ReferenceColumns(Struct):
    """A segment of a reference segmentation."""

    wav: Annotated[str, Meta(pattern=r"\S", description="a name; name the recording")]
    offset: Seconds
    duration: Annotated[float, Meta(gt=0, le=1e9, description="a duration; give seconds, more than 0")]
    reference: Annotated[str, Meta(description="a text; write it here, or give a file of references")]


def is_realsi(document: Any) -> bool:
    """Return whether a document is a talk, or a list of talks."""
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
        yield _realsi_talk(path, talk, defaults, number, before)
        segments = talk["segment"] if isinstance(talk["segment"], list) else []
        utterances = [segment.get("utterance") for segment in segments if isinstance(segment, Mapping)]
        before += sum(len(u) for u in utterances if isinstance(u, list))


def _realsi_talk(
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
            AudioClip(path=str(_recording(path, defaults.root, "audio", about.vid, SUFFIXES))),
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


def _recording(path: Path, root: Path | None, subfolder: str, name: str, suffixes: Sequence[str] = ("",)) -> Path:
    """Return the recording of a talk: in `root`, or else near the file; where there is none, the path where it is
    expected."""
    folders = [root] if root is not None else [path.parent, path.parent / subfolder, path.parent.parent / subfolder]
    places = [folder / f"{name}{suffix}" for folder in folders for suffix in suffixes]
    return next((p for p in places if p.is_file()), places[0])


def mustc(path: Path, defaults: StreamDefaults) -> Iterator[ParsedStream | BadRow]:
    """One parsed stream a wav. Errors name the segment, from 1, as the row; a bad segment makes its talk unusable.

    Raises ValueError for files that do not fit together: no list, a missing text, another number of lines.
    """
    segments = _segments(path)
    source = _lines(path, defaults, "source_language", len(segments), optional=True)
    target = _lines(path, defaults, "target_language", len(segments))
    talks: dict[str, list[int]] = {}
    for k, segment in enumerate(segments):
        try:
            talks.setdefault(check(segment, MuSTCRecording).wav, []).append(k)
        except FieldError as error:
            yield BadRow(str(path), k + 1, error.field, error.message)
    for wav, members in talks.items():
        yield _mustc_talk(path, wav, members, segments, source, target, defaults)


def _mustc_talk(
    path: Path,
    wav: str,
    members: list[int],
    segments: list[Any],
    source: list[str | FieldError],
    target: list[str | FieldError],
    defaults: StreamDefaults,
) -> ParsedStream | BadRow:
    units = []
    k = members[0]
    try:
        for k in members:
            segment = check(segments[k], MuSTCSegment)
            source_text, target_text = (_line(lines, k) for lines in (source, target))
            end = round(segment.offset + segment.duration, 6)
            speaker = "" if segment.speaker_id is None else str(segment.speaker_id)
            units.append(Unit(segment.offset, end, target_text, source_text, speaker=speaker))
        return ParsedStream(
            str(path),
            members[0] + 1,
            "wav",
            Path(wav).stem,
            AudioClip(path=str(_recording(path, defaults.root, "wav", wav))),
            resolve_overlaps(units, "offset"),
            None,
            defaults.language(None, "source_language"),
            defaults.language(None, "target_language"),
            {"speaker": units[0].speaker} if units[0].speaker else {},
            "duration",
        )
    except UnitError as error:
        return BadRow(str(path), members[error.index] + 1, error.field, f"{wav}: {error.message}")
    except FieldError as error:
        return BadRow(str(path), k + 1, error.field, f"{wav}: {error.message}")


def _segments(path: Path) -> list[Any]:
    try:
        entries = load_yaml(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as YAML ({' '.join(str(error).split())}); correct it") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: no list of segments; give - {{wav: …, offset: …, duration: …}}, one a segment")
    return entries


def _lines(
    path: Path, defaults: StreamDefaults, field: str, count: int, optional: bool = False
) -> list[str | FieldError]:
    """Return the lines of the list's text file in a language; a line that is not UTF-8 is an error of its segment."""
    language = getattr(defaults, field)
    languages = sorted(p.suffix[1:] for p in path.parent.glob(f"{path.stem}.*") if p.suffix != path.suffix)
    if not language:
        raise ValueError(f"{path}: give {field}=…; there are texts in {', '.join(languages) or 'no language'}")
    file = path.with_suffix(f".{language}")
    if not file.exists():
        if optional:
            return []
        raise ValueError(f"{file}: missing; {path.name} has texts in {', '.join(languages) or 'no language'}")
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    raw = content.removesuffix(b"\n").split(b"\n")
    if len(raw) != count:
        raise ValueError(f"{file}: {len(raw)} lines for {count} segments in {path.name}; give one line a segment")
    return [_decoded(line, file, k, field) for k, line in enumerate(raw, 1)]


def _decoded(line: bytes, file: Path, number: int, field: str) -> str | FieldError:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        bad = f"byte {line[error.start]:#04x} at column {error.start + 1} of line {number} is not UTF-8"
        return FieldError(field.removesuffix("_language"), f"{file.name}: {bad}; save the file as UTF-8")


def _line(lines: list[str | FieldError], k: int) -> str:
    line = lines[k] if lines else ""
    if isinstance(line, FieldError):
        raise line
    return line


Recordings = Mapping[str, tuple[ReferenceSegment, ...]]


def read_segments(path: str | Path, references: str | Path | None = None) -> Recordings:
    """Return the segments of each recording in order of time, keyed by the recording's name as written in `wav`.

    Times become ms. Raises ValueError naming file, entry and field.
    """
    path = Path(path)
    rows = _segment_rows(path)
    texts: Sequence[Any]
    if references is None:
        texts = [row.get("reference") if isinstance(row, Mapping) else None for row in rows]
    else:
        texts = _segment_text(Path(references)).removesuffix("\n").split("\n")
        if len(texts) != len(rows):
            raise ValueError(
                f"{references}: {len(texts)} lines for {len(rows)} segments in {path}; write one line per segment"
            )
    recordings: dict[str, list[ReferenceSegment]] = {}
    for number, (row, text) in enumerate(zip(rows, texts, strict=True), 1):
        where = f"{path}, segment {number}"
        try:
            fields = check({**row, "reference": text} if isinstance(row, dict) else row, ReferenceColumns)
        except FieldError as error:
            raise ValueError(f"{where}: {error.field}: {error.message}") from error
        segment = ReferenceSegment(1000 * fields.offset, 1000 * fields.duration, fields.reference.strip())
        recordings.setdefault(fields.wav, []).append(segment)
    if not recordings:
        raise ValueError(f"{path}: no segments")
    return {name: tuple(sorted(segments, key=lambda s: s.start)) for name, segments in recordings.items()}


def match_segments(instances: Sequence[Instance], recordings: Recordings) -> dict[int, tuple[ReferenceSegment, ...]]:
    """Return the segments of each instance by its index; the recording is found by its path, file name or stem.

    Raises ValueError for an instance without segments, and for segments without an instance.
    """
    matched: dict[int, tuple[ReferenceSegment, ...]] = {}
    used: dict[str, int] = {}
    keys: tuple[Callable[[str], str], ...] = (str, lambda name: Path(name).name, lambda name: Path(name).stem)
    for instance in instances:
        source = instance.source if isinstance(instance.source, str) else "".join(instance.source[:1])
        name = next((n for key in keys for n in recordings if key(n) == key(source)), None)
        if name is None:
            raise ValueError(
                f"instance {instance.index}: source: no segments for {source!r}; the segmentation has "
                f"{', '.join(sorted(recordings))}"
            )
        if name in used:
            raise ValueError(f"instance {instance.index}: source: {source!r} is also that of instance {used[name]}")
        used[name] = instance.index
        matched[instance.index] = recordings[name]
    unused = sorted(set(recordings) - set(used))
    if unused:
        raise ValueError(f"the log has no output for {', '.join(unused)}; leave out their segments or translate them")
    return matched


def _segment_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _segment_rows(path: Path) -> list[Any]:
    text = _segment_text(path)
    try:
        if path.suffix == ".jsonl":
            return [parse_json(line) for line in text.split("\n") if line.strip()]
        if path.suffix == ".json":
            rows = parse_json(text)
        elif path.suffix in (".yaml", ".yml"):
            rows = load_yaml(text)
        else:
            raise ValueError("segments are read from .yaml, .json or .jsonl")
        check_characters(rows)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]} ({' '.join(str(error).split())})") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of segments")
    return rows

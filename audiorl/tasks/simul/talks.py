"""Published sets of talks as streams, and the reference segmentation of long streams.

RealSI (arXiv 2407.21646, https://github.com/byteresearchcla/RealSI, annotations CC BY 4.0): one JSON file a talk, times
in ms. The declared `duration` is up to 1.2 s short of the last utterance, and six utterances begin up to 0.5 s before
the previous one ends; both are accepted. MuST-C and the IWSLT sets: a YAML list of segments {wav, offset, duration,
speaker_id}, and a text file a language with one line a segment. A reference segmentation, as MuST-C, simulstream and
OmniSTEval keep it, is such a list in YAML or JSON, with the references under `reference` or in a text file.
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

from audiorl.audio import AUDIO_SUFFIXES, AudioClip
from audiorl.data.rows import BadRow, read_rows
from audiorl.data.schema import FieldError, check, check_characters, check_language
from audiorl.data.schema.types import AnyText, Milliseconds, Name, Seconds, Text
from audiorl.eval.metrics.longform import ReferenceSegment
from audiorl.languages import language_code
from audiorl.tasks.simul.logs import Instance
from audiorl.tasks.simul.streams import Unit

MAX_DEPTH = 100
"""Lists and objects within each other; segmentations have two."""
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
        """Return the language of a row whose own field is `given`; FieldError if it differs, is missing or unknown."""
        wanted = getattr(self, field)
        check_language(given, field)
        check_language(wanted, field)
        if given and wanted and language_code(given) != language_code(wanted):
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
    offset: Seconds
    duration: Seconds
    speaker_id: Name | None = None


class ReferenceColumns(Struct):
    """A segment of a reference segmentation."""

    wav: Annotated[str, Meta(pattern=r"\S", description="a name; name the recording")]
    offset: Seconds
    duration: Annotated[float, Meta(gt=0, le=1e9, description="a duration; give seconds, more than 0")]
    reference: Annotated[str, Meta(description="a text; write it here, or give a file of references")]


def _add_unit(units: list[Unit], unit: Unit, field: str) -> None:
    """Append an annotated unit; a start up to OVERLAP before the previous unit's end is moved to that end.

    Ends are not changed, so that references stay in their chunks.
    """
    lasts = f"lasts from {unit.start:g} to {unit.end:g} s"
    end = units[-1].end if units else 0.0
    if unit.end <= unit.start:
        raise FieldError(field, f"{lasts}; give an end after the start")
    if unit.start < end - OVERLAP or unit.end <= end:
        raise FieldError(field, f"{lasts}, but the previous one until {end:g} s; sort them, or correct the times")
    units.append(replace(unit, start=max(unit.start, end)))


def _recording(path: Path, root: Path | None, subfolder: str, name: str, suffixes: Sequence[str] = ("",)) -> AudioClip:
    """Return a talk's recording in `root`, or else near the file; where there is none, the first place is named."""
    folders = [root] if root is not None else [path.parent, path.parent / subfolder, path.parent.parent / subfolder]
    places = [folder / f"{name}{suffix}" for folder in folders for suffix in suffixes]
    return AudioClip(path=str(next((p for p in places if p.is_file()), places[0])))


def is_realsi(document: Any) -> bool:
    """Tell if a document is a talk, or a list of talks."""
    first = document[0] if isinstance(document, list) and document else document
    return isinstance(first, Mapping) and "vid" in first and "segment" in first


def realsi(path: Path, document: Any, defaults: StreamDefaults) -> Iterator[ParsedStream | BadRow]:
    """Yield a parsed stream a talk. Errors name as the row the utterance's number in the file, or the talk's."""
    before = 0
    for number, talk in enumerate(document if isinstance(document, list) else [document], 1):
        if not is_realsi(talk):
            yield BadRow(str(path), number, "vid", "no RealSI talk; give {vid, duration, segment}")
            continue
        row, units, segments, terms = before, list[Unit](), list[list[float]](), list[Any]()
        try:
            about = check(talk, RealSITalk)
            for segment in about.segment:
                first = len(units)
                for utterance in check(segment, RealSISegment).utterance:
                    row += 1
                    u = check(utterance, RealSIUtterance)
                    start, end = u.sub_start_time / 1000, u.sub_end_time / 1000
                    unit = Unit(start, end, u.sub_trg_text.strip(), u.sub_src_text.strip())
                    _add_unit(units, unit, "sub_start_time")
                    terms += u.term or []
                if len(units) > first:
                    segments.append([units[first].start, units[-1].end])
            row = number
            languages = re.match(r"([a-z]{2,3})2([a-z]{2,3})\b", about.vid)  # zh2en-01-tech
            source, target = languages.groups() if languages else (None, None)
            yield ParsedStream(
                str(path),
                number,
                "vid",
                about.vid,
                _recording(path, defaults.root, "audio", about.vid, (".wav", *AUDIO_SUFFIXES)),
                tuple(units),
                None if about.duration is None else about.duration / 1000,
                defaults.language(source, "source_language"),
                defaults.language(target, "target_language"),
                {"segments": segments, "terms": terms},
                "sub_end_time",
                tolerance=math.inf,
            )
        except FieldError as error:
            yield BadRow(str(path), max(row, 1), error.field, error.message)
        all_segments = talk["segment"] if isinstance(talk["segment"], list) else []
        utterances = [s.get("utterance") for s in all_segments if isinstance(s, Mapping)]
        before += sum(len(u) for u in utterances if isinstance(u, list))


def mustc(path: Path, defaults: StreamDefaults) -> Iterator[ParsedStream | BadRow]:
    """Yield a parsed stream a wav. Errors name the segment, from 1, as the row; a bad segment makes its talk unusable.

    Raises ValueError for files that do not fit together: no list, a missing text, another number of lines.
    """
    segments = _yaml_list(path)
    sources = _lines(path, defaults, "source_language", len(segments), optional=True)
    targets = _lines(path, defaults, "target_language", len(segments))
    talks: dict[str, list[int]] = {}
    for k, row in enumerate(segments):
        try:
            talks.setdefault(check(row, MuSTCRecording).wav, []).append(k)
        except FieldError as error:
            yield BadRow(str(path), k + 1, error.field, error.message)
    for wav, members in talks.items():
        units: list[Unit] = []
        k = members[0]
        try:
            for k in members:
                segment = check(segments[k], MuSTCSegment)
                source, target = (_decoded(lines[k]) if lines else "" for lines in (sources, targets))
                end = round(segment.offset + segment.duration, 6)
                speaker = "" if segment.speaker_id is None else str(segment.speaker_id)
                _add_unit(units, Unit(segment.offset, end, target, source, speaker=speaker), "offset")
            yield ParsedStream(
                str(path),
                members[0] + 1,
                "wav",
                Path(wav).stem,
                _recording(path, defaults.root, "wav", wav),
                tuple(units),
                None,
                defaults.language(None, "source_language"),
                defaults.language(None, "target_language"),
                {"speaker": units[0].speaker} if units[0].speaker else {},
                "duration",
            )
        except FieldError as error:
            yield BadRow(str(path), k + 1, error.field, f"{wav}: {error.message}")


Line = tuple[Path, int, str, bytes]
"""File, number, field, and the line itself: one that is not UTF-8 is an error of its segment."""


def _lines(path: Path, defaults: StreamDefaults, field: str, count: int, optional: bool = False) -> list[Line]:
    """Return the lines of the list's text file in a language."""
    language = getattr(defaults, field)
    languages = sorted(p.suffix[1:] for p in path.parent.glob(f"{path.stem}.*") if p.suffix != path.suffix)
    if not language:
        raise ValueError(f"{path}: give {field}=…; there are texts in {', '.join(languages) or 'no language'}")
    file = path.with_suffix(f".{language}")
    if not file.exists():
        if optional:
            return []
        raise ValueError(f"{file}: missing; {path.name} has texts in {', '.join(languages) or 'no language'}")
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    if len(lines) != count:
        raise ValueError(f"{file}: {len(lines)} lines for {count} segments in {path.name}; give one line a segment")
    return [(file, number, field.removesuffix("_language"), line) for number, line in enumerate(lines, 1)]


def _decoded(line: Line) -> str:
    file, number, field, content = line
    try:
        return content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        bad = f"byte {content[error.start]:#04x} at column {error.start + 1} of line {number} is not UTF-8"
        raise FieldError(field, f"{file.name}: {bad}; save the file as UTF-8") from error


def _yaml_list(path: Path) -> list[Any]:
    """Return a list of segments. Raises ValueError, also for MAX_DEPTH levels and more, which end the process."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = path.read_bytes()
    try:
        if _may_be_deep(content.replace(b"\0", b"").decode("latin-1")):
            depth = 0
            for event in yaml.parse(content, Loader=loader):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH:
                    raise ValueError(f"nested in more than {MAX_DEPTH} levels")
        entries = yaml.load(content, loader)
        check_characters(entries)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as YAML ({' '.join(str(error).split())}); correct it") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: no list of segments; give - {{wav: …, offset: …, duration: …}}, one a segment")
    return entries


def _may_be_deep(text: str) -> bool:
    """Tell if brackets, dashes in a line or indentation allow so many levels: fast, since files have 200,000 lines."""
    levels = MAX_DEPTH // 4
    brackets = accumulate(1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text))
    indented = re.search(rf"(?:[-?:]\s+){{{levels}}}|^[ -]{{{levels}}}", text, re.MULTILINE)
    return max(brackets, default=0) > levels or indented is not None


Recordings = Mapping[str, tuple[ReferenceSegment, ...]]


def read_segments(path: str | Path, references: str | Path | None = None) -> Recordings:
    """Return the segments of each recording in order of time, keyed by the recording's name as written in `wav`.

    Times become ms. Raises ValueError naming file, entry and field.
    """
    path = Path(path)
    rows: list[Any] = []
    if path.suffix in (".yaml", ".yml"):
        rows = _yaml_list(path)
    else:
        for row in read_rows(path):
            if isinstance(row, BadRow):
                raise ValueError(str(row))
            rows.append(dict(row.data))
    texts: list[dict[str, str]] = [{}] * len(rows)
    if references is not None:
        try:
            lines = Path(references).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{references}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
        if len(lines) != len(rows):
            raise ValueError(f"{references}: {len(lines)} lines for {len(rows)} segments in {path}; write one each")
        texts = [{"reference": line} for line in lines]
    recordings: dict[str, list[ReferenceSegment]] = {}
    for number, (data, text) in enumerate(zip(rows, texts, strict=True), 1):
        try:
            found = check({**data, **text} if isinstance(data, dict) else data, ReferenceColumns)
        except FieldError as error:
            raise ValueError(f"{path}, segment {number}: {error.field}: {error.message}") from error
        segment = ReferenceSegment(1000 * found.offset, 1000 * found.duration, found.reference.strip())
        recordings.setdefault(found.wav, []).append(segment)
    return {name: tuple(sorted(segments, key=lambda s: s.start)) for name, segments in recordings.items()}


def match_segments(instances: Sequence[Instance], recordings: Recordings) -> dict[int, tuple[ReferenceSegment, ...]]:
    """Return the segments of each instance by its index; the recording is found by its path, file name or stem.

    Raises ValueError for an instance without segments, and for segments without an instance.
    """
    used: dict[str, int] = {}
    keys: tuple[Callable[[str], str], ...] = (str, lambda name: Path(name).name, lambda name: Path(name).stem)
    for instance in instances:
        source = instance.source if isinstance(instance.source, str) else "".join(instance.source[:1])
        where = f"instance {instance.index}: source"
        name = next((n for key in keys for n in recordings if key(n) == key(source)), None)
        if name is None:
            known = ", ".join(sorted(recordings))
            raise ValueError(f"{where}: no segments for {source!r}; the segmentation has {known}")
        if name in used:
            raise ValueError(f"{where}: {source!r} is also that of instance {used[name]}")
        used[name] = instance.index
    if unused := sorted(recordings.keys() - used):
        raise ValueError(f"the log has no output for {', '.join(unused)}; leave out their segments or translate them")
    return {index: recordings[name] for name, index in used.items()}

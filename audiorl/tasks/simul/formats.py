"""Streams in files: our own JSON lines, RealSI, MuST-C and IWSLT, sentence pairs with or without word timings.

    loaded = read_streams("streams.jsonl")                                  # languages stand in the rows
    loaded = read_streams("tst-COMMON/txt/tst-COMMON.yaml", source_language="en", target_language="es")
    write_streams("folder", loaded.samples)                                 # folder/streams.jsonl, folder/audio/*.flac

The format is detected from the content; docs/reference/data.md has the fields. Audio of any rate and number of channels
is read, channels averaged (`audiorl.audio`).
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import soundfile
from msgspec import Meta, Struct, structs

from audiorl.audio import AudioClip, AudioError, load_clip, probe
from audiorl.audio import seconds as clip_seconds
from audiorl.data.formats import ENDS, Style, audio_field, clip_of
from audiorl.data.manifest import Loaded, Origin
from audiorl.data.rows import BadRow, Row, of_macos, read_rows
from audiorl.data.schema import FieldError, check, check_limit, parse_json
from audiorl.data.schema.manifests import AudioColumns
from audiorl.data.schema.types import AnyText, Channel, Id, Language, Object, Seconds, Text
from audiorl.tasks.simul.streams import Stream, Unit, split_stream
from audiorl.tasks.simul.talks import ParsedStream, StreamDefaults, is_realsi, mustc, realsi

SILENT = 1e-4
"""A stream whose greatest sample stays below this (-80 dB relative to full scale) holds no speech."""


class TargetAudio(Struct):
    """A recording of a unit's translation."""

    path: Text
    start: Seconds = 0.0
    duration: Seconds | None = None
    channel: Channel | None = None


class UnitColumns(Struct):
    start: Seconds
    end: Seconds
    target: AnyText
    source: AnyText | None = None
    target_seconds: Seconds | None = None
    target_audio: TargetAudio | None = None
    speaker: AnyText | None = None


class Word(Struct):
    """A spoken word, `start` and `end` in seconds."""

    word: AnyText
    start: Seconds
    end: Seconds


AnyUnit = Annotated[UnitColumns, Meta(description="an object; give {start, end, source, target}")]


class StreamColumns(Struct):
    """A stream with its units, or a sentence pair."""

    id: Id | None = None
    units: Annotated[list[AnyUnit], Meta(description="a list; give [{start, end, source, target}, …]")] | None = None
    source: AnyText | None = None
    target: AnyText | None = None
    words: Annotated[list[Word], Meta(description="a list of words; give [{word, start, end}, …]")] | None = None
    source_language: Language | None = None
    target_language: Language | None = None
    seconds: Seconds | None = None
    duration: Seconds | None = None
    metadata: Object | None = None


_FIELDS = {*StreamColumns.__struct_fields__, *AudioColumns.__struct_fields__} - {*ENDS}
_CLAUSE = re.compile(r"""(?<=[,;:.!?…،؛؟۔।])["'”’»)\]]*\s+|(?<=[，、；：。！？])["”’」』）]*\s*""")


def clauses(text: str) -> list[str]:
    """Return the clauses of a text with their punctuation; marks without a letter join the clause before or after.

    A clause ends at one of `, ; : . ! ? …` (or its Chinese, Japanese, Arabic or Devanagari form) before a space, a
    closing quote or the end of the text; full-width marks need no space.

    >>> clauses("Wait, 3.5 minutes: please hold…")
    ['Wait,', '3.5 minutes:', 'please hold…']
    """
    out: list[str] = []
    begin = at = 0
    for end in [*(match.end() for match in _CLAUSE.finditer(text)), len(text)]:
        piece = text[at:end].strip()
        if piece and out and not (_letters(piece) and _letters(out[-1])):
            out[-1] = text[begin:end].strip()
        elif piece:
            out.append(piece)
            begin = at
        at = end
    return out


def align_clauses(source: str, target: str, words: Sequence[Word]) -> tuple[Unit, ...]:
    """Return the units of a sentence pair: pairs of clauses where both sides have equally many, else the whole pair.

    The n-th clauses form a unit, from the start of its first word to the end of its last. No word alignment is needed,
    and no unit ends before its source as long as the translation keeps the order of the clauses.

    Raises ValueError for words that are not those of `source`, that end before they start or are not in order.
    """
    begun = 0.0
    for word in words:
        if word.end < word.start:
            raise ValueError(f"the word {word.word!r} ends at {word.end:g} s, before it starts at {word.start:g} s")
        if word.start < begun:
            raise ValueError(f"the word {word.word!r} starts at {word.start:g} s, before the previous one; sort them")
        begun = word.start
    sources, targets = clauses(source), clauses(target)
    if len(sources) != len(targets):
        sources, targets = [source.strip()], [target.strip()]
    spans, k = list[tuple[float, float]](), 0
    for clause in sources:
        first, letters, wanted = k, "", _letters(clause)
        while k < len(words) and len(letters) < len(wanted):
            letters += _letters(words[k].word)
            k += 1
        if letters != wanted or k == first:
            text = " ".join(w.word.strip() for w in words[first:k]) or "nothing"
            raise ValueError(f"the words {text!r} stand where the source has {clause!r}; give the words of the source")
        while k < len(words) and not _letters(words[k].word):
            k += 1
        spans.append((words[first].start, words[k - 1].end))
    if k < len(words):
        raise ValueError(f"the word {words[k].word!r} follows after the source has ended; give the words of the source")
    return tuple(Unit(a, b, t, s) for (a, b), s, t in zip(spans, sources, targets, strict=True))


def _letters(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def read_streams(
    path: str | Path,
    *,
    source_language: str = "",
    target_language: str = "",
    audio_root: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    check_audio: bool = True,
    max_seconds: float | None = None,
    limit: int | None = None,
) -> Loaded[Stream]:
    """Return the first `limit` streams of a file, or of a folder with streams.jsonl, one .yaml or RealSI's .json files.

    source_language, target_language: ISO codes, for files that do not name them; a row that names others is unusable.
    audio_root: where relative audio paths start, by default the file's folder. on_error: stop at the first unusable
    row, or skip its stream, count it and list it. check_audio: decode the audio now; a stream whose audio is broken,
    silent, shorter than 0.1 s or than its units, or not of the declared length and rate is unusable. Otherwise nothing
    is opened and the length is what the file claims. max_seconds: longer streams are cut where units begin.

    Raises ValueError naming file, row and field. A file that cannot be read at all raises whatever on_error says.
    """
    path = Path(path)
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"max_seconds must be positive, got {max_seconds}")
    check_limit(limit)
    if audio_root is not None and not Path(audio_root).is_dir():
        raise ValueError(f"audio_root {audio_root}: no such folder")
    defaults = StreamDefaults(source_language, target_language, None if audio_root is None else Path(audio_root))
    streams: list[Stream] = []
    rows: list[Origin] = []
    skipped: list[BadRow] = []
    by_id: dict[str, ParsedStream] = {}
    for parsed in (parsed for file in _files(path) for parsed in _parse_file(file, defaults)):
        if limit is not None and len(streams) >= limit:
            break
        try:
            if not isinstance(parsed, BadRow):
                stream = _stream(parsed, by_id, check_audio)
                by_id[stream.id] = parsed
                parts = [stream] if max_seconds is None else split_stream(stream, max_seconds)
                streams += parts
                columns, texts = (parsed.field, parsed.units_field), ("", "\n".join(u.target for u in stream.units))
                rows += [Origin(parsed.file, parsed.row, columns, texts)] * len(parts)
                continue
        except FieldError as error:
            parsed = BadRow(parsed.file, parsed.row, error.field, error.message)
        if on_error == "raise":
            raise ValueError(str(parsed))
        skipped.append(parsed)
    return Loaded(tuple(streams[:limit]), tuple(skipped), str(path), {}, tuple(rows[:limit]))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{path}: missing; check the path")
    if not path.is_dir():
        return [path]
    if (path / "streams.jsonl").exists():
        return [path / "streams.jsonl"]
    found = {end: [f for f in sorted(path.glob(f"*{end}")) if not of_macos(f)] for end in (".yaml", ".json")}
    files = found[".yaml"] or found[".json"]
    if not files or (files[0].suffix == ".yaml" and len(files) > 1):
        held = ", ".join(f.name for f in files) or "none of them"
        raise ValueError(f"{path}: give a folder with streams.jsonl, one .yaml or RealSI's .json; it holds {held}")
    return files


def _parse_file(path: Path, defaults: StreamDefaults) -> Iterator[ParsedStream | BadRow]:
    if path.suffix in (".yaml", ".yml"):
        yield from mustc(path, defaults)
        return
    try:
        document = parse_json(path.read_bytes()) if path.suffix == ".json" else None
    except ValueError:  # JSON lines
        document = None
    if is_realsi(document):
        yield from realsi(path, document, defaults)
        return
    for row in read_rows(path):
        try:
            yield row if isinstance(row, BadRow) else _parse_row(row, defaults)
        except FieldError as error:
            assert isinstance(row, Row)
            yield BadRow.of(row, error)


def _parse_row(row: Row, defaults: StreamDefaults) -> ParsedStream:
    data = row.data
    if "units" not in data and not {"source", "target"} <= data.keys():
        others = f"or source and target, or a RealSI or MuST-C file (the columns are {', '.join(data)})"
        raise FieldError("units", f"missing; give units, {others}")
    columns = check(data, StreamColumns)
    root = defaults.root if defaults.root is not None else Path(row.file).parent
    field = audio_field(row)
    name = data[field] if isinstance(data.get(field), str) else Path(row.file).stem
    return ParsedStream(
        row.file,
        row.number,
        field,
        f"{name}:{row.number}" if columns.id is None else str(columns.id).strip(),
        clip_of(row, Style(root), field),
        tuple(_unit(unit, root) for unit in columns.units or ()) if "units" in data else _pair(columns),
        columns.duration if columns.seconds is None else columns.seconds,
        defaults.language(columns.source_language, "source_language"),
        defaults.language(columns.target_language, "target_language"),
        {**(columns.metadata or {}), **{k: v for k, v in data.items() if k not in _FIELDS and v is not None}},
        "units" if "units" in data else "words",
        "duration" if columns.seconds is None else "seconds",
    )


def _unit(unit: UnitColumns, root: Path) -> Unit:
    held = unit.target_audio  # not opened
    clip = None if held is None else AudioClip(**{**structs.asdict(held), "path": str(root / held.path)})
    source, target, speaker = ((text or "").strip() for text in (unit.source, unit.target, unit.speaker))
    seconds = held.duration if held is not None and unit.target_seconds is None else unit.target_seconds
    return Unit(unit.start, unit.end, target, source, seconds, clip, speaker)


def _pair(columns: StreamColumns) -> tuple[Unit, ...] | Unit:
    """Return the units of a sentence pair; one without times stands for the whole clip."""
    source, target = (columns.source or "").strip(), (columns.target or "").strip()
    for field, value in (("source", source), ("target", target)):
        if not value:
            raise FieldError(field, f"missing or empty; give the {field} text")
    if not columns.words:
        return Unit(0.0, 0.0, target, source)
    try:
        return align_clauses(source, target, columns.words)
    except ValueError as error:
        raise FieldError("words", str(error)) from error


def _stream(parsed: ParsedStream, by_id: dict[str, ParsedStream], check_audio: bool) -> Stream:
    """Return a usable stream; `by_id`: those before."""
    if other := by_id.get(parsed.id):
        raise FieldError("id", f"{parsed.id!r} also names row {other.row} of {other.file}; give every stream its own")
    seconds = _measured_seconds(parsed) if check_audio else _claimed_seconds(parsed)
    if parsed.seconds is not None and abs(parsed.seconds - seconds) > parsed.tolerance:
        declared = f"{parsed.seconds:g} s declared, but the audio has {seconds:.2f} s"
        raise FieldError(parsed.seconds_field, f"{declared}; correct it, or leave it out")
    units = (replace(parsed.units, end=seconds),) if isinstance(parsed.units, Unit) else parsed.units
    if check_audio:
        units = tuple(_timed(unit, f"{parsed.units_field}[{k}].target_audio") for k, unit in enumerate(units))
    languages = parsed.source_language, parsed.target_language
    try:
        return Stream(parsed.id, parsed.clip, seconds, units, *languages, parsed.metadata)
    except ValueError as error:
        raise FieldError(parsed.units_field if units and seconds >= 0.1 else parsed.field, str(error)) from error


def _timed(unit: Unit, field: str) -> Unit:
    """Return the unit with the duration of its spoken translation, from the recording's header where none is given."""
    if unit.target_audio is None or unit.target_seconds is not None:
        return unit
    try:
        return replace(unit, target_seconds=clip_seconds(unit.target_audio))
    except AudioError as error:
        raise FieldError(field, str(error)) from error


def _measured_seconds(parsed: ParsedStream) -> float:
    """Return the duration of the audio, which is decoded completely."""
    try:
        rate = probe(parsed.clip).sample_rate
        wav = load_clip(parsed.clip, rate, max_seconds=float("inf"))
    except AudioError as error:
        raise FieldError(parsed.field, str(error)) from error
    if parsed.units and np.abs(wav).max() < SILENT:
        raise FieldError(parsed.field, f"{len(wav) / rate:.1f} s of silence, yet with units; name the right recording")
    return len(wav) / rate


def _claimed_seconds(parsed: ParsedStream) -> float:
    if parsed.clip.array is not None:
        return len(parsed.clip.array) / float(parsed.clip.sample_rate or 1)
    end = 0.0 if isinstance(parsed.units, Unit) else max((u.end for u in parsed.units), default=0.0)
    if parsed.seconds is None:
        if not end:
            raise FieldError("seconds", "missing; give the audio's length in seconds, or let check_audio measure it")
        return end
    return max(end, parsed.seconds) if end <= parsed.seconds + parsed.tolerance else parsed.seconds


def write_streams(
    folder: str | Path, streams: Iterable[Stream], suffix: Literal[".flac", ".wav"] = ".flac"
) -> list[Stream]:
    """Write folder/streams.jsonl, which `read_streams` reads back. Returns the streams with their audio by path.

    Audio in memory becomes 16-bit files in folder/audio at its own rate; files are referred to where they are, by a
    path from the folder. Raises ValueError for two streams of one id, before streams.jsonl is touched.
    """
    folder = Path(folder)
    lines: list[str] = []
    out: list[Stream] = []
    names: dict[str, str] = {}
    for stream in streams:
        name = re.sub(r"[^\w.@+-]+", "_", stream.id)
        if name in names:
            raise ValueError(f"{folder}: streams {names[name]!r} and {stream.id!r} would share audio/{name}{suffix}")
        names[name] = stream.id
        place = folder / "audio" / name
        clips = [(k, unit.target_audio) for k, unit in enumerate(stream.units, 1)]
        said = [clip and _in_file(clip, f"{place}.unit{k}{suffix}") for k, clip in clips]
        units = tuple(replace(u, target_audio=clip) for u, clip in zip(stream.units, said, strict=True))
        stream = replace(stream, audio=_in_file(stream.audio, f"{place}{suffix}"), units=units)
        out.append(stream)
        lines.append(json.dumps(_as_row(stream, folder), ensure_ascii=False) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "streams.jsonl").write_text("".join(lines), encoding="utf-8")
    return out


def _in_file(clip: AudioClip, path: str) -> AudioClip:
    """Return the clip of a file; audio in memory is written to `path`."""
    if clip.path is not None:
        return clip
    rate = clip.sample_rate or probe(clip).sample_rate
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, load_clip(clip, rate, max_seconds=float("inf")), rate, subtype="PCM_16")
    return AudioClip(path=path)


def _as_row(stream: Stream, folder: Path) -> dict[str, Any]:
    def part(clip: AudioClip, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {name: Path(os.path.relpath(str(clip.path), folder)).as_posix()}
        return row | clip.part

    units: list[dict[str, Any]] = []
    for unit in stream.units:
        units.append({"start": unit.start, "end": unit.end, "source": unit.source, "target": unit.target})
        if unit.target_seconds is not None:
            units[-1]["target_seconds"] = unit.target_seconds
        if unit.target_audio is not None:
            units[-1]["target_audio"] = part(unit.target_audio, "path")
        if unit.speaker:
            units[-1]["speaker"] = unit.speaker
    row = {"id": stream.id, **part(stream.audio, "audio")}
    if stream.audio.sample_rate is not None:
        row["sample_rate"] = stream.audio.sample_rate
    row |= {"seconds": stream.seconds, "source_language": stream.source_language}
    row |= {"target_language": stream.target_language, "units": units}
    return row | ({"metadata": dict(stream.metadata)} if stream.metadata else {})

"""MuST-C and the IWSLT sets: a YAML list of segments, and a text file a language with one line a segment.

    data/tst-COMMON/txt/tst-COMMON.yaml      - {duration: 3.5, offset: 16.08, speaker_id: spk.767, wav: ted_767.wav}
    data/tst-COMMON/txt/tst-COMMON.en        Back in New York, I am the head of development for a non-profit …
    data/tst-COMMON/txt/tst-COMMON.es        En Nueva York, soy jefe de desarrollo de una ONG …
    data/tst-COMMON/wav/ted_767.wav

The segments of one wav are one stream, in the order of the file. Without a source text the units have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from audiorl.audio import AudioClip
from audiorl.data.rows import BadRow
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.streams import MuSTCRecording, MuSTCSegment
from audiorl.tasks.simul.parsed import ParsedStream, StreamDefaults, UnitError, resolve_overlaps
from audiorl.tasks.simul.streams import Unit
from audiorl.tasks.simul.yaml_text import load_yaml


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
        yield _talk(path, wav, members, segments, source, target, defaults)


def _talk(
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
            AudioClip(path=str(_audio(path, wav, defaults.root))),
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
    """The lines of the list's text file in a language; a line that is not UTF-8 is an error of its segment."""
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


def _audio(path: Path, wav: str, root: Path | None) -> Path:
    folders = [root] if root is not None else [path.parent, path.parent / "wav", path.parent.parent / "wav"]
    return next((p for folder in folders if (p := folder / wav).is_file()), folders[0] / wav)

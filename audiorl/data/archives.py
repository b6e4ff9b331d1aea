"""WebDataset's tar files, lhotse's cuts, and lhotse's Shar folders.

    webdataset    x.tar: the members KEY.flac, KEY.json, KEY.txt … make the row KEY
    lhotse        cuts.jsonl or cuts.jsonl.gz: one cut a line
    shar          a folder of cuts.000000.jsonl.gz and recording.000000.tar, as lhotse's SharWriter makes them

Audio inside tar files is stored in a folder (`audiorl.data.stored`), one recording in memory at a time.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from audiorl.data.folders import AUDIO_SUFFIXES
from audiorl.data.published import AnyRow
from audiorl.data.rows import BadRow, Row, read_rows
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.manifests import Cut
from audiorl.data.stored import stored

SOUNDS = (*AUDIO_SUFFIXES, ".m4a", ".webm", ".aac")
MAX_TEXT = 2**20
"""Bytes of a member that may be a column."""


def webdataset_rows(path: Path) -> Iterator[Row | BadRow]:
    """A row for each key of a tar file: KEY.json gives columns, KEY.txt the transcript, the audio file `audio`.

    Any other member becomes the column of its suffix where it is UTF-8 text of at most a MiB, else the row is refused.
    Members of one key stand side by side, as WebDataset wants them. Raises ValueError for a broken archive.
    """
    number, key, data, fault = 0, None, dict[str, Any](), None
    for member, content in _members(path):
        name = PurePosixPath(member)
        first, _, suffix = name.name.partition(".")
        stem = str(name.parent / first)
        if key is not None and stem != key:
            yield _finished(path, number, data, fault)
        if stem != key:
            number, key, data, fault = number + 1, stem, {"id": stem}, None
        try:
            data |= _columns(f".{suffix}".lower(), content)
        except FieldError as error:
            fault = fault or error
    if key is None:
        raise ValueError(f"{path}: holds no files; write KEY.flac with KEY.txt or KEY.json")
    yield _finished(path, number, data, fault)


def _finished(path: Path, number: int, data: dict[str, Any], fault: FieldError | None) -> Row | BadRow:
    if fault is None and "audio" not in data:
        fault = FieldError("audio", f"no audio file for {data['id']!r}; name one of {', '.join(SOUNDS)} after its key")
    return Row(str(path), number, data) if fault is None else BadRow(str(path), number, fault.field, fault.message)


def _columns(suffix: str, content: bytes) -> dict[str, Any]:
    """What a member adds to its row."""
    if suffix in SOUNDS:
        return {"audio": str(stored(content, suffix))}
    field = suffix.removeprefix(".")
    if len(content) > MAX_TEXT:
        raise FieldError(field, f"{len(content)} bytes are no column; leave such members out of the archive")
    try:
        if suffix == ".json":
            value = parse_json(content)
            if not isinstance(value, dict):
                raise FieldError("json", f"a JSON {type(value).__name__}, not an object; write {{…}}")
            return {name: entry for name, entry in value.items() if name not in ("id", "audio")}
        return {"text" if suffix == ".txt" else field: content.decode("utf-8").strip()}
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, f"not readable ({error}); save it as UTF-8") from error


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the regular files of a tar, one at a time."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path}: broken or no tar archive ({error}); copy or download it again") from error


# -- lhotse ------------------------------------------------------------------------------------------------------------


def is_cut(row: Row) -> bool:
    return {"recording", "supervisions"} <= row.data.keys()


def is_shar(folder: Path) -> bool:
    return next(folder.glob("cuts.*.jsonl*"), None) is not None


def cut_rows(rows: Iterator[AnyRow]) -> Iterator[AnyRow]:
    """Cuts as rows of an `asr` manifest: the audio of the cut, the texts of its supervisions in their order."""
    for row in rows:
        if not isinstance(row, Row):
            yield row
            continue
        try:
            yield Row(row.file, row.number, cut_columns(row.data))
        except FieldError as error:
            yield BadRow(row.file, row.number, error.field, error.message)


def shar_rows(folder: Path) -> Iterator[Row | BadRow]:
    """The cuts of a Shar folder with their recordings. Raises ValueError for a shard without its recordings."""
    for cuts in sorted(folder.glob("cuts.*.jsonl*")):
        tar = folder / f"recording.{cuts.name.split('.')[1]}.tar"
        if not tar.is_file():
            raise ValueError(f"{tar}: missing; {cuts.name} needs its recordings")
        sounds = (
            (PurePosixPath(name).stem, stored(content, PurePosixPath(name).suffix))
            for name, content in _members(tar)
            if PurePosixPath(name).suffix in SOUNDS
        )
        for row in read_rows(cuts):
            key, path = next(sounds, (None, None))
            if isinstance(row, BadRow):
                yield row
                continue
            if key != row.data.get("id"):
                message = f"{row.data.get('id')!r}, but the next recording of {tar.name} is of {key!r}; write it again"
                yield BadRow(row.file, row.number, "id", message)
                return
            try:
                yield Row(row.file, row.number, cut_columns(row.data, str(path)))
            except FieldError as error:
                yield BadRow(row.file, row.number, error.field, error.message)


def cut_columns(data: Mapping[str, Any], recording: str | None = None) -> dict[str, Any]:
    """The columns of an `asr` manifest for a cut; `recording`: where its audio is, if the cut does not say it."""
    cut = check(data, Cut)
    if cut.type != "MonoCut":
        raise FieldError("type", f"{cut.type!r}; one recording a row is read, a MonoCut")
    if recording is None:
        (source, *more) = cut.recording.sources
        if more or source.type != "file":
            raise FieldError(
                "recording.sources", f"of type {source.type!r}; only one file is read: save the audio with the cuts"
            )
        recording = source.source
    columns = {
        "id": cut.id,
        "audio": recording,
        "start": cut.start,
        "duration": cut.duration,
        "text": " ".join(s.text.strip() for s in sorted(cut.supervisions, key=lambda s: s.start) if s.text.strip()),
    }
    for name in ("language", "speaker"):
        values = {value for s in cut.supervisions if (value := getattr(s, name))}
        columns |= {name: values.pop()} if len(values) == 1 else {}
    return columns | {name: value for name, value in (cut.custom or {}).items() if name not in columns}

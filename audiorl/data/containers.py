"""Corpora that are not one row a sample: folders, archives and cuts become the rows of an `asr` manifest.

    librispeech   a folder with *.trans.txt files and the audio next to them
    wenetspeech   one .json object: {"audios": [{"path", "segments": [{"sid", "begin_time", "end_time", "text", …}]}]}
    kaldi         a folder with wav.scp, text, and where they are segments, utt2spk, utt2lang
    webdataset    x.tar: the members KEY.flac, KEY.json, KEY.txt … make the row KEY
    lhotse        cuts.jsonl or cuts.jsonl.gz: one cut a line
    shar          a folder of cuts.000000.jsonl.gz and recording.000000.tar, as lhotse's SharWriter makes them

Audio inside tar files is stored in a folder (`audiorl.data.rows.stored`), one recording in memory at a time.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from audiorl.data.rows import AnyRow, BadRow, Row, check_unpacked, converted, read_rows, stored
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.manifests import Cut, WenetSpeechRecording, WenetSpeechSegment

AUDIO_SUFFIXES = (".flac", ".wav", ".opus", ".ogg", ".mp3")
SOUNDS = (*AUDIO_SUFFIXES, ".m4a", ".webm", ".aac")
MAX_MEMBER = 2**32
"""Bytes of a member: those that a WAV file can have."""
MAX_TEXT = 2**20
"""Bytes of a member that may be a column."""


def librispeech_rows(folder: Path) -> Iterator[AnyRow]:
    """Yield the lines `ID TRANSCRIPT` of every *.trans.txt below `folder`, sorted, with ID.flac of the same folder.

    `speaker` is the first number of IDs such as 1272-128104-0000 (reader, chapter, utterance).
    """
    for transcripts in sorted(folder.rglob("*.trans.txt")):
        for number, line in enumerate(transcripts.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                key, _, text = line.decode("utf-8").strip().partition(" ")
            except UnicodeDecodeError as error:
                yield BadRow(str(transcripts), number, "", f"not UTF-8 ({error.reason}); save the file as UTF-8")
                continue
            files = (transcripts.parent / f"{key}{suffix}" for suffix in AUDIO_SUFFIXES)
            audio = next((file for file in files if file.exists()), None)
            if not text.strip():
                yield BadRow(str(transcripts), number, "text", "no transcript after the id; write `ID WORDS`")
            elif audio is None:
                message = f"no {key}.flac (or {', '.join(AUDIO_SUFFIXES[1:])}) next to this file; download it again"
                yield BadRow(str(transcripts), number, "audio", message)
            else:
                data = {"id": key, "audio": str(audio.absolute()), "text": text.strip(), "language": "en"}
                reader, *rest = key.split("-")
                yield Row(str(transcripts), number, data | ({"speaker": reader} if len(rest) == 2 else {}))


def wenetspeech_rows(path: Path, document: Any) -> Iterator[AnyRow]:
    """Yield the segments of a WenetSpeech file, counted over all recordings from 1. Raises ValueError without any."""
    if not document["audios"]:
        raise ValueError(f"{path}: field 'audios': empty; give the recordings with their segments")
    number = 1
    for audio in document["audios"]:
        try:
            recording = check(audio, WenetSpeechRecording)
        except FieldError as error:
            yield BadRow(str(path), number, error.field, error.message)
            number += 1
            continue
        for index, data in enumerate(recording.segments):
            try:
                segment = check(data, WenetSpeechSegment)
                begin, end = segment.begin_time, segment.end_time
                if end <= begin:
                    message = f"{end} does not lie after begin_time {begin}; correct the times"
                    raise FieldError("end_time", message)
                rest = {k: value for k, value in data.items() if k not in ("sid", "begin_time", "end_time")}
                id = segment.sid or f"{recording.aid or recording.path}_{index}"
                part = {"audio": recording.path, "offset": begin, "duration": round(end - begin, 6)}
                yield Row(str(path), number, {"language": "zh", **rest, "id": id, **part})
            except FieldError as error:
                yield BadRow(str(path), number, error.field, error.message)
            number += 1


# -- Kaldi -------------------------------------------------------------------------------------------------------------


def is_kaldi(folder: Path) -> bool:
    return (folder / "wav.scp").is_file()


def kaldi_rows(folder: Path) -> Iterator[AnyRow]:
    """Yield a row for each utterance of `text`, with its recording or its segment of one.

    A recording must be a file: commands that end with `|` are not run, and archives (`x.ark:123`) are not read. Raises
    ValueError where `text` is missing, and for a file that is not UTF-8.
    """
    if not (folder / "text").is_file():
        raise ValueError(f"{folder}: wav.scp but no text; give the transcripts, one `UTTERANCE WORDS` a line")
    recordings, segments, speakers, languages = (
        {key: (number, value) for number, key, value in _kaldi_table(folder / name)}
        for name in ("wav.scp", "segments", "utt2spk", "utt2lang")
    )

    def columns(data: Mapping[str, Any]) -> dict[str, Any]:
        utterance = recording = data["id"]
        part = {}
        if segments:
            if utterance not in segments:
                raise FieldError("segments", f"no line for {utterance!r}; write `{utterance} RECORDING START END`")
            number, value = segments[utterance]
            try:
                recording, start, end = value.split()[0], float(value.split()[1]), float(value.split()[2])
            except (IndexError, ValueError):
                message = f"line {number}: {value!r} is not `RECORDING START END` in seconds"
                raise FieldError("segments", message) from None
            if not 0 <= start < end < 1e9:
                message = f"line {number}: from {start:g} to {end:g} s; the end must lie after the start"
                raise FieldError("segments", message)
            part = {"start": start, "duration": round(end - start, 6)}
        if recording not in recordings:
            raise FieldError("wav.scp", f"no line for {recording!r}; write `{recording} FILE`")
        number, value = recordings[recording]
        if value.endswith("|"):
            message = f"line {number}: a command, which is not run; convert its output and name the file"
            raise FieldError("wav.scp", message)
        head, colon, offset = value.rpartition(":")
        if colon and offset.isdecimal() and head.endswith((".ark", ".scp")):
            raise FieldError("wav.scp", f"line {number}: a part of the archive {head}; write the recordings as files")
        known = {"speaker": speakers.get(utterance), "language": languages.get(utterance)}
        audio = str((folder / value).absolute())
        return {**data, **part, "audio": audio, **{name: entry[1] for name, entry in known.items() if entry}}

    lines = _kaldi_table(folder / "text")
    rows = (Row(str(folder / "text"), number, {"id": key, "text": text}) for number, key, text in lines)
    yield from converted(rows, columns)


def _kaldi_table(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, key, rest) of a Kaldi table; nothing for a file that is not there."""
    if not path.is_file():
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            key, _, rest = line.strip().partition(" ")
            yield number, key, rest.strip()


# -- tar archives ------------------------------------------------------------------------------------------------------


def webdataset_rows(path: Path) -> Iterator[AnyRow]:
    """Yield a row for each key of a tar file: KEY.json gives columns, KEY.txt the transcript, the audio file `audio`.

    Any other member becomes the column of its suffix where it is UTF-8 text of at most a MiB, else the row is refused.
    Members of one key stand side by side, as WebDataset wants them. Raises ValueError for a broken archive.
    """
    number, key, data, fault = 0, None, dict[str, Any](), None

    def finished() -> AnyRow:
        missing = f"no audio file for {data['id']!r}; name one of {', '.join(SOUNDS)} after its key"
        error = fault or (None if "audio" in data else FieldError("audio", missing))
        row = Row(str(path), number, data)
        return row if error is None else BadRow.of(row, error)

    for member, content in _members(path):
        name = PurePosixPath(member)
        first, _, suffix = name.name.partition(".")
        stem = str(name.parent / first)
        if stem != key:
            if key is not None:
                yield finished()
            number, key, data, fault = number + 1, stem, {"id": stem}, None
        try:
            data |= _member_columns(f".{suffix}".lower(), content)
        except FieldError as error:
            fault = fault or error
    if key is None:
        raise ValueError(f"{path}: holds no files; write KEY.flac with KEY.txt or KEY.json")
    yield finished()


def _member_columns(suffix: str, content: bytes) -> dict[str, Any]:
    """Return what a member adds to its row."""
    if suffix in SOUNDS:
        return {"audio": str(stored(content, suffix))}
    field = suffix.removeprefix(".")
    if len(content) > MAX_TEXT:
        raise FieldError(field, f"{len(content)} bytes are no column; leave such members out of the archive")
    try:
        if suffix != ".json":
            return {"text" if suffix == ".txt" else field: content.decode("utf-8").strip()}
        value = parse_json(content)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, f"not readable ({error}); save it as UTF-8") from error
    if not isinstance(value, dict):
        raise FieldError("json", f"a JSON {type(value).__name__}, not an object; write {{…}}")
    return {name: entry for name, entry in value.items() if name not in ("id", "audio")}


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the regular files of a tar, one at a time. Raises ValueError for a broken or huge one."""
    total = 0
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                total += member.size  # as it says itself, holes of sparse files included: before anything is read
                check_unpacked(path, total)
                if member.size > MAX_MEMBER:
                    raise ValueError(f"{path}: {member.name} has {member.size:,} bytes, at most {MAX_MEMBER:,}; cut it")
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


def shar_rows(folder: Path) -> Iterator[AnyRow]:
    """Yield the cuts of a Shar folder with their recordings. Raises ValueError for a shard without its recordings."""
    for cuts in sorted(folder.glob("cuts.*.jsonl*")):
        tar = folder / f"recording.{cuts.name.split('.')[1]}.tar"
        if not tar.is_file():
            raise ValueError(f"{tar}: missing; {cuts.name} needs its recordings")
        members = ((PurePosixPath(name), content) for name, content in _members(tar))
        sounds = ((name.stem, stored(content, name.suffix)) for name, content in members if name.suffix in SOUNDS)
        for row in read_rows(cuts):
            key, path = next(sounds, (None, None))
            if isinstance(row, Row) and key != row.data.get("id"):
                message = f"{row.data.get('id')!r}, but the next recording of {tar.name} is of {key!r}; write it again"
                yield BadRow(row.file, row.number, "id", message)
                return
            yield from converted([row], lambda data, path=path: cut_columns(data, str(path)))  # type: ignore[misc]


def cut_columns(data: Mapping[str, Any], recording: str | None = None) -> dict[str, Any]:
    """Return the columns of an `asr` manifest for a cut, with the texts of its supervisions in their order.

    recording: where its audio is, if the cut does not say it.
    """
    cut = check(data, Cut)
    if cut.type != "MonoCut":
        raise FieldError("type", f"{cut.type!r}; one recording a row is read, a MonoCut")
    if recording is None:
        (source, *more) = cut.recording.sources
        if more or source.type != "file":
            message = f"of type {source.type!r}; only one file is read: save the audio with the cuts"
            raise FieldError("recording.sources", message)
        recording = source.source
    said = sorted(cut.supervisions, key=lambda s: s.start)
    text = " ".join(s.text.strip() for s in said if s.text.strip())
    columns = {"id": cut.id, "audio": recording, "start": cut.start, "duration": cut.duration, "text": text}
    languages, speakers = {s.language for s in said if s.language}, {s.speaker for s in said if s.speaker}
    for name, values in (("language", languages), ("speaker", speakers)):
        columns |= {name: values.pop()} if len(values) == 1 else {}
    return columns | {name: value for name, value in (cut.custom or {}).items() if name not in columns}

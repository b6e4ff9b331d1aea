"""Corpora that are not one row a sample: folders, archives and cuts become the rows of an `asr` manifest.

    librispeech   a folder with *.trans.txt files and the audio next to them
    wenetspeech   one .json object: {"audios": [{"path", "segments": [{"sid", "begin_time", "end_time", "text", …}]}]},
                  of another language than Chinese with "language" beside audios, as GigaSpeech has it
    kaldi         a folder with wav.scp, text, and where they are segments, reco2file_and_channel, utt2spk, utt2lang
    webdataset    x.tar: the members KEY.flac, KEY.json, KEY.txt … make the row KEY
    lhotse        cuts.jsonl or cuts.jsonl.gz: one cut a line
    shar          a folder of cuts.000000.jsonl.gz and recording.000000.tar, as lhotse's SharWriter makes them

Audio inside tar files is stored in a folder (`audiorl.data.rows.stored`), one recording in memory at a time.
"""

from __future__ import annotations

import itertools
import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from audiorl.audio import AUDIO_SUFFIXES, AudioClip, AudioError, probe
from audiorl.data.rows import (
    AnyRow,
    BadRow,
    Row,
    check_unpacked,
    converted,
    files_below,
    of_macos,
    read_rows,
    stored,
)
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.manifests import Cut, CutSource, CutSupervision, WenetSpeechRecording, WenetSpeechSegment

MAX_MEMBER = 2**32
"""Bytes of a member: those that a WAV file can have."""
MAX_TEXT = 2**20
"""Bytes of a member that may be a column."""


def librispeech_rows(folder: Path) -> Iterator[AnyRow]:
    """Yield the lines `ID TRANSCRIPT` of every *.trans.txt below `folder`, sorted, with ID.flac of the same folder.

    `speaker` is the first number of IDs such as 1272-128104-0000 (reader, chapter, utterance).
    """
    for transcripts in files_below(folder, ".trans.txt"):
        for number, line in enumerate(transcripts.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                key, text = _key_and_rest(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield BadRow(str(transcripts), number, "", f"not UTF-8 ({error.reason}); save the file as UTF-8")
                continue
            files = (transcripts.parent / f"{key}{suffix}" for suffix in AUDIO_SUFFIXES)
            audio = next((file for file in files if file.exists()), None)
            if not text:
                yield BadRow(str(transcripts), number, "text", "no transcript after the id; write `ID WORDS`")
            elif audio is None:
                message = f"no {key}.flac (or {', '.join(AUDIO_SUFFIXES[1:])}) next to this file; download it again"
                yield BadRow(str(transcripts), number, "audio", message)
            else:
                data = {"id": key, "audio": str(audio.absolute()), "text": text, "language": "en"}
                reader, *rest = key.split("-")
                yield Row(str(transcripts), number, data | ({"speaker": reader} if len(rest) == 2 else {}))


def wenetspeech_rows(path: Path, document: Any) -> Iterator[AnyRow]:
    """Yield the segments of a WenetSpeech file, counted over all recordings from 1. Raises ValueError without any.

    GigaSpeech has files of this shape, too, which name their `language`; WenetSpeech is Chinese.
    """
    if not document["audios"]:
        raise ValueError(f"{path}: field 'audios': empty; give the recordings with their segments")
    number, language = 1, document.get("language") or "zh"
    language = language.lower() if isinstance(language, str) else language
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
                yield Row(str(path), number, {"language": language, **rest, "id": id, **part})
            except FieldError as error:
                yield BadRow(str(path), number, error.field, error.message)
            number += 1


# -- Kaldi -------------------------------------------------------------------------------------------------------------


def is_kaldi(folder: Path) -> bool:
    return (folder / "wav.scp").is_file()


def kaldi_rows(folder: Path) -> Iterator[AnyRow]:
    """Yield a row for each utterance of `text`, with its recording or its segment of one.

    A recording must be a file: commands that end with `|` are not run, and archives (`x.ark:123`) are not read. The
    channel is the fifth column of `segments`, from 0, or that of reco2file_and_channel (A and B, or 1 and 2). Raises
    ValueError where `text` is missing, and for a file that is not UTF-8 or has a key twice.
    """
    if not (folder / "text").is_file():
        raise ValueError(f"{folder}: wav.scp but no text; give the transcripts, one `UTTERANCE WORDS` a line")
    recordings, segments, sides, speakers, languages = (
        {key: (number, value) for number, key, value in _kaldi_table(folder / name)}
        for name in ("wav.scp", "segments", "reco2file_and_channel", "utt2spk", "utt2lang")
    )
    from_zero = any(value.split()[-1:] == ["0"] for _, value in sides.values())

    def columns(data: Mapping[str, Any]) -> dict[str, Any]:
        utterance = recording = data["id"]
        part: dict[str, Any] = {}
        if segments:
            if utterance not in segments:
                raise FieldError("segments", f"no line for {utterance!r}; write `{utterance} RECORDING START END`")
            number, value = segments[utterance]
            try:
                recording, *times = value.split()
                start, end = float(times[0]), float(times[1])
                part = {"channel": int(times[2])} if len(times) == 3 else {}
                if len(times) > 3 or part.get("channel", 0) < 0:
                    raise ValueError
            except (IndexError, ValueError):
                message = (
                    f"line {number}: {value!r} is not `RECORDING START END [CHANNEL]`, seconds and a number from 0"
                )
                raise FieldError("segments", message) from None
            if not 0 <= start < (1e9 if end == -1 else end) <= 1e9:
                message = f"line {number}: from {start:g} to {end:g} s; the end must lie after the start"
                raise FieldError("segments", message)
            # In Kaldi -1 is the end of the recording.
            part |= {"start": start, "duration": None if end == -1 else round(end - start, 6)}
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
        if recording in sides and "channel" not in part:
            part["channel"] = _side(*sides[recording], from_zero, audio)
        return {**data, **part, "audio": audio, **{name: entry[1] for name, entry in known.items() if entry}}

    lines = _kaldi_table(folder / "text")
    rows = (Row(str(folder / "text"), number, {"id": key, "text": text}) for number, key, text in lines)
    yield from converted(rows, columns)


def _side(number: int, value: str, from_zero: bool, audio: str) -> int | None:
    """Return the channel from 0 that a line of reco2file_and_channel names; None for a file of one channel.

    Sides are taken out of stereo files for training, and keep their letter for scoring.
    """
    name = value.split()[-1] if value else ""
    if re.fullmatch("[A-Za-z]", name):
        channel = ord(name.upper()) - ord("A")
    elif re.fullmatch("[0-9]{1,3}", name):
        channel = int(name) - (not from_zero)
    else:
        message = f"line {number}: {name!r} is no channel; write A or B, or a number from 1"
        raise FieldError("reco2file_and_channel", message)
    try:
        return None if channel and probe(AudioClip(path=audio)).channels == 1 else channel
    except AudioError:
        return channel  # the row's audio is refused where it is opened


def _kaldi_table(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, key, rest) of a Kaldi table; nothing for a file that is not there. Raises ValueError for a key twice."""
    if not path.is_file():
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        key, rest = _key_and_rest(line)
        if key in seen:
            raise ValueError(f"{path}: line {number}: {key!r} is also the key of line {seen[key]}; keep one of them")
        if key:
            seen[key] = number
            yield number, key, rest


def _key_and_rest(line: str) -> tuple[str, str]:
    """Divide a line at its first blanks or tabs, as Kaldi does; a BOM may begin any line where files were joined."""
    key, *rest = re.split(r"[ \t]+", line.strip().removeprefix("\ufeff").strip(), maxsplit=1)
    return key, "".join(rest)


# -- tar archives ------------------------------------------------------------------------------------------------------


def webdataset_rows(path: Path) -> Iterator[AnyRow]:
    """Yield a row for each key of a tar file: KEY.json gives columns, KEY.txt the transcript, the audio file `audio`.

    Any other member becomes the column of its suffix where it is UTF-8 text of at most a MiB, else the row is refused.
    A key ends at the first dot of the file's name, and its members stand side by side, as WebDataset wants them; like
    there, files that are hidden are left out. Raises ValueError for members that stand apart and for a broken archive.
    """
    stems = [stem for stem, _ in itertools.groupby(_divided(name)[0] for name, _ in _members(path, read=False))]
    if apart := next((stem for stem, count in Counter(stems).items() if count > 1), None):
        sort = "sort the archive by name (tar --sort=name)"
        raise ValueError(f"{path}: the members of {apart!r} stand apart, with others between them; {sort}")
    number, key, data, fault = 0, None, dict[str, Any](), None

    def finished() -> AnyRow:
        missing = f"no audio file for {data['id']!r}; name one of {', '.join(AUDIO_SUFFIXES)} after its key"
        error = fault or (None if "audio" in data else FieldError("audio", missing))
        row = Row(str(path), number, data)
        return row if error is None else BadRow.of(row, error)

    for member, content in _members(path):
        stem, suffix = _divided(member)
        if stem != key:
            if key is not None:
                yield finished()
            number, key, data, fault = number + 1, stem, {"id": stem}, None
        try:
            columns = _member_columns(stem, suffix.lower(), content)
            if {"audio"} <= data.keys() & columns.keys():
                raise FieldError("audio", f"two recordings of {stem!r}; give each its own key")
            data |= columns
        except FieldError as error:
            fault = fault or error
    if key is None:
        raise ValueError(f"{path}: holds no files; write KEY.flac with KEY.txt or KEY.json")
    yield finished()


def _divided(member: str) -> tuple[str, str]:
    """Return the key and the suffix of a member, which begins at the first dot of the file's name."""
    name = PurePosixPath(member)
    first, dot, suffix = name.name.partition(".")
    return str(name.parent / first), dot + suffix


def _member_columns(stem: str, suffix: str, content: bytes) -> dict[str, Any]:
    """Return what a member adds to its row."""
    if suffix in AUDIO_SUFFIXES:
        return {"audio": str(stored(content, suffix))}
    field = suffix.removeprefix(".")
    if suffix.endswith(AUDIO_SUFFIXES):
        message = f"the key ends at its first dot, {stem!r}, and the rest names no audio; leave dots out of keys"
        raise FieldError(field, message)
    if len(content) > MAX_TEXT:
        raise FieldError(field, f"{len(content)} bytes are no column; leave such members out of the archive")
    try:
        if suffix != ".json":
            return {"text" if suffix == ".txt" else field: content.decode("utf-8-sig").strip()}
        value = parse_json(content)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, f"not readable ({error}); save it as UTF-8") from error
    if not isinstance(value, dict):
        raise FieldError("json", f"a JSON {type(value).__name__}, not an object; write {{…}}")
    return {name: entry for name, entry in value.items() if name not in ("id", "audio")}


def _members(path: Path, read: bool = True) -> Iterator[tuple[str, bytes]]:
    """(name, content or b"" if it shall not be read) of the regular files of a tar, without hidden ones.

    Raises ValueError for a broken or huge one.
    """
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it would keep the headers of all
                total += member.size  # as it says itself, holes of sparse files included: before anything is read
                check_unpacked(path, total)
                if member.size > MAX_MEMBER:
                    raise ValueError(f"{path}: {member.name} has {member.size:,} bytes, at most {MAX_MEMBER:,}; cut it")
                file = archive.extractfile(member) if member.isfile() else None
                name = PurePosixPath(member.name)
                if file is not None and not (of_macos(name) or name.name.startswith(".")):
                    yield member.name, file.read() if read else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path}: broken or no tar archive ({error}); copy or download it again") from error


# -- lhotse ------------------------------------------------------------------------------------------------------------


def is_cut(row: Row) -> bool:
    kinds = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
    return {"recording", "supervisions"} <= row.data.keys() or row.data.get("type") in kinds


def is_shar(folder: Path) -> bool:
    return next(folder.glob("cuts.*.jsonl*"), None) is not None


def shar_rows(folder: Path) -> Iterator[AnyRow]:
    """Yield the cuts of a Shar folder, each with the recording of its id, which may be that of a file in a folder.

    Raises ValueError for a shard without its recordings.
    """
    for cuts in sorted(folder.glob("cuts.*.jsonl*")):
        tar = folder / f"recording.{cuts.name.split('.')[1]}.tar"
        if not tar.is_file():
            raise ValueError(f"{tar}: missing; {cuts.name} needs its recordings")
        members = ((PurePosixPath(name), content) for name, content in _members(tar))
        sounds = ((name, stored(content, name.suffix)) for name, content in members if name.suffix in AUDIO_SUFFIXES)
        held: dict[PurePosixPath, Path] = {}
        for row in read_rows(cuts):
            if isinstance(row, BadRow):
                yield row
                continue
            key = PurePosixPath(str(row.data.get("id")))
            while key not in held and (sound := next(sounds, None)):
                held[sound[0].with_suffix("")] = sound[1]
            if key in held:
                yield from converted([row], lambda data, path=held[key]: cut_columns(data, str(path)))  # type: ignore[misc]
            else:
                message = f"no recording of {row.data.get('id')!r} in {tar.name}; leave the cut out, or write it again"
                yield BadRow(row.file, row.number, "id", message)


def cut_columns(data: Mapping[str, Any], recording: str | None = None) -> dict[str, Any]:
    """Return the columns of an `asr` manifest for a cut, with the texts of its supervisions in their order.

    recording: where its audio is, if the cut does not say it.
    """
    save = "write its audio to a file with lhotse, cut.save_audio(path)"
    kind = data.get("type", "MonoCut")
    if kind not in ("Cut", "MonoCut", "MultiCut"):
        raise FieldError("type", f"{kind!r}; a part of one recording is read, a MonoCut or MultiCut: {save}")
    cut = check(data, Cut)
    for place, changes in (("recording.transforms", cut.recording.transforms), ("transforms", cut.transforms)):
        if changes:
            names = ", ".join(str(c.get("name")) if isinstance(c, dict) else str(c) for c in changes)
            raise FieldError(place, f"{names}, which is not applied here; {save}, or drop it")
    said = sorted(cut.supervisions, key=lambda s: s.start)
    source, channel = _source_and_channel(cut, [s for s in said if s.text.strip()])
    if recording is None:
        if source.type != "file":
            raise FieldError("recording.sources", f"of type {source.type!r}; only a file is read: {save}")
        recording = source.source
    text = " ".join(s.text.strip() for s in said if s.text.strip())
    columns = {"id": cut.id, "audio": recording, "start": cut.start, "duration": cut.duration, "text": text}
    columns |= {} if channel is None else {"channel": channel}
    languages, speakers = {s.language for s in said if s.language}, {s.speaker for s in said if s.speaker}
    for name, values in (("language", languages), ("speaker", speakers)):
        columns |= {name: values.pop()} if len(values) == 1 else {}
    own = {*columns, "channel", "channel_selector", "offset", "end", "end_time"}
    return columns | {name: value for name, value in (cut.custom or {}).items() if name not in own}


def _source_and_channel(cut: Cut, said: Sequence[CutSupervision]) -> tuple[CutSource, int | tuple[int, ...] | None]:
    """Return the file of a cut and the channels in it, from 0, of what is said: that of one speaker of two, or several.

    Recordings name their channels as they like, and may have a file for each.
    """

    def named(channel: int | tuple[int, ...] | None) -> set[int]:
        return set() if channel is None else {channel} if isinstance(channel, int) else set(channel)

    of_cut, sources = named(cut.channel), cut.recording.sources
    wanted = set[int]()
    for supervision in said:
        spoken = named(supervision.channel)
        if spoken and of_cut and not spoken & of_cut:
            on, of = (", ".join(map(str, sorted(channels))) for channels in (spoken, of_cut))
            message = f"{supervision.text!r} is said on channel {on}, the cut is of {of}; correct one of them"
            raise FieldError("supervisions", message)
        wanted |= (spoken & of_cut if of_cut else spoken) or of_cut
    wanted = wanted or of_cut
    known = tuple(c for source in sources for c in source.channels or ())
    if known and (unknown := sorted(wanted - set(known))):
        raise FieldError("channel", f"{unknown[0]} is none of the recording's channels {known}; correct it")
    held = [s for s in sources if not wanted or not known or wanted & set(s.channels or ())]
    if len(held) > 1:
        message = "the cut's channels are in several files; write its audio to a file with lhotse, cut.save_audio(path)"
        raise FieldError("recording.sources", message)
    places = tuple(sorted((held[0].channels or ()).index(c) if known else c for c in wanted))
    return held[0], places[0] if len(places) == 1 else places or None

"""Kaldi data folders: `wav.scp`, `text`, and where they are `segments`, `utt2spk`, `utt2lang`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audiorl.data.rows import BadRow, Row
from audiorl.data.schema import FieldError


def is_kaldi(folder: Path) -> bool:
    return (folder / "wav.scp").is_file()


def kaldi_rows(folder: Path) -> Iterator[Row | BadRow]:
    """A row for each utterance of `text`, with its recording or its segment of one.

    A recording must be a file: commands that end with `|` are not run, and archives (`x.ark:123`) are not read. Raises
    ValueError where `text` is missing, and for a file that is not UTF-8.
    """
    if not (folder / "text").is_file():
        raise ValueError(f"{folder}: wav.scp but no text; give the transcripts, one `UTTERANCE WORDS` a line")
    recordings = {key: (number, value) for number, key, value in _entries(folder / "wav.scp")}
    segments = {key: (number, value) for number, key, value in _entries(folder / "segments")}
    speakers = {key: value for _, key, value in _entries(folder / "utt2spk")}
    languages = {key: value for _, key, value in _entries(folder / "utt2lang")}
    for number, utterance, text in _entries(folder / "text"):
        data: dict[str, Any] = {"id": utterance, "text": text}
        try:
            recording = utterance
            if segments:
                recording, data["start"], data["duration"] = _segment(segments, utterance)
            data["audio"] = str(_file(folder, recordings, recording))
        except FieldError as error:
            yield BadRow(str(folder / "text"), number, error.field, error.message)
            continue
        data |= {"speaker": speakers[utterance]} if utterance in speakers else {}
        data |= {"language": languages[utterance]} if utterance in languages else {}
        yield Row(str(folder / "text"), number, data)


def _segment(segments: dict[str, tuple[int, str]], utterance: str) -> tuple[str, float, float]:
    """(recording, start, duration) of an utterance."""
    if utterance not in segments:
        raise FieldError("segments", f"no line for {utterance!r}; write `{utterance} RECORDING START END`")
    number, value = segments[utterance]
    parts = value.split()
    try:
        recording, start, end = parts[0], float(parts[1]), float(parts[2])
    except (IndexError, ValueError):
        raise FieldError("segments", f"line {number}: {value!r} is not `RECORDING START END` in seconds") from None
    if not 0 <= start < end < 1e9:
        raise FieldError("segments", f"line {number}: from {start:g} to {end:g} s; the end must lie after the start")
    return recording, start, round(end - start, 6)


def _file(folder: Path, recordings: dict[str, tuple[int, str]], recording: str) -> Path:
    if recording not in recordings:
        raise FieldError("wav.scp", f"no line for {recording!r}; write `{recording} FILE`")
    number, value = recordings[recording]
    if value.endswith("|"):
        raise FieldError("wav.scp", f"line {number}: a command, which is not run; convert its output and name the file")
    head, colon, offset = value.rpartition(":")
    if colon and offset.isdecimal() and head.endswith((".ark", ".scp")):
        raise FieldError("wav.scp", f"line {number}: a part of the archive {head}; write the recordings as files")
    return (folder / value).absolute()


def _entries(path: Path) -> Iterator[tuple[int, str, str]]:
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

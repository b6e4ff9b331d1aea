"""Speech corpora that are not one row a sample: LibriSpeech's folders and WenetSpeech's single JSON file.

Both become the rows of an `asr` manifest, so that everything after this is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audiorl.data.rows import BadRow, Row
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.manifests import WenetSpeechRecording, WenetSpeechSegment

AUDIO_SUFFIXES = (".flac", ".wav", ".opus", ".ogg", ".mp3")


def librispeech_rows(folder: Path) -> Iterator[Row | BadRow]:
    """The lines `ID TRANSCRIPT` of every *.trans.txt below `folder`, sorted, with ID.flac of the same folder.

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
            if not text.strip():
                yield BadRow(str(transcripts), number, "text", "no transcript after the id; write `ID WORDS`")
                continue
            audio = next(
                (p for suffix in AUDIO_SUFFIXES if (p := transcripts.parent / f"{key}{suffix}").exists()), None
            )
            if audio is None:
                message = f"no {key}.flac (or {', '.join(AUDIO_SUFFIXES[1:])}) next to this file; download it again"
                yield BadRow(str(transcripts), number, "audio", message)
                continue
            data = {"id": key, "audio": str(audio.absolute()), "text": text.strip(), "language": "en"}
            reader, *rest = key.split("-")
            speaker = {"speaker": reader} if len(rest) == 2 else {}
            yield Row(str(transcripts), number, data | speaker)


def wenetspeech_rows(path: Path, document: Any) -> Iterator[Row | BadRow]:
    """The segments of `{"audios": [{"path", "segments": [{"sid", "begin_time", "end_time", "text", …}]}]}`.

    Rows are counted over all segments, from 1. Raises ValueError where there are no recordings.
    """
    if not document["audios"]:
        raise ValueError(f"{path}: field 'audios': empty; give the recordings with their segments")
    number = 0
    for audio in document["audios"]:
        try:
            recording = check(audio, WenetSpeechRecording)
        except FieldError as error:
            number += 1
            yield BadRow(str(path), number, error.field, error.message)
            continue
        for index, segment in enumerate(recording.segments):
            number += 1
            try:
                yield Row(str(path), number, _segment(recording, segment, index))
            except FieldError as error:
                yield BadRow(str(path), number, error.field, error.message)


def _segment(recording: WenetSpeechRecording, data: Any, index: int) -> dict[str, Any]:
    segment = check(data, WenetSpeechSegment)
    begin, end = segment.begin_time, segment.end_time
    if end <= begin:
        raise FieldError("end_time", f"{end} does not lie after begin_time {begin}; correct the times")
    return {
        "language": "zh",
        **{name: value for name, value in data.items() if name not in ("sid", "begin_time", "end_time")},
        "id": segment.sid or f"{recording.aid or recording.path}_{index}",
        "audio": recording.path,
        "offset": begin,
        "duration": round(end - begin, 6),
    }

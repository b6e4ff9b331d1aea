"""Speech corpora that are not one row a sample: LibriSpeech's folders and WenetSpeech's single JSON file.

Both become the rows of an `asr` manifest, so that everything after this is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from audiorl.data.rows import BadRow, Row

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

    Rows are counted over all segments, from 1.
    """
    number = 0
    for audio in document["audios"]:
        segments = audio.get("segments") if isinstance(audio, Mapping) else None
        if not isinstance(segments, list):
            number += 1
            yield BadRow(str(path), number, "segments", "missing in an entry of audios; give the list of segments")
            continue
        for index, segment in enumerate(segments):
            number += 1
            yield _segment(path, number, audio, segment, index)


def _segment(path: Path, number: int, audio: Mapping[str, Any], segment: Any, index: int) -> Row | BadRow:
    if not isinstance(segment, Mapping):
        return BadRow(str(path), number, "", f"{segment!r} is no segment; give an object")
    begin, end = segment.get("begin_time"), segment.get("end_time")
    for field, value in (("begin_time", begin), ("end_time", end)):
        if not isinstance(value, int | float):
            return BadRow(str(path), number, field, f"{value!r} is no time; give seconds")
    assert isinstance(begin, int | float) and isinstance(end, int | float)
    if end <= begin:
        return BadRow(str(path), number, "end_time", f"{end} does not lie after begin_time {begin}; correct the times")
    rest = {k: v for k, v in segment.items() if k not in ("sid", "begin_time", "end_time")}
    return Row(
        str(path),
        number,
        {
            "language": "zh",
            **rest,
            "id": segment.get("sid") or f"{audio.get('aid') or audio.get('path')}_{index}",
            "audio": audio.get("path"),
            "offset": begin,
            "duration": round(end - begin, 6),
        },
    )

"""Lists of what a text-to-speech system is asked to say: Seed-TTS-eval's meta.lst, plain text, conversations of voices.

meta.lst has a line an utterance, fields divided by "|", paths relative to its folder::

    name|text of the prompt|prompt.wav|text to say
    name|text of the prompt|prompt.wav|text to say|recording of it
    name|text to say

A conversation is a line of JSON, paths relative to the file's folder; turns are parts of one recording, or have their
own::

    {"id": "d1", "audio": "d1.wav", "turns": [{"speaker": "A", "text": "Hi.", "start": 0.0, "duration": 1.2}, …]}
    {"id": "d2", "turns": [{"speaker": "A", "text": "Hi.", "audio": "d2_0.wav"}, …]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip


@dataclass(frozen=True)
class Utterance:
    """One text to be said, in the voice of the prompt if there is one. `recording` is how it sounds, where known."""

    name: str
    text: str
    prompt_text: str = ""
    prompt: AudioClip | None = None
    recording: AudioClip | None = None
    speaker: str = ""
    language: str = ""


@dataclass(frozen=True)
class Turn:
    """What one speaker of a conversation says; `audio` is its recording."""

    speaker: str
    text: str
    audio: AudioClip


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: tuple[Turn, ...]


def read_meta(path: str | Path) -> list[Utterance]:
    """The utterances of a meta.lst. Raises ValueError naming file and line; audio is not opened."""
    path = Path(path)
    utterances: list[Utterance] = []
    names: dict[str, int] = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        fields = [field.strip() for field in line.split("|")]
        if len(fields) not in (2, 4, 5):
            raise ValueError(
                f"{where}: {len(fields)} fields; expected name|prompt text|prompt wav|text, or name|text alone"
            )
        name, text = fields[0].removesuffix(".wav"), fields[1] if len(fields) == 2 else fields[3]
        if not name or not text:
            raise ValueError(f"{where}: the {'text' if name else 'name'} is empty")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{where}: {name!r} is no name of a file below the folder of generated audio")
        if name in names:
            raise ValueError(f"{where}: {name!r} is also the name of line {names[name]}; give every line its own")
        names[name] = number
        prompt, recording = (
            AudioClip(path=str(path.parent / fields[i])) if len(fields) > i and fields[i] else None for i in (2, 4)
        )
        utterances.append(Utterance(name, text, fields[1] if len(fields) > 2 else "", prompt, recording))
    if not utterances:
        raise ValueError(f"{path}: holds no utterance")
    return utterances


def read_texts(path: str | Path) -> list[Utterance]:
    """The lines of a text file, named FILE-0001 by their number. Raises ValueError for a file without any."""
    path = Path(path)
    texts = [Utterance(f"{path.stem}-{number:04d}", line.strip()) for number, line in _lines(path)]
    if not texts:
        raise ValueError(f"{path}: holds no text; write one a line")
    return texts


def read_conversations(path: str | Path) -> list[Conversation]:
    """The conversations of a JSON-lines file. Raises ValueError naming file, line and field; audio is not opened."""
    path = Path(path)
    conversations: list[Conversation] = []
    ids: dict[str, int] = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object with id and turns")
        id = _text(row, "id", where)
        if id in ids:
            raise ValueError(f"{where}: {id!r} is also the id of line {ids[id]}; give every line its own")
        ids[id] = number
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{where}: turns is {turns!r}, expected a list of at least one")
        conversations.append(
            Conversation(id, tuple(_turn(t, row, path.parent, f"{where}, turn {i}") for i, t in enumerate(turns, 1)))
        )
    if not conversations:
        raise ValueError(f"{path}: holds no conversation")
    return conversations


def _turn(turn: Any, row: dict[str, Any], folder: Path, where: str) -> Turn:
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: not an object with speaker, text and audio")
    speaker, text = _text(turn, "speaker", where), _text(turn, "text", where)
    if "audio" in turn:
        return Turn(speaker, text, AudioClip(path=str(folder / _text(turn, "audio", where))))
    if "audio" not in row:
        raise ValueError(f"{where}: no audio, neither here nor of the conversation")
    whole = folder / _text(row, "audio", where)
    start, duration = (_seconds(turn, key, where) for key in ("start", "duration"))
    if not duration > 0:
        raise ValueError(f"{where}: duration is {duration}, expected more than 0 s")
    return Turn(speaker, text, AudioClip(path=str(whole), start=start, duration=duration))


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key} is {value!r}, expected text")
    return value


def _seconds(row: dict[str, Any], key: str, where: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{where}: {key} is {value!r}, expected seconds")
    return float(value)


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, numbered from 1."""
    if not path.is_file():
        raise ValueError(f"{path}: missing; check the path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    return [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]

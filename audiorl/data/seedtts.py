"""Lists of what a text-to-speech system is asked to say: Seed-TTS-eval's meta.lst, plain text, conversations of voices.

meta.lst has a line an utterance, fields divided by "|", paths relative to its folder::

    name|text of the prompt|prompt.wav|text to say
    name|text of the prompt|prompt.wav|text to say|recording of it
    name|text to say

A conversation is a line of JSON, paths relative to the file's folder; turns are parts of one recording, or have their
own::

    {"id": "d1", "audio": "d1.wav", "turns": [{"speaker": "A", "text": "Hi.", "start": 0.0, "duration": 1.2}, …]}
    {"id": "d2", "turns": [{"speaker": "A", "text": "Hi.", "audio": "d2_0.wav"}, …]}

A script is a conversation that is to be said: its turns have no audio, and `voices` has a recording of each speaker and
what is said there::

    {"id": "d3", "voices": {"A": {"audio": "a.wav", "text": "Hello there."}, …}, "turns": [{"speaker": "A", "text": …}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from audiorl.audio import AudioClip
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.results import ConversationRow, TurnRow


@dataclass(frozen=True)
class TextToSay:
    """One text to be said, in the voice of the prompt if there is one. `recording` is how it sounds, where known."""

    name: str
    text: str
    prompt_text: str = ""
    prompt: AudioClip | None = None
    recording: AudioClip | None = None
    speaker: str = ""
    language: str = ""


@dataclass(frozen=True)
class ConversationTurn:
    """What one speaker of a conversation says; `audio` is its recording, None in a script."""

    speaker: str
    text: str
    audio: AudioClip | None


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: tuple[ConversationTurn, ...]
    voices: Mapping[str, tuple[str, AudioClip]] = field(default_factory=dict)
    """(text, recording) of each speaker; empty, or one for every speaker of a turn."""


def read_meta(path: str | Path) -> list[TextToSay]:
    """Return the utterances of a meta.lst. Raises ValueError naming file and line; audio is not opened."""
    path = Path(path)
    utterances: list[TextToSay] = []
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
        utterances.append(TextToSay(name, text, fields[1] if len(fields) > 2 else "", prompt, recording))
    if not utterances:
        raise ValueError(f"{path}: holds no utterance")
    return utterances


def read_texts(path: str | Path) -> list[TextToSay]:
    """Return the lines of a text file, named FILE-0001 by their number. Raises ValueError for a file without any."""
    path = Path(path)
    texts = [TextToSay(f"{path.stem}-{number:04d}", line.strip()) for number, line in _lines(path)]
    if not texts:
        raise ValueError(f"{path}: holds no text; write one a line")
    return texts


def read_conversations(path: str | Path, script: bool = False) -> list[Conversation]:
    """Return the conversations of a JSON-lines file; a `script`'s turns need no recordings, which are left out.

    Raises ValueError naming file, line and field, and for a turn whose speaker is not among the voices; audio is not
    opened.
    """
    path = Path(path)
    conversations: list[Conversation] = []
    ids: dict[str, int] = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row = check(parse_json(line), ConversationRow)
        except FieldError as error:
            raise ValueError(f"{where}: {f'{error.field} ' if error.field else ''}{error.message}") from error
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if row.id in ids:
            raise ValueError(f"{where}: {row.id!r} is also the id of line {ids[row.id]}; give every line its own")
        ids[row.id] = number
        turns = [_turn(t, row, path.parent, f"{where}, turn {i}", script) for i, t in enumerate(row.turns, 1)]
        voices = {
            name: (v.text, AudioClip(path=str(path.parent / v.audio), start=v.start or 0.0, duration=v.duration))
            for name, v in row.voices.items()
        }
        conversations.append(Conversation(row.id, tuple(turns), voices))
    if not conversations:
        raise ValueError(f"{path}: holds no conversation")
    return conversations


def _turn(turn: TurnRow, row: ConversationRow, folder: Path, where: str, script: bool) -> ConversationTurn:
    if row.voices and turn.speaker not in row.voices:
        names = ", ".join(row.voices)
        raise ValueError(f"{where}, field 'speaker': {turn.speaker!r} is none of the voices ({names}); add its voice")
    if script:
        return ConversationTurn(turn.speaker, turn.text, None)
    if turn.audio is not None:
        return ConversationTurn(turn.speaker, turn.text, AudioClip(path=str(folder / turn.audio)))
    if row.audio is None:
        raise ValueError(f"{where}: no audio, neither here nor of the conversation")
    if turn.start is None or turn.duration is None:
        missing = "start" if turn.start is None else "duration"
        raise ValueError(f"{where}: {missing}: missing; give seconds")
    clip = AudioClip(path=str(folder / row.audio), start=turn.start, duration=turn.duration)
    return ConversationTurn(turn.speaker, turn.text, clip)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not empty, numbered from 1."""
    if not path.is_file():
        raise ValueError(f"{path}: missing; check the path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    return [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]

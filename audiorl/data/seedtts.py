"""Lists of what a text-to-speech system is asked to say: Seed-TTS-eval's meta.lst, plain text, conversations of voices.

meta.lst has a line an utterance, fields divided by "|", paths relative to its folder::

    name|text of the prompt|prompt.wav|text to say
    name|text of the prompt|prompt.wav|text to say|recording of it
    name|text to say

A text that has a prompt may hold "|" itself. A conversation is a line of JSON, paths relative to the file's folder; its
turns are parts of one recording, or have their own; `channel`, from 0, says which channel is the speaker's::

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
from typing import Any

from audiorl.audio import AUDIO_SUFFIXES, AudioClip
from audiorl.data.rows import BadRow, read_checked
from audiorl.data.schema import check
from audiorl.data.schema.results import ConversationRow


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
    line: int = field(default=0, compare=False)
    """Number of its line in its list, from 1; 0 where it comes from none."""


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
    file: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)

    def fault(self, field: str, message: str) -> ValueError:
        """Return an error that names a field of the conversation's row."""
        return ValueError(str(BadRow(self.file, self.row, field, message)))


def read_meta(path: str | Path) -> list[TextToSay]:
    """Return the utterances of a meta.lst. Raises ValueError naming file and line; audio is not opened."""
    path = Path(path)

    def is_recording(field: str) -> bool:
        return Path(field).suffix.lower() in AUDIO_SUFFIXES or (bool(field) and (path.parent / field).is_file())

    utterances: list[TextToSay] = []
    names: dict[str, int] = {}
    for number, line in _lines(path, "utterance"):
        given = line.split("|")
        fields = [field.strip() for field in given]
        if recorded := len(fields) > 4 and (not fields[-1] or is_recording(fields[-1])):
            del given[-1]
        name, text = fields[0].removesuffix(".wav"), ("|".join(given[3:]) if len(fields) > 3 else fields[-1]).strip()
        if len(fields) > 2 and fields[2] and not is_recording(fields[2]):
            fault = f"field 3, {fields[2]!r}, is no recording; in front of it no text may hold '|'"
        elif len(fields) in (1, 3):
            fault = f"{len(fields)} fields; expected name|prompt text|prompt wav|text, or name|text alone"
        elif not name or not text:
            fault = f"the {'text' if name else 'name'} is empty"
        elif Path(name).is_absolute() or ".." in Path(name).parts:
            fault = f"{name!r} is no name of a file below the folder of generated audio"
        elif name in names:
            fault = f"{name!r} is also the name of line {names[name]}; give every line its own"
        else:
            names[name] = number
            files = (fields[2] if len(fields) > 3 else "", fields[-1] if recorded else "")
            prompt, recording = (AudioClip(path=str(path.parent / file)) if file else None for file in files)
            utterances.append(
                TextToSay(name, text, fields[1] if len(fields) > 2 else "", prompt, recording, line=number)
            )
            continue
        raise ValueError(f"{path}, line {number}: {fault}")
    return utterances


def read_texts(path: str | Path) -> list[TextToSay]:
    """Return the lines of a text file, named FILE-0001 by their number. Raises ValueError for a file without any."""
    path = Path(path)
    return [TextToSay(f"{path.stem}-{number:04d}", line.strip(), line=number) for number, line in _lines(path, "text")]


def _lines(path: Path, what: str) -> list[tuple[int, str]]:
    """Return the lines that are not empty, numbered from 1."""
    if not path.is_file():
        raise ValueError(f"{path}: missing; check the path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: holds no {what}; write one a line")
    return lines


def read_conversations(path: str | Path, script: bool = False) -> list[Conversation]:
    """Return the conversations of a JSON-lines file; a `script`'s turns need no recordings, which are left out.

    Raises ValueError naming file, row and field, and for a turn whose speaker is not among the voices; audio is not
    opened.
    """
    path = Path(path)
    conversations: list[Conversation] = []
    ids: dict[str, int] = {}
    for number, row in read_checked(path, lambda row: check(row, ConversationRow)):
        if row.id in ids:
            message = f"{row.id!r} is also the id of row {ids[row.id]}; give every row its own"
            raise ValueError(str(BadRow(str(path), number, "id", message)))
        ids[row.id] = number
        turns = []
        for index, turn in enumerate(row.turns):
            recording = turn.audio or row.audio
            missing = next((name for name in ("start", "duration") if getattr(turn, name) is None), None)
            clip = None
            if row.voices and turn.speaker not in row.voices:
                names = ", ".join(row.voices)
                fault = ("speaker", f"{turn.speaker!r} is none of the voices ({names}); add its voice")
            elif not script and recording is None:
                fault = ("audio", "missing, neither here nor of the conversation; give the recording")
            elif not script and turn.audio is None and missing:
                fault = (missing, "missing; give seconds")
            else:
                if not script:
                    part: dict[str, Any] = {} if turn.audio else {"start": turn.start, "duration": turn.duration}
                    part["channel"] = turn.channel
                    clip = AudioClip(path=str(path.parent / str(recording)), **part)
                turns.append(ConversationTurn(turn.speaker, turn.text, clip))
                continue
            raise ValueError(str(BadRow(str(path), number, f"turns[{index}].{fault[0]}", fault[1])))
        voices = {}
        for name, v in row.voices.items():
            part = {"start": v.start or 0.0, "duration": v.duration, "channel": v.channel}
            voices[name] = v.text, AudioClip(path=str(path.parent / v.audio), **part)
        conversations.append(Conversation(row.id, tuple(turns), voices, str(path), number))
    return conversations

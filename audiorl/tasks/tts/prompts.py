"""Prompts and examples of speech synthesis: texts with their recordings, conversations, and long texts in pieces.

A prompt is a conversation in the format of Higgs Audio V2: for voice cloning first a text with its recording, then the
text to speak. A tag such as [SPEAKER0] in front of a text names who says it.

A turn of a conversation is divided into pieces of a few sentences. The prompt of a piece has a recording of every voice
with its text, then the pieces before it with their speech, so that voice and tone carry over, then the piece's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audiorl.audio import AudioClip, AudioError, seconds
from audiorl.data.schema import FieldError
from audiorl.data.seedtts import Conversation, TextToSay
from audiorl.models.examples import Example
from audiorl.types import Message, Sample


def speech_sample(
    id: str,
    text: str,
    *,
    speaker: str = "",
    voice: tuple[str, AudioClip] | None = None,
    scene: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """Return a prompt to speak `text`, without any written answer. Its reference is the text itself.

    speaker: a tag in front of the text, as [SPEAKER0]. voice: (text, recording) of the voice to imitate. scene: a
    description of the recording for the system message. Raises ValueError for an empty text.
    """
    if not text.strip():
        raise ValueError(f"sample {id!r}: the text to speak is empty")
    about: dict[str, Any] = {**(metadata or {}), "respond": "speech"}
    messages = [Message("system", (scene,))] if scene else []
    if voice is not None:
        messages += [Message("user", (tagged(speaker, voice[0]),)), Message("assistant", (voice[1],))]
        about.setdefault("reference_audio", voice[1])
    return Sample(id, (*messages, Message("user", (tagged(speaker, text),))), (text,), task="tts", metadata=about)


def utterance_sample(utterance: TextToSay, tag: bool = False) -> Sample:
    """Return the prompt of an utterance; `tag` puts its speaker in front of the text.

    metadata["reference_audio"] has the wanted voice: the prompt's audio, or else the recording.
    metadata["reference_seconds"] is the recording's duration, or else an estimate from the prompt's speaking rate.
    """
    u = utterance
    about: dict[str, Any] = {name: v for name, v in (("speaker", u.speaker), ("language", u.language)) if v}
    if u.recording is not None:
        about |= {"reference_seconds": seconds(u.recording), "reference_audio": u.recording}
    voice = None
    if u.prompt is not None:
        about.setdefault("reference_seconds", expected_seconds(u.text, u.prompt_text, u.prompt))
        about["reference_audio"] = u.prompt
        voice = (u.prompt_text, u.prompt)
    return speech_sample(u.name, u.text, speaker=u.speaker if tag else "", voice=voice, metadata=about)


def expected_seconds(text: str, prompt_text: str, prompt: AudioClip) -> float:
    """Return how long a text lasts where letters and digits take as long as in a recording."""
    letters, of_prompt = (sum(map(str.isalnum, said)) for said in (text, prompt_text))
    return seconds(prompt) * letters / max(of_prompt, 1)


def utterance_example(utterance: TextToSay, tag: bool = False) -> Example:
    """Return the prompt of an utterance with its recording. Raises ValueError where there is none."""
    if utterance.recording is None:
        raise FieldError("audio", f"{utterance.name!r}: has no recording to train on; give the row's audio")
    return Example(utterance_sample(utterance, tag), speech=(utterance.recording,))


def tagged(speaker: str, text: str) -> str:
    """Return the text with its speaker in front, as [SPEAKER0]."""
    return f"[{speaker}] {text}" if speaker else text


SHORTEST_VOICE = 0.5
"""Seconds of a recording below which there is no voice to imitate."""
_ENDS = (r"[.!?…]+[\"'”’)]*\s+|[。！？]+[”’）]*", r"[,;:–—]\s+|[，；：、]", r"\s+")
"""Where a text may be divided, the best first: after sentences, after clauses, between words."""


@dataclass(frozen=True)
class TurnPiece:
    """A part of a turn that is generated at once."""

    id: str
    """CONVERSATION/TURN-NUMBER, which names its recording."""
    turn: int
    speaker: str
    text: str


def split_text(text: str, most: int) -> list[str]:
    """Return the text in parts of at most `most` characters, which have every character but the spaces between them.

    It is divided after sentences if possible, else after clauses, else between words, else anywhere.
    """
    rest, parts = text.strip(), []
    while len(rest) > most:
        window, end = rest[: most + 1], most
        for pattern in _ENDS:
            ends = [m.end() for m in re.finditer(pattern, window) if len(window[: m.end()].rstrip()) <= most]
            if ends:
                end = ends[-1]
                break
        parts.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return [*parts, rest] if rest else parts


def pieces_of(conversation: Conversation, most: int) -> list[TurnPiece]:
    """Return the pieces of all turns, in order, each of at most `most` characters."""
    pieces = []
    for number, turn in enumerate(conversation.turns):
        for part, text in enumerate(split_text(turn.text, most)):
            pieces.append(TurnPiece(f"{conversation.id}/{number:03d}-{part:02d}", number, turn.speaker, text))
    return pieces


def check_voices(conversation: Conversation) -> None:
    """Raise ValueError for a voice that cannot be read or is too short to imitate. Opens the recordings."""
    for speaker, (_, clip) in conversation.voices.items():
        try:
            length = seconds(clip)
        except AudioError as error:
            raise conversation.fault(f"voices.{speaker}.audio", str(error)) from error
        if length < SHORTEST_VOICE:
            message = f"{clip.path} is {length:.2f} s long; give at least {SHORTEST_VOICE} s, better 3 to 10"
            raise conversation.fault(f"voices.{speaker}.audio", message)


def piece_sample(
    conversation: Conversation, piece: TurnPiece, before: Sequence[tuple[TurnPiece, AudioClip]], own_voice: bool = False
) -> Sample:
    """Return the prompt to say `piece` after the pieces `before`, each with its speech.

    own_voice: the voice of its speaker alone, and no tags, for models that know one voice in a prompt.
    """
    several = not own_voice and len({turn.speaker for turn in conversation.turns}) > 1
    voices = [(s, *voice) for s, voice in conversation.voices.items() if not own_voice or s == piece.speaker]
    messages: list[Message] = []
    for speaker, text, clip in (*voices, *((p.speaker, p.text, clip) for p, clip in before)):
        messages.append(Message("user", (tagged(speaker if several else "", text),)))
        messages.append(Message("assistant", (clip,)))
    messages.append(Message("user", (tagged(piece.speaker if several else "", piece.text),)))
    metadata = {"respond": "speech", "speaker": piece.speaker}
    return Sample(piece.id, tuple(messages), (piece.text,), task="tts", metadata=metadata)


def conversation_examples(conversation: Conversation, context: int) -> list[Example]:
    """Return every turn with its recording, after all voices and the `context` turns before it: what `piece_sample`
    asks for where each turn is one piece. Raises ValueError for a turn without recording."""
    examples: list[Example] = []
    said: list[tuple[TurnPiece, AudioClip]] = []
    for number, turn in enumerate(conversation.turns):
        if turn.audio is None:
            raise conversation.fault(f"turns[{number}].audio", "missing; give a recording to train on")
        piece = TurnPiece(f"{conversation.id}/{number:03d}", number, turn.speaker, turn.text)
        before = said[-context:] if context else []
        examples.append(Example(piece_sample(conversation, piece, before), speech=(turn.audio,)))
        said.append((piece, turn.audio))
    return examples

"""Conversations, and texts too long to be said at once: the pieces that are generated, and prompts and examples.

A turn is divided into pieces of a few sentences. The prompt of a piece has a recording of every voice with its text,
then the pieces before it with their speech, so that the voice and the tone carry over, then the piece's text. Where a
conversation has several speakers, a tag such as [SPEAKER0] in front of every text names who says it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.audio import AudioClip, AudioError, seconds
from audiorl.data.seedtts import Conversation
from audiorl.models.examples import Example
from audiorl.tasks.tts.prompts import tagged
from audiorl.types import Message, Sample

SHORTEST_VOICE = 0.5
"""Seconds of a recording below which there is no voice to imitate."""
_ENDS = (r"[.!?…]+[\"'”’)]*\s+|[。！？]+[”’）]*", r"[,;:–—]\s+|[，；：、]", r"\s+")
"""Where a text may be divided, the best first: after sentences, after clauses, between words."""


@dataclass(frozen=True)
class Piece:
    """A part of a turn that is generated at once."""

    id: str
    """CONVERSATION/TURN-NUMBER, which names its recording."""
    turn: int
    speaker: str
    text: str


def split_text(text: str, most: int) -> list[str]:
    """The text in parts of at most `most` characters, divided after sentences if possible, else after clauses, else
    between words; a longer word is divided anywhere. The parts have every character but the spaces between them."""
    if most < 1:
        raise ValueError(f"most must be at least 1 character, got {most}")
    rest, parts = text.strip(), []
    while len(rest) > most:
        window = rest[: most + 1]
        ends = ([m.end() for m in re.finditer(pattern, window)] for pattern in _ENDS)
        fitting = ([end for end in places if len(window[:end].rstrip()) <= most] for places in ends)
        end = next((places[-1] for places in fitting if places), most)
        parts.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return [*parts, rest] if rest else parts


def pieces_of(conversation: Conversation, most: int) -> list[Piece]:
    """The pieces of all turns, in order, each of at most `most` characters."""
    return [
        Piece(f"{conversation.id}/{number:03d}-{part:02d}", number, turn.speaker, text)
        for number, turn in enumerate(conversation.turns)
        for part, text in enumerate(split_text(turn.text, most))
    ]


def check_voices(conversation: Conversation) -> None:
    """Raise ValueError for a voice that cannot be read or is too short to imitate. Opens the recordings."""
    for speaker, (_, clip) in conversation.voices.items():
        try:
            length = seconds(clip)
        except AudioError as error:
            raise ValueError(f"conversation {conversation.id!r}, voice {speaker!r}: {error}") from error
        if length < SHORTEST_VOICE:
            raise ValueError(
                f"conversation {conversation.id!r}, voice {speaker!r}: {clip.path} is {length:.2f} s long; give at "
                f"least {SHORTEST_VOICE} s, better 3 to 10"
            )


def piece_sample(
    conversation: Conversation, piece: Piece, before: Sequence[tuple[Piece, AudioClip]], own_voice: bool = False
) -> Sample:
    """The prompt to say `piece` after the pieces `before`, each with its speech.

    own_voice: the voice of its speaker alone, and no tags, for models that know one voice in a prompt.
    """
    several = not own_voice and len({turn.speaker for turn in conversation.turns}) > 1
    messages: list[Message] = []

    def said(speaker: str, text: str, clip: AudioClip) -> None:
        messages.append(Message("user", (tagged(speaker if several else "", text),)))
        messages.append(Message("assistant", (clip,)))

    for speaker, (text, clip) in conversation.voices.items():
        if not own_voice or speaker == piece.speaker:
            said(speaker, text, clip)
    for earlier, clip in before:
        said(earlier.speaker, earlier.text, clip)
    messages.append(Message("user", (tagged(piece.speaker if several else "", piece.text),)))
    metadata = {"respond": "speech", "speaker": piece.speaker}
    return Sample(piece.id, tuple(messages), (piece.text,), task="tts", metadata=metadata)


def conversation_examples(conversation: Conversation, context: int) -> list[Example]:
    """Every turn with its recording, after all voices and the `context` turns before it: what `piece_sample` asks for
    where each turn is one piece. Raises ValueError for a turn without recording."""
    examples: list[Example] = []
    said: list[tuple[Piece, AudioClip]] = []
    for number, turn in enumerate(conversation.turns):
        if turn.audio is None:
            raise ValueError(f"conversation {conversation.id!r}, turn {number + 1}: has no recording to train on")
        piece = Piece(f"{conversation.id}/{number:03d}", number, turn.speaker, turn.text)
        before = said[-context:] if context else []
        examples.append(Example(piece_sample(conversation, piece, before), speech=(turn.audio,)))
        said.append((piece, turn.audio))
    return examples

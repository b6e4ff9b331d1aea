"""ChatML, the way the Qwen audio models write a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from audiorl.audio import AudioClip
from audiorl.types import Message

Piece = str | AudioClip


def chatml(
    messages: Sequence[Message],
    clip_pieces: Callable[[AudioClip, int], list[Piece]],
    default_system: str | None = "You are a helpful assistant.",
) -> list[Piece]:
    """Text pieces and clips in reading order, ending where the assistant begins.

    clip_pieces(clip, k) writes the k-th clip of the conversation (from 1) with its delimiters.
    """
    pieces: list[Piece] = []
    if default_system is not None and (not messages or messages[0].role != "system"):
        pieces.append(f"<|im_start|>system\n{default_system}<|im_end|>\n")
    heard = 0
    for message in messages:
        pieces.append(f"<|im_start|>{message.role}\n")
        for content in message.content:
            if isinstance(content, AudioClip):
                heard += 1
                pieces.extend(clip_pieces(content, heard))
            else:
                pieces.append(content)
        pieces.append("<|im_end|>\n")
    pieces.append("<|im_start|>assistant\n")
    return pieces

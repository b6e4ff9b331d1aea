"""ChatML, the way the Qwen audio models write a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from audiorl.audio import AudioClip
from audiorl.types import Message

Piece = str | AudioClip
DEFAULT_SYSTEM = "You are a helpful assistant."


def chatml(
    messages: Sequence[Message],
    clip_pieces: Callable[[AudioClip, int], list[Piece]],
    default_system: str | None = DEFAULT_SYSTEM,
) -> list[Piece]:
    """Text pieces and clips in reading order, ending where the assistant begins.

    clip_pieces(clip, k) writes clip number k of the conversation (from 1) with its delimiters.
    """
    pieces: list[Piece] = []
    if default_system is not None and (not messages or messages[0].role != "system"):
        pieces.append(f"<|im_start|>system\n{default_system}<|im_end|>\n")
    clips = 0
    for message in messages:
        pieces.append(f"<|im_start|>{message.role}\n")
        for content in message.content:
            if isinstance(content, AudioClip):
                clips += 1
                pieces.extend(clip_pieces(content, clips))
            else:
                pieces.append(content)
        pieces.append("<|im_end|>\n")
    pieces.append("<|im_start|>assistant\n")
    return pieces


def chatml_template(audio: str = "", default_system: str | None = DEFAULT_SYSTEM) -> str:
    """`chatml` as a Jinja chat template. `audio`: how a clip is written; "{k}" in it is the clip's number."""
    before, number, after = audio.partition("{k}")
    clip = f"{{{{- {before!r} ~ count.clips ~ {after!r} }}}}" if number else f"{{{{- {audio!r} }}}}"
    system = f"<|im_start|>system\\n{default_system}<|im_end|>\\n"
    return "".join(
        [
            "{%- set count = namespace(clips=0) -%}",
            f"{{%- if messages[0].role != 'system' -%}}{{{{- '{system}' }}}}{{%- endif -%}}" if default_system else "",
            "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' }}",
            "{%- if message.content is string -%}{{- message.content }}{%- else -%}",
            "{%- for part in message.content -%}{%- if 'text' in part -%}{{- part.text }}{%- else -%}",
            "{%- set count.clips = count.clips + 1 -%}",
            clip,
            "{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' }}{%- endfor -%}",
            "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}\n",
        ]
    )

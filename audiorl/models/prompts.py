"""From chat messages and chunks of audio to the token ids that a policy reads.

Shapes: P tokens of a prompt, N tokens and frames of a speech, Q codebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from audiorl.audio import AudioClip
from audiorl.models.audio_encoder import AudioEncoder
from audiorl.models.backbone import Backbone
from audiorl.models.speech import FrameLayout
from audiorl.types import Message, Sample


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the model reads it: ids [P], codes [P, Q] where it holds frames, and the clips for the audio encoder,
    in the order of their placeholders."""

    ids: Tensor
    codes: Tensor | None = None
    audio: tuple[AudioClip, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, ids: Tensor, audio: tuple[AudioClip, ...]) -> Prompt:
        """Append text tokens with the clips behind their placeholders."""
        codes = self.codes
        if codes is not None:
            codes = torch.cat([codes, codes.new_full((len(ids), codes.shape[1]), -1)])
        return Prompt(torch.cat([self.ids, ids]), codes, self.audio + audio)


@dataclass(frozen=True)
class PromptEncoder:
    """Write samples as prompts. `codes`: a clip in codec codes [Q, F]. `max_tokens`: the model's positions."""

    tokenizer: PreTrainedTokenizerBase
    backbone: Backbone
    audio: AudioEncoder
    speech: FrameLayout | None
    codes: Callable[[AudioClip], Tensor]
    max_tokens: int | None

    def encode(self, sample: Sample) -> Prompt:
        """Return the sample's messages as the model reads them.

        A clip for the audio encoder becomes its placeholder, once per audio token. If the model speaks, the assistant's
        clips are speech, in frames; without an audio encoder all clips are. Where the answer is to be spoken
        (`wants_speech`), the prompt ends with the token that opens speech. Raises ValueError that names the sample.
        """
        # Special tokens such as <|im_start|> would let a message end its own turn.
        reserved = tuple(t for t in self.tokenizer.get_added_vocab() if t.startswith("<|"))
        for message in sample.messages:
            texts = [content for content in message.content if isinstance(content, str)]
            if any(token in text for text in texts for token in reserved):
                what = "a message contains a reserved token such as <|im_start|>"
                raise ValueError(f"sample {sample.id!r}: {what}; remove it")
        frames: list[Tensor] = []
        try:
            pieces = self.backbone.chat([self._speech_as_text(m, frames) for m in sample.messages])
            text = self._with_placeholders(pieces)
        except ValueError as error:
            raise ValueError(f"sample {sample.id!r}: {error}") from error
        if wants_speech(sample):
            if self.speech is None:
                raise ValueError(f"sample {sample.id!r} asks for speech, but the model writes text only; dualize it")
            text += self._token(self.speech.begin_id)
        ids = self._ids(text)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise ValueError(
                f"sample {sample.id!r}: its prompt has {len(ids)} tokens, the model reads at most {self.max_tokens}; "
                "shorten the text, or cut the clip with start and duration"
            )
        codes = None
        if self.speech is not None and frames:
            codes = torch.full((len(ids), self.speech.codebooks), -1)
            codes[(ids == self.speech.frame_id) | (ids == self.speech.delay_id)] = torch.cat(frames)
        return Prompt(ids, codes, tuple(p for p in pieces if isinstance(p, AudioClip)))

    def encode_chunk(self, clip: AudioClip) -> Tensor:
        """Return [P] int64: a chunk of a stream with its delimiters, ready for the policy's turn."""
        return self._ids(self._with_placeholders(self.backbone.chunk(clip)))

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)

    def _token(self, id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(id))

    def _with_placeholders(self, pieces: Sequence[str | AudioClip]) -> str:
        placeholder = str(self.backbone.audio_token)
        return "".join(placeholder * self.audio.num_tokens(p) if isinstance(p, AudioClip) else p for p in pieces)

    def _speech_as_text(self, message: Message, frames: list[Tensor]) -> Message:
        """Write the message's speech as tokens; its codes [N, Q] are appended to `frames`."""
        layout = self.speech
        # With an audio encoder only the assistant speaks; without one every clip is read as frames.
        if layout is None or (message.role != "assistant" and self.backbone.audio_token is not None):
            return message
        content: list[str | AudioClip] = []
        for piece in message.content:
            if isinstance(piece, AudioClip):
                speech = layout.tokens(self.codes(piece))
                frames.append(speech.codes[:-1])
                piece = "".join(self._token(i) for i in (layout.begin_id, *speech.ids.tolist()))
            content.append(piece)
        return replace(message, content=tuple(content))


def wants_speech(sample: Sample) -> bool:
    """Tell whether the answer is speech from its start: whether `metadata["respond"]` is "speech" and not "text".

    A model that speaks may otherwise decide so itself, after text, in any turn.
    """
    respond = sample.metadata.get("respond", "text")
    if respond not in ("text", "speech"):
        raise ValueError(f'sample {sample.id!r}: metadata "respond" is {respond!r}; give "text" or "speech"')
    if respond == "speech" and sample.turns:
        raise ValueError(f'sample {sample.id!r}: a stream\'s turns begin with text; leave "respond" out')
    return bool(respond == "speech")


# -- ChatML ------------------------------------------------------------------------------------------------------------

DEFAULT_SYSTEM = "You are a helpful assistant."


def chatml(
    messages: Sequence[Message],
    clip_pieces: Callable[[AudioClip, int], list[str | AudioClip]],
    default_system: str | None = DEFAULT_SYSTEM,
) -> list[str | AudioClip]:
    """Write a conversation as the Qwen audio models read it: text and clips, ending where the assistant begins.

    clip_pieces(clip, k) writes clip number k of the conversation (from 1) with its delimiters.
    """
    pieces: list[str | AudioClip] = []
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
    """Return `chatml` as a Jinja chat template. `audio`: how a clip is written; "{k}" in it is the clip's number."""
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

"""From chat messages and chunks of audio to the token ids that a policy reads.

Shapes: P tokens of a prompt, N rows of a speech, Q codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from audiorl.audio import AudioClip
from audiorl.types import Message, Sample

if TYPE_CHECKING:
    from audiorl.models.policy import AudioPolicy


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
        """The prompt and then text tokens with the clips behind their placeholders."""
        codes = self.codes
        if codes is not None:
            codes = torch.cat([codes, codes.new_full((len(ids), codes.shape[1]), -1)])
        return Prompt(torch.cat([self.ids, ids]), codes, self.audio + audio)


def encode_prompt(policy: AudioPolicy, sample: Sample) -> Prompt:
    """The sample's messages as the model reads them.

    A clip for the audio encoder becomes its placeholder, repeated once per audio token. If the model speaks, the
    assistant's clips are speech, in frames; without an audio encoder all clips are. Where the answer is to be spoken
    (see `wants_speech`), the prompt ends with the token that opens speech.

    Raises ValueError that names the sample: for reserved tokens in a message, audio that the model cannot read, and
    more tokens than the model has positions.
    """
    reserved = reserved_tokens(policy.tokenizer)
    for message in sample.messages:
        for content in message.content:
            if isinstance(content, str) and any(token in content for token in reserved):
                raise ValueError(
                    f"sample {sample.id!r}: a message contains a reserved token such as <|im_start|>; remove it"
                )
    frames: list[Tensor] = []
    try:
        pieces = policy.backbone.chat([_speech_as_text(policy, m, frames) for m in sample.messages])
        text = _with_placeholders(policy, pieces)
    except ValueError as error:
        raise ValueError(f"sample {sample.id!r}: {error}") from error
    if wants_speech(sample):
        if policy.speech is None:
            raise ValueError(f"sample {sample.id!r} asks for speech, but the model writes text only; dualize it")
        text += _token(policy, policy.speech.begin_id)
    ids = _encode(policy, text)
    positions = getattr(policy.backbone.decoder(policy.model).config, "max_position_embeddings", None)
    if positions is not None and len(ids) > positions:
        raise ValueError(
            f"sample {sample.id!r}: its prompt has {len(ids)} tokens, the model reads at most {positions}; shorten the "
            "text, or cut the clip with start and duration"
        )
    return Prompt(ids, _codes_at(policy, ids, frames), tuple(p for p in pieces if isinstance(p, AudioClip)))


def encode_chunk(policy: AudioPolicy, clip: AudioClip) -> Tensor:
    """[P] int64: a chunk of a stream with its delimiters, ready for the policy's turn."""
    return _encode(policy, _with_placeholders(policy, policy.backbone.chunk(clip)))


def reserved_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Special tokens, which no message may contain."""
    return tuple(t for t in tokenizer.get_added_vocab() if t.startswith("<|"))


def wants_speech(sample: Sample) -> bool:
    """Whether the answer is to be spoken at once: `metadata["respond"]` is "speech" and not "text", its default.

    The prompt then ends with `begin_id`, and the answer with the speech. A model that speaks may otherwise decide so
    itself, after text, in any turn.
    """
    respond = sample.metadata.get("respond", "text")
    if respond not in ("text", "speech"):
        raise ValueError(f'sample {sample.id!r}: metadata "respond" is {respond!r}; give "text" or "speech"')
    if respond == "speech" and sample.turns:
        raise ValueError(f'sample {sample.id!r}: a stream\'s turns begin with text; leave "respond" out')
    return bool(respond == "speech")


def _with_placeholders(policy: AudioPolicy, pieces: Sequence[str | AudioClip]) -> str:
    return "".join(
        str(policy.backbone.audio_token) * policy.audio.num_tokens(p) if isinstance(p, AudioClip) else p for p in pieces
    )


def _encode(policy: AudioPolicy, text: str) -> Tensor:
    return torch.tensor(policy.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)


def _token(policy: AudioPolicy, id: int) -> str:
    return str(policy.tokenizer.convert_ids_to_tokens(id))


def _speech_as_text(policy: AudioPolicy, message: Message, frames: list[Tensor]) -> Message:
    """The message with its speech written as tokens; the codes [N, Q] are appended to `frames`."""
    layout = policy.speech
    if layout is None or not (message.role == "assistant" or policy.backbone.audio_token is None):
        return message
    content: list[str | AudioClip] = []
    for piece in message.content:
        if isinstance(piece, AudioClip):
            rows = layout.rows(policy.codes(piece))
            frames.append(rows.codes[:-1])
            piece = "".join(_token(policy, i) for i in (layout.begin_id, *rows.ids.tolist()))
        content.append(piece)
    return replace(message, content=tuple(content))


def _codes_at(policy: AudioPolicy, ids: Tensor, frames: Sequence[Tensor]) -> Tensor | None:
    """Codes [P, Q] for ids [P]: `frames` in order where an id stands for a frame, -1 elsewhere."""
    layout = policy.speech
    if layout is None or not frames:
        return None
    codes = torch.full((len(ids), layout.codebooks), -1)
    codes[(ids == layout.frame_id) | (ids == layout.delay_id)] = torch.cat(list(frames))
    return codes

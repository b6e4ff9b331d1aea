"""From chat messages and chunks of audio to the token ids that a policy reads.

Shapes: P tokens of a prompt, N tokens and frames of a speech, Q codebooks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from audiorl.audio import AudioClip, AudioError, seconds
from audiorl.data.schema import FieldError
from audiorl.models.audio_encoder import AudioEncoder
from audiorl.models.backbone import Backbone
from audiorl.models.speech import FrameLayout
from audiorl.types import Message, Sample
from tokenizers_audio.protocol import AudioTokenizer


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
    """Write samples as prompts, or tell from headers that one cannot be written."""

    tokenizer: PreTrainedTokenizerBase
    backbone: Backbone
    audio: AudioEncoder
    speech: FrameLayout | None
    codes: Callable[[AudioClip], Tensor]
    """A clip in codec codes [Q, F]."""
    codec: Callable[[], AudioTokenizer]
    reserved: re.Pattern[str]
    """Finds a token that no text may hold."""
    max_tokens: int | None
    """The model's positions."""
    counts_audio: bool
    """True where audio takes positions; in Whisper only text does."""

    def encode(self, sample: Sample) -> Prompt:
        """Return the sample's messages as the model reads them.

        A clip for the audio encoder becomes its placeholder, once per audio token. If the model speaks, the assistant's
        clips are speech, in frames; without an audio encoder all clips are. Where the answer is to be spoken
        (`wants_speech`), the prompt ends with the token that opens speech. Raises ValueError that names the sample.
        """
        frames: list[Tensor] = []

        def spoken(clip: AudioClip) -> str:
            speech = self._layout.tokens(self.codes(clip))
            frames.append(speech.codes[:-1])
            return "".join(self._token(i) for i in (self._layout.begin_id, *speech.ids.tolist()))

        try:
            pieces = self._pieces(sample, spoken)
            ids = self._ids(self._with_placeholders(pieces))
            audio = 0 if self.counts_audio else sum(self.audio.num_tokens(p) for p in pieces if not isinstance(p, str))
            self.check_length(len(ids) - audio)
        except ValueError as error:
            name = f"sample {sample.id!r}: "
            raise ValueError(f"{name}{str(error).removeprefix(name)}") from error
        codes = None
        if self.speech is not None and frames:
            codes = torch.full((len(ids), self.speech.codebooks), -1)
            codes[(ids == self.speech.frame_id) | (ids == self.speech.delay_id)] = torch.cat(frames)
        return Prompt(ids, codes, tuple(p for p in pieces if isinstance(p, AudioClip)))

    def check(
        self, sample: Sample, new_tokens: int = 0, answers: Sequence[str] = (), speech: Sequence[AudioClip] = ()
    ) -> None:
        """Raise FieldError for a sample that `encode` refuses, or that has no room for what is written after it.

        That is `new_tokens`, or `answers` to be learned and recordings of `speech`. It takes lengths from the clips'
        headers and encodes nothing. `field` is "audio", "prompt", "answer" or a column that the message is about.
        """
        frames = 0

        def spoken(clip: AudioClip) -> str:
            nonlocal frames
            frames += math.ceil(seconds(clip) * self.codec().frame_rate) + self._layout.codebooks
            return self._token(self._layout.begin_id) + self._token(self._layout.end_id)

        try:
            pieces = self._pieces(sample, spoken)
            for turn in sample.turns:
                pieces += self.backbone.chunk(turn.audio)
        except FieldError:
            raise
        except ValueError as error:
            field = "audio" if isinstance(error, AudioError) else "prompt"
            raise FieldError(field, str(error).removeprefix(f"sample {sample.id!r}: ")) from error
        try:
            audio = sum(self.audio.expected_tokens(p) for p in pieces if isinstance(p, AudioClip))
            for clip in speech if self.speech is not None else ():
                spoken(clip)
        except ValueError as error:
            raise FieldError("audio", str(error)) from error
        for answer in answers:
            self.check_learned(answer)
        if self.max_tokens is None:
            return
        text = "".join(p for p in pieces if isinstance(p, str))
        others = frames + (audio if self.counts_audio else 0)
        # A token has a byte or more of the normalised text, which in NFC is at most three times as long.
        if 3 * sum(len(t.encode()) for t in (text, *answers)) + others + new_tokens <= self.max_tokens:
            return
        prompt = len(self._ids(text)) + others
        longest = max((p for m in sample.messages for p in m.content if isinstance(p, str)), key=len, default="")
        in_audio = others > prompt - others
        self.check_length(prompt, holding="" if in_audio else longest, field="audio" if in_audio else "prompt")
        learned = sum(len(self._ids(answer)) + 1 for answer in answers)
        self.check_length(prompt, learned, new_tokens, holding=max(answers, key=len, default=longest))

    def check_length(
        self, prompt: int, learned: int = 0, new_tokens: int = 0, holding: str = "", field: str = "prompt"
    ) -> None:
        """Raise FieldError for a prompt, with the tokens learned or written after it, beyond the model's positions."""
        if self.max_tokens is None or prompt + learned + new_tokens <= self.max_tokens:
            return
        reads = f"the model reads at most {self.max_tokens}{'' if self.counts_audio else ' of text'}"
        if prompt > self.max_tokens or not (learned or new_tokens):
            cut = "shorten the text, or cut the clip with start and duration"
            raise FieldError(field, f"its prompt has {prompt} tokens, {reads}; {cut}", holding)
        if prompt + learned > self.max_tokens:
            what = f"its prompt has {prompt} tokens and the transcript or answer to learn {learned}, {reads}"
            raise FieldError("answer", f"{what}; shorten the transcript or answer, or divide the recording", holding)
        what = f"its prompt has {prompt} tokens and {new_tokens} may be written after it, {reads}"
        options = "--sampling.max-new-tokens, of held-out rows --eval-tokens"
        raise FieldError("prompt", f"{what}; shorten the text, or let fewer be written ({options})", holding)

    def check_learned(self, text: str) -> None:
        """Raise FieldError for a text to be learned with a reserved token, which would be learned as that token."""
        if match := self.reserved.search(text):
            what = f"a text to be learned contains the reserved token {match[0]}"
            raise FieldError("answer", f"{what}; remove it", match[0])

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

    @property
    def _layout(self) -> FrameLayout:
        assert self.speech is not None
        return self.speech

    def _pieces(self, sample: Sample, spoken: Callable[[AudioClip], str]) -> list[str | AudioClip]:
        """Return the prompt as text and clips; `spoken` writes a clip that is read as frames."""
        messages = []
        for message in sample.messages:
            # A special token such as <|im_start|> would let a message end its own turn, also one in two pieces, which
            # a template may join without the space around them.
            for text in _joined(message), _joined(message, str.strip):
                if match := self.reserved.search(text):
                    what = f"a message contains a reserved token such as <|im_start|>: {match[0]}"
                    raise FieldError("prompt", f"{what}; remove it", match[0])
            # With an audio encoder only the assistant speaks; without one every clip is read as frames.
            if self.speech is not None and (message.role == "assistant" or self.backbone.audio_token is None):
                content = tuple(spoken(c) if isinstance(c, AudioClip) else c for c in message.content)
                message = replace(message, content=content)
            messages.append(message)
        pieces = list(self.backbone.chat(messages))
        if wants_speech(sample):
            if self.speech is None:
                raise ValueError("asks for speech, but the model writes text only; dualize it")
            pieces.append(self._token(self.speech.begin_id))
        return pieces


def _joined(message: Message, change: Callable[[str], str] = str) -> str:
    """Return the texts of a message as templates join them; a clip lies between the texts around it."""
    return "".join(change(c) if isinstance(c, str) else "\n" for c in message.content)


def reserved_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Find, in a text, a token that the tokenizer reserves: it would be read as that token and not as its letters."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = special | {token for token in tokenizer.get_added_vocab() if token.startswith("<|")}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


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

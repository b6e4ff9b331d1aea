"""From chat messages and chunks of audio to the token ids that a policy reads.

Shapes: P tokens of a prompt, N tokens and frames of a speech, Q codebooks.
"""

from __future__ import annotations

import math
import re
import unicodedata
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
from audiorl.pictures import Picture, PictureError
from audiorl.types import Message, Sample
from tokenizers_audio.protocol import AudioTokenizer


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the model reads it: ids [P], codes [P, Q] where it holds frames, the clips for the audio encoder and
    the pictures for the vision tower, in the order of their placeholders."""

    ids: Tensor
    codes: Tensor | None = None
    audio: tuple[AudioClip, ...] = ()
    text: Tensor | None = None
    """[K] int64: of a talker, the rest of the text that it says, beside its frames; further frames repeat the last."""
    images: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, ids: Tensor, audio: tuple[AudioClip, ...]) -> Prompt:
        """Append text tokens with the clips behind their placeholders."""
        codes = self.codes
        if codes is not None:
            codes = torch.cat([codes, codes.new_full((len(ids), codes.shape[1]), -1)])
        return Prompt(torch.cat([self.ids, ids]), codes, self.audio + audio, images=self.images)


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
    picture_tokens: Callable[[Picture], int]
    """Counts what a picture becomes, from its header."""
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
            clips = [p for p in pieces if isinstance(p, AudioClip)]
            audio = 0 if self.counts_audio else sum(map(self.audio.num_tokens, clips))
            self.check_length(len(ids) - audio)
        except ValueError as error:
            name = f"sample {sample.id!r}: "
            what = f"{name}{str(error).removeprefix(name)}"
            if isinstance(error, FieldError):
                raise FieldError(error.field, what, error.holding) from error
            raise ValueError(what) from error
        codes = None
        if self.speech is not None and frames:
            codes = torch.full((len(ids), self.speech.codebooks), -1)
            codes[(ids == self.speech.frame_id) | (ids == self.speech.delay_id)] = torch.cat(frames)
        return Prompt(ids, codes, tuple(clips), images=tuple(p for p in pieces if isinstance(p, Picture)))

    def check(
        self,
        sample: Sample,
        new_tokens: int = 0,
        answers: Sequence[str] = (),
        speech: Sequence[Sequence[AudioClip]] = (),
    ) -> None:
        """Raise FieldError for a sample that `encode` refuses, or that has no room for what is written after it.

        That is `new_tokens`, of a spoken answer codec frames, or `answers` to be learned and of each that is spoken the
        recordings of its `speech`. It takes lengths from the clips'
        headers and encodes nothing. `field` is "audio", "prompt", "answer" or a column that the message is about.
        """
        frames = 0

        def rows(clips: Sequence[AudioClip]) -> int:
            rate = self.codec().frame_rate
            return self._layout.rows(sum(math.ceil(seconds(clip) * rate) for clip in clips))

        def spoken(clip: AudioClip) -> str:
            nonlocal frames
            frames += rows([clip])
            return self._token(self._layout.begin_id) + self._token(self._layout.end_id)

        try:
            pieces = list(self._pieces(sample, spoken))
            for turn in sample.turns:
                pieces += self.backbone.chunk(turn.audio)
        except FieldError:
            raise
        except ValueError as error:
            field = {AudioError: "audio", PictureError: "images"}.get(type(error), "prompt")
            raise FieldError(field, str(error).removeprefix(f"sample {sample.id!r}: ")) from error
        try:
            audio = sum(self.audio.expected_tokens(p) for p in pieces if isinstance(p, AudioClip))
            opened = self.speech is not None and wants_speech(sample)
            for clips in speech if self.speech is not None else ():
                # What opens and closes speech within an answer; a prompt opens it, and then its end is the turn's.
                frames += rows(clips) + 2 * (not opened) if clips else 0
        except ValueError as error:
            raise FieldError("audio", str(error)) from error
        try:
            seen = sum(self.picture_tokens(p) for p in pieces if isinstance(p, Picture))
        except ValueError as error:
            raise FieldError("images", str(error)) from error
        for answer in answers:
            self.check_learned(answer)
        if self.max_tokens is None:
            return
        if new_tokens and opened:
            new_tokens = self._layout.rows(new_tokens) + 1
        texts = [p for p in pieces if isinstance(p, str)]
        others = frames + seen + (audio if self.counts_audio else 0)
        # A token has a byte or more of the normalised text, which in NFC is at most three times as long.
        if 3 * sum(len(t.encode()) for t in (*texts, *answers)) + others + new_tokens <= self.max_tokens:
            return
        prompt = self._count(texts) + others
        longest = max((p for m in sample.messages for p in m.content if isinstance(p, str)), key=len, default="")
        in_audio = others > prompt - others
        field = "prompt" if not in_audio else "images" if 2 * seen > others else "audio"
        self.check_length(prompt, holding="" if in_audio else longest, field=field)
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
            cut = "give fewer pictures or smaller ones" if field == "images" else cut
            raise FieldError(field, f"its prompt has {prompt} tokens, {reads}; {cut}", holding)
        if prompt + learned > self.max_tokens:
            what = f"its prompt has {prompt} tokens and the transcript or answer to learn {learned}, {reads}"
            raise FieldError("answer", f"{what}; shorten the transcript or answer, or divide the recording", holding)
        what = f"its prompt has {prompt} tokens and {new_tokens} may be written after it, {reads}"
        options = "--sampling.max-new-tokens, of speech --sampling.max-frames, of held-out rows --eval-tokens"
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

    def _count(self, texts: Sequence[str]) -> int:
        """Return how many tokens the text of a prompt has."""
        return len(self._ids("".join(texts)))

    def _token(self, id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(id))

    def _with_placeholders(self, pieces: Sequence[str | AudioClip | Picture]) -> str:
        def written(piece: str | AudioClip | Picture) -> str:
            if isinstance(piece, AudioClip):
                return str(self.backbone.audio_token) * self.audio.num_tokens(piece)
            if isinstance(piece, Picture):
                return str(self.backbone.image_token) * self.picture_tokens(piece)
            return piece

        return "".join(map(written, pieces))

    @property
    def _layout(self) -> FrameLayout:
        assert self.speech is not None
        return self.speech

    def _pieces(self, sample: Sample, spoken: Callable[[AudioClip], str]) -> Sequence[str | AudioClip | Picture]:
        """Return the prompt as text and clips; `spoken` writes a clip that is read as frames."""
        if sample.images and self.backbone.image_token is None:
            blind = f"{self.backbone.name} reads no pictures here; leave them out (docs: Which models)"
            raise FieldError("images", blind)
        if sample.images and sample.turns:
            raise FieldError("images", "a stream reads no pictures; leave them out")
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
        self._check_hotwords(sample)
        pieces = list(self.backbone.chat(messages))
        if wants_speech(sample):
            if self.speech is None:
                raise ValueError("asks for speech, but the model writes text only; dualize it")
            pieces.append(self._token(self.speech.begin_id))
        return pieces

    def _check_hotwords(self, sample: Sample) -> None:
        """Raise FieldError for a hotword that the tokenizer does not write, as an unknown character is."""
        words = [str(word) for word in sample.metadata.get("hotwords") or ()]

        def read_back(text: str) -> str:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            return unicodedata.normalize("NFC", self.tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip())

        if words and read_back(", ".join(words)) != ", ".join(words):
            for word in words:
                if (read := read_back(word)) != word:
                    what = f"the model's tokenizer does not write the hotword {word!r}, it reads {read!r} back"
                    raise FieldError("hotwords", f"{what}; leave it out, or spell it otherwise")


def _joined(message: Message, change: Callable[[str], str] = str) -> str:
    """Return the texts of a message as templates join them; a clip lies between the texts around it."""
    return "".join(change(c) if isinstance(c, str) else "\n" for c in message.content)


def reserved_tokens(tokenizer: PreTrainedTokenizerBase, written: str = "") -> re.Pattern[str]:
    """Find, in a text, a token that is reserved: it would be read as that token and not as its letters.

    Reserved are the tokenizer's special tokens, added ones that begin with "<|", and those in what is `written` around
    texts and clips. Other added tokens are text in one piece: <answer>, Gemma's <table> and its runs of newlines.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    added = {token for token in tokenizer.get_added_vocab() if token.strip() and token not in THOUGHT}
    tokens = special | {token for token in added if token.startswith("<|") or token in written}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


THOUGHT = ("<think>", "</think>")
"""A template may open a thought; what thinks and answers writes these itself."""


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


def chatml(messages: Sequence[Message], default_system: str | None = DEFAULT_SYSTEM) -> list[str | AudioClip | Picture]:
    """Write a conversation as Qwen's models read it: text and what stands between it, up to the assistant's turn."""
    pieces: list[str | AudioClip | Picture] = []
    if default_system is not None and (not messages or messages[0].role != "system"):
        pieces.append(f"<|im_start|>system\n{default_system}<|im_end|>\n")
    for message in messages:
        pieces += [f"<|im_start|>{message.role}\n", *message.content, "<|im_end|>\n"]
    return [*pieces, "<|im_start|>assistant\n"]


def chatml_template(audio: str = "", default_system: str | None = DEFAULT_SYSTEM, image: str = "") -> str:
    """Return `chatml` as a Jinja chat template. audio, image: how a clip and a picture are written."""
    system = f"<|im_start|>system\\n{default_system}<|im_end|>\\n"
    return "".join(
        [
            f"{{%- if messages[0].role != 'system' -%}}{{{{- '{system}' }}}}{{%- endif -%}}" if default_system else "",
            "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' }}",
            "{%- if message.content is string -%}{{- message.content }}{%- else -%}",
            "{%- for part in message.content -%}{%- if 'text' in part -%}{{- part.text }}",
            f"{{%- elif part.type == 'image' -%}}{{{{- {image!r} }}}}" if image else "",
            f"{{%- else -%}}{{{{- {audio!r} }}}}",
            "{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' }}{%- endfor -%}",
            "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}\n",
        ]
    )

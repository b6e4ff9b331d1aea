"""The values that flow through audiorl. All frozen: make a new one, don't edit.

Shapes: L tokens of one stream, N sampled tokens, Q codebooks.

A worked example. An interpreter hears two chunks and speaks after the second::

    Segment(prompt_ids=[s, a, a], ids=[w])          # chunk 1 observed, <wait> sampled
    Segment(prompt_ids=[a, a],    ids=[h, i, e])    # chunk 2 observed, "hi" and <end> sampled

    stream     s a a w a a h i e     Experience.ids
    loss_mask  0 0 0 1 0 0 1 1 1     only what was sampled is trained on
    rewards    . . . 0 . . 0 0 1     one reward, placed on the last sampled token
    advantages . . . A . . A A A     GRPO: the group-relative score on every sampled token

Question answering is the same rollout with one segment.

A model that speaks writes frames of Q codes. A frame is one row like any token: its id is the model's frame token, and
its codes stand in another tensor. Only codes that were sampled count, not those that the delay pattern forces (Q = 2,
codes a b / c d, B and E begin and end a codebook)::

    ids        h  i  [  f  f  f  f  f  ]      [ and ] open and close speech, f is a frame
    codes      -  -  -  B  a  b  E  E  -      codebook 0
               -  -  -  B  B  c  d  E  -      codebook 1, one row later
    code_mask  1  1  1  0  1  1  1  0  0      codebook 0; of a text token the first column stands for the token
               0  0  0  0  0  1  1  0  0      codebook 1
    loss_mask  1  1  1  0  1  1  1  0  0      any of them sampled
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from audiorl.audio import AudioClip

StopReason = Literal["eos", "stop", "length", "paused"]
"""A stop token, a stop string, the length limit; "paused": a later step goes on with the answer."""


@dataclass(frozen=True)
class Message:
    """One chat turn; `content` interleaves text and audio in the order the model reads them."""

    role: Literal["system", "user", "assistant"]
    content: tuple[str | AudioClip, ...]


@dataclass(frozen=True)
class Turn:
    """One step of a stream: a chunk of audio, and what can be translated once it has been read. Made by the data
    reader."""

    audio: AudioClip
    """The chunk."""
    end: float
    """Seconds of the source read after it."""
    reference: str = ""
    """y*_t: gold text that can be said now, "" for nothing yet."""
    source: str = ""
    """The source words behind the reference, "" if unknown."""
    reference_seconds: float | None = None
    """Duration of the reference when spoken; None if unknown."""
    speech: tuple[AudioClip, ...] = ()
    """Recordings of the reference, in order, for a policy that speaks."""


@dataclass(frozen=True)
class Sample:
    """One prompt with everything its rewards need, made by a data reader. It carries its own audio."""

    id: str
    """Unique in its data set."""
    messages: tuple[Message, ...]
    """The prompt."""
    references: tuple[str, ...] = ()
    """Gold texts: the answer of a question, the transcript of a clip."""
    choices: tuple[str, ...] = ()
    """Options of a multiple-choice question; empty for open ones."""
    task: str = ""
    """Name by which evaluations group samples."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Every manifest field that has no place of its own."""
    turns: tuple[Turn, ...] = ()
    """Of a stream: the messages come first, then the policy writes one segment after each turn."""

    @property
    def audio(self) -> tuple[AudioClip, ...]:
        """Every clip, in order: those of the messages, then those of the turns."""
        prompt = tuple(c for m in self.messages for c in m.content if isinstance(c, AudioClip))
        return prompt + tuple(t.audio for t in self.turns)


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens that were observed, then tokens that were sampled. The engine fills in every field.

    P observed and N sampled tokens, Q codebooks of a model that speaks.
    """

    prompt_ids: Tensor
    """[P] int64: observed tokens, audio placeholders expanded to the encoder's frame count."""
    ids: Tensor
    """[N] int64: sampled tokens, the stop token included."""
    logprobs: Tensor
    """[N] float32, or [N, Q]: the engine's log-probs under the distribution it sampled from."""
    text: str = ""
    """The sampled tokens decoded, without special tokens."""
    audio: tuple[AudioClip, ...] = ()
    """The clips behind the placeholders of prompt_ids, in order."""
    stop_reason: StopReason = "eos"
    """A stop token, a stop string, or the length limit; "paused" where the answer has not ended."""
    policy_version: int = 0
    """Updates that the weights had received, those that sampled the last token."""
    source_time: float | None = None
    """Seconds of source read when the segment was complete."""
    emit_time: float | None = None
    """Seconds of wall clock when the segment was complete."""
    decoder_passes: int | None = None
    """Forward passes of the decoder in this turn of a stream, with those for tokens that a schedule cut off."""
    codes: Tensor | None = None
    """[N, Q] int64 in delayed rows, -1 where a row is no frame."""
    prompt_codes: Tensor | None = None
    """[P, Q] int64, likewise."""
    code_mask: Tensor | None = None
    """[N, Q] bool: which codes were sampled; the delay pattern forces the others."""
    policy_versions: Tensor | None = None
    """[N] int64: the version that sampled each token, of an answer that was paused; None: `policy_version` for all."""


@dataclass(frozen=True)
class Score:
    """A reward for one rollout, made by a `Reward`."""

    total: float
    """What the advantage is computed from."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts for metrics and reports."""
    per_segment: tuple[float, ...] | None = None
    """Optional credit per segment, in place of the total."""
    per_token: tuple[float, ...] | None = None
    """Optional credit per sampled token."""
    segment_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Named parts of per_segment for reports; NaN where a part is undefined."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of a weighted sum the weights of the parts that add up to the total, for advantages that treat them one by one.
    """


@dataclass(frozen=True, eq=False)
class Rollout:
    """One trajectory of the policy on one sample. Made by the engine without a score; the collector adds the
    reward's."""

    sample: Sample
    """What was asked."""
    segments: tuple[Segment, ...]
    """One for an answer, one per turn for a stream."""
    group_id: str
    """Equal for rollouts of the same prompt."""
    index: int = 0
    """Number within its group."""
    score: Score | None = None
    """Filled in by the collector."""
    spoken_audio: AudioClip | None = None
    """The recording of its speech; filled in when recorded rollouts are read."""

    @property
    def text(self) -> str:
        """Everything the policy wrote, segments joined; special tokens are left out."""
        return "".join(s.text for s in self.segments)

    @property
    def num_sampled(self) -> int:
        """Tokens and frames."""
        return sum(len(s.ids) for s in self.segments)

    @property
    def speaks(self) -> bool:
        """Whether any segment holds codec frames, observed or sampled."""
        return any(s.codes is not None or s.prompt_codes is not None for s in self.segments)

    @property
    def audio(self) -> tuple[AudioClip, ...]:
        return tuple(c for s in self.segments for c in s.audio)

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"{self.sample.id!r} (group {self.group_id}, answer {self.index})"

    def _repr_html_(self) -> str:
        """Prompt, text, gold answers, scores and players, for notebooks."""
        contents = (c for m in self.sample.messages for c in m.content)
        prompt = "".join(html.escape(c) if isinstance(c, str) else c._repr_html_() for c in contents)
        stream = "".join(turn.audio._repr_html_() for turn in self.sample.turns)
        gold = self.sample.references or tuple(t.reference for t in self.sample.turns if t.reference)
        rows = {"prompt": prompt, "stream": stream, "references": html.escape(" | ".join(gold))}
        rows["text"] = html.escape(self.text)
        rows["speech"] = "" if self.spoken_audio is None else self.spoken_audio._repr_html_()
        if self.score is not None:
            values = {"total": self.score.total, **self.score.parts}
            rows["score"] = html.escape(", ".join(f"{name} {value:.3g}" for name, value in values.items()))
        body = "".join(f"<tr><th>{name}</th><td>{row}</td></tr>" for name, row in rows.items() if row)
        return f"<table>{body}</table>"

    def with_score(self, score: Score) -> Rollout:
        return dataclasses.replace(self, score=score)


@dataclass(frozen=True, eq=False)
class Experience:
    """One rollout as token streams of equal length L; entry t belongs to token t. No padding.

    `from_rollout` fills in what comes from the engine and the reward; later stages fill in the fields that are None.
    Streams are 0 where `loss_mask` is False. Of a model that speaks log-probs are [L, Q], a text token's in column 0.
    """

    ids: Tensor
    """[L] int64."""
    loss_mask: Tensor
    """[L] bool: True where the token was sampled."""
    prompt_length: int
    """Tokens before the first sampled one; the members of a group share exactly these."""
    audio: tuple[AudioClip, ...] = ()
    """The clips behind the audio placeholders, in order."""
    group_id: str = ""
    """Equal for responses to the same prompt."""
    segment: Tensor | None = None
    """[L] int64: the segment of its rollout that a token belongs to, from 0."""
    engine_logprobs: Tensor | None = None
    """[L] float32, from the engine."""
    old_logprobs: Tensor | None = None
    """[L] float32: the policy before the step's updates; filled in by the trainer when it needs them."""
    ref_logprobs: Tensor | None = None
    """[L] float32: the reference; filled in by the trainer, or by processes that hold the reference."""
    rewards: Tensor | None = None
    """[L] float32: the score placed on tokens."""
    values: Tensor | None = None
    """[L] float32: the critic; filled in by the trainer."""
    advantages: Tensor | None = None
    """[L] float32: filled in by the driver (group estimators) or by the trainer."""
    returns: Tensor | None = None
    """[L] float32: filled in by the trainer with `gae`."""
    name: str = ""
    """The rollout's name in error messages."""
    score: float = 0.0
    """The total of its Score."""
    score_terms: tuple[tuple[float, float], ...] = ()
    """(value, weight) of the terms whose weighted sum is the score; empty where it is no such sum."""
    greedy_score: float = 0.0
    """The score of the greedy answer to its prompt, for ReMax."""
    codes: Tensor | None = None
    """[L, Q] int64, -1 where a row is no frame."""
    code_mask: Tensor | None = None
    """[L, Q] bool: which codes were sampled."""
    teacher_prompt: Sample | None = None
    """The prompt as the teacher of distillation reads it; filled in by the driver."""
    teacher: TeacherOutput | None = None
    """Filled in by the trainer, or by processes that hold the teacher."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_sampled(self) -> int:
        """N: sampled tokens and frames."""
        return int(self.loss_mask.sum())

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Experience:
        """Lay the segments of a rollout end to end; its score, if it has one, becomes token rewards."""
        segments, score = rollout.segments, rollout.score
        ids = torch.cat([t for s in segments for t in (s.prompt_ids, s.ids)])
        response = torch.cat(
            [
                torch.full((len(t),), sampled, dtype=torch.bool)
                for s in segments
                for t, sampled in ((s.prompt_ids, False), (s.ids, True))
            ]
        )
        lengths = torch.tensor([len(s.prompt_ids) + len(s.ids) for s in segments])
        mask, codes, code_mask = response, None, None
        logprobs = torch.zeros(len(ids))
        if rollout.speaks:
            codes = _laid_out(segments)
            code_mask = torch.zeros_like(codes, dtype=torch.bool)
            code_mask[response] = torch.cat([_code_mask(s, codes.shape[1]) for s in segments])
            mask = code_mask.any(1)
            logprobs = torch.zeros(codes.shape)
            logprobs[response] = torch.cat([_in_columns(s.logprobs.float(), codes.shape[1]) for s in segments])
        else:
            logprobs[response] = torch.cat([s.logprobs.float() for s in segments])
        return cls(
            ids=ids,
            loss_mask=mask,
            prompt_length=len(segments[0].prompt_ids),
            audio=rollout.audio,
            group_id=rollout.group_id,
            segment=torch.arange(len(lengths)).repeat_interleave(lengths),
            engine_logprobs=logprobs,
            rewards=None if score is None else _token_rewards(rollout, score, response, mask),
            name=rollout.name,
            score=0.0 if score is None else score.total,
            score_terms=() if score is None else tuple((score.parts[n], w) for n, w in score.weights.items()),
            codes=codes,
            code_mask=code_mask,
        )

    def replace(self, **changes: Any) -> Experience:
        return dataclasses.replace(self, **changes)


def _laid_out(segments: Sequence[Segment]) -> Tensor:
    """The codes [L, Q] of all rows, -1 where a row is no frame."""
    width = next(c.shape[1] for s in segments for c in (s.prompt_codes, s.codes) if c is not None)
    parts = []
    for s in segments:
        for ids, codes in ((s.prompt_ids, s.prompt_codes), (s.ids, s.codes)):
            parts.append(torch.full((len(ids), width), -1) if codes is None else codes)
    return torch.cat(parts)


def _code_mask(segment: Segment, width: int) -> Tensor:
    """[N, Q] bool; of a segment without frames every token, in column 0."""
    if segment.code_mask is not None:
        return segment.code_mask
    return _in_columns(torch.ones(len(segment.ids), dtype=torch.bool), width)


def _in_columns(values: Tensor, width: int) -> Tensor:
    """[N] in column 0 of [N, Q], with nothing in the others; [N, Q] as it is."""
    if values.dim() == 2:
        return values
    return torch.nn.functional.pad(values[:, None], (0, width - 1))


def _token_rewards(rollout: Rollout, score: Score, response: Tensor, mask: Tensor) -> Tensor:
    """The score on its tokens, [L]: per token; else per segment, on the segment's last token; else on the last one.

    `response` [L] marks the tokens of the segments' responses, `mask` [L] those among them that were sampled. A reward
    that falls on a forced token, or on an empty segment, goes to the sampled token before it, or to the first one.
    Without any sampled token nothing is rewarded.
    """
    rewards = torch.zeros(len(mask))
    if not bool(mask.any()):
        return rewards
    places = response.nonzero().squeeze(-1)
    if score.per_token is not None:
        placed = torch.tensor(score.per_token, dtype=torch.float32)
    elif score.per_segment is not None:
        ends = torch.tensor([len(s.ids) for s in rollout.segments]).cumsum(0) - 1
        places = places[ends.clamp(min=0)]
        placed = torch.tensor(score.per_segment, dtype=torch.float32)
    else:
        places, placed = places[-1:], torch.tensor([score.total])
    sampled = mask.nonzero().squeeze(-1)
    before = (mask.cumsum(0)[places] - 1).clamp(min=0)
    return rewards.index_add_(0, sampled[before], placed)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Experiences laid end to end in one row of T tokens, made by `pack_experiences`. Sequences never see each
    other."""

    ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    loss_mask: Tensor
    """[T] bool."""
    span_ids: Tensor
    """[T] int64: the span that a token belongs to."""
    span_parents: Tensor
    """[spans] int64: the span whose tokens it also attends to (its group's shared prompt), or -1."""
    predecessor: Tensor
    """[T] int64: the row whose hidden state predicts this token, -1 for the first of a prompt; with a shared prompt not
    always the row before."""
    audio: tuple[AudioClip, ...]
    """The clips behind the placeholders, in row order."""
    source: tuple[Tensor, ...]
    """Per experience the rows [L] of its tokens: gathers per-token results back into streams."""
    codes: Tensor | None = None
    """[T, Q] int64, -1 where a row is no frame; None when no row is one."""
    code_mask: Tensor | None = None
    """[T, Q] bool."""


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """What the model would write in a turn, before a schedule shortens it; filled in by the engine.

    n tokens, A audio tokens.
    """

    ids: tuple[int, ...]
    """[n], without the token that ends the turn."""
    earlier: tuple[tuple[int, ...], ...] = ()
    """The hypotheses of earlier turns, newest last, without the tokens at their start that have been written since. One
    that does not begin with these is left out."""
    attention: Tensor | None = None
    """[n, A] float32: how the prediction of each token attends to all audio tokens so far; rows sum to 1. None unless
    the review names layers."""


class Review(Protocol):
    """Shortens what the model wrote in a turn, such as AlignAtt. Rollouts under it are greedy."""

    @property
    def earlier(self) -> int:
        """How many hypotheses of earlier turns it compares with."""
        ...

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The decoder layers whose attention it reads, from 0, () for all; None: it reads no attention."""
        ...

    def keep(self, hypothesis: Hypothesis) -> int:
        """How many tokens are written, 0 to n. What is cut off is not written, and the model does not see it later."""
        ...


class Schedule(Protocol):
    """Decides when to write, in place of the policy: how many words before the model writes, as wait-k does, or how
    much of what it wrote is kept, as AlignAtt does. In the last turn everything is kept."""

    def words(self, turn: int, turns: int, written: int) -> int | None:
        """Words to write in `turn` (from 0) of `turns` after `written`: 0 reads on, None leaves it to the model."""
        ...

    def count(self, text: str) -> int:
        """Words, or other units, that are written and cut as a whole."""
        ...

    @property
    def review(self) -> Review | None:
        """None keeps what the model writes."""
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """Ask an engine for rollouts of one sample."""

    sample: Sample
    """The prompt."""
    n: int = 1
    """Rollouts."""
    seed: int = 0
    """Makes each rollout reproducible, whatever else is in the batch."""
    group_id: str = ""
    """Given to the rollouts; "" takes the sample's id."""
    greedy: bool = False
    """Take the most probable token each time, whatever the engine's temperature."""
    schedule: Schedule | None = None
    """Of streams: takes the decisions to read or to write away from the policy."""
    token_limit: int | None = None
    """Tokens that each answer may sample now; one that has not ended by then comes back as "paused". None: no limit."""
    paused: tuple[Rollout, ...] = ()
    """Paused answers to go on with, `n` of them, in place of new ones. Their tokens and log-probs stay as they are."""

    def __post_init__(self) -> None:
        if self.paused and len(self.paused) != self.n:
            raise ValueError(f"sample {self.sample.id!r}: {len(self.paused)} paused answers, but n is {self.n}")


@dataclass(frozen=True)
class PolicyOutput:
    """What `Policy.forward` returns per sampled token [N], in the order of the batch's True `loss_mask` rows."""

    logprobs: Tensor
    """[N]; of a frame the sum over its sampled codes."""
    entropy: Tensor
    """[N]"""
    values: Tensor | None = None
    """[N], where a value head was asked for."""
    code_logprobs: Tensor | None = None
    """[N, Q] per codebook, a text token's in column 0, 0 where nothing was sampled; None when the batch has no
    frames."""
    hidden: Tensor | None = None
    """[N, H]: the decoder's states that predict the tokens."""


@dataclass(frozen=True, eq=False)
class TeacherOutput:
    """What a teacher says of the N sampled tokens of one response; computed once, kept on the CPU."""

    logprobs: Tensor
    """[N] float32."""
    entropy: Tensor
    """[N] float32, in nats."""
    counts: Tensor
    """[N] bool: the tokens that `DistillConfig.tokens` selects."""
    hidden: Tensor | None = None
    """[N, H]: the teacher's states that predict the tokens, for divergences over the vocabulary."""
    top_ids: Tensor | None = None
    """[N, K] int64: its most probable tokens."""
    top_logits: Tensor | None = None
    """[N, K + 1]: the logits of these, and of all other tokens as one."""


class Reward(Protocol):
    """Rewards are batched: they see all rollouts of a step at once and return one Score each, in order.

    One whose attribute `by_group` is true sees a group as soon as its answers have ended (`audiorl.rewards.early`).

    None in place of a Score skips the rollout: it takes no part in its group's baseline nor in the update.
    """

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[Score | None]: ...


class SpeechDecoder(Protocol):
    """Turns what a rollout sampled into sound, as its codec decodes it."""

    @property
    def sample_rate(self) -> int:
        """Hz of the waveforms."""
        ...

    def waveform(self, rollout: Rollout) -> np.ndarray | None:
        """Everything the rollout said, mono float32 [T]; None if it said nothing."""
        ...

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[np.ndarray | None]:
        """`waveform` of each; a decoder may be faster with several at a time."""
        return [self.waveform(r) for r in rollouts]


Ended = Callable[[Sequence[Rollout]], None]
"""Gets the rollouts of a request once all of them have ended."""


class RolloutEngine(Protocol):
    """Generates rollouts: `HFEngine` and `VLLMEngine` in one process, `GroupEngine` with all engines of a run.

    How its weights follow the trainer's is the engine's own affair; those of one process have `update_weights`.
    """

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """All rollouts of all requests, request by request, index ascending.

        `ended` may be called with those of a request before the others have ended.
        """
        ...


@runtime_checkable
class Sleep(Protocol):
    """The capability of an engine to free its GPU memory. Asleep it neither generates nor takes weights."""

    @property
    def can_sleep(self) -> bool:
        """Whether this one was made so that it can."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Policy(Protocol):
    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> PolicyOutput: ...

    def encode_audio(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [frames, H] embedding per clip, exactly as the decoder receives it."""
        ...

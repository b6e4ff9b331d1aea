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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from audiorl.audio import AudioClip

StopReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Message:
    """One chat turn; `content` interleaves text and audio in the order the model reads them."""

    role: Literal["system", "user", "assistant"]
    content: tuple[str | AudioClip, ...]


@dataclass(frozen=True)
class Turn:
    """One step of a stream: what is heard, and what can be said when it has been heard (y*_t, "" for nothing yet).

    `end`: seconds of the source heard by then. `source`: the words behind the reference, "" if unknown.
    `reference_seconds`: how long the reference lasts when spoken, None if unknown. `speech`: recordings of it, in
    order, for a policy that speaks.
    """

    audio: AudioClip
    end: float
    reference: str = ""
    source: str = ""
    reference_seconds: float | None = None
    speech: tuple[AudioClip, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One prompt with everything its rewards need. It carries its own audio, so text and features cannot slip apart.

    `references` holds gold texts: the answer of a question, the transcript of a clip. `choices` is empty for open
    questions. `metadata` keeps every manifest field that has no place of its own. A sample with `turns` is a stream:
    the messages come first, then the policy writes one segment after each turn.
    """

    id: str
    messages: tuple[Message, ...]
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    task: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()

    @property
    def audio(self) -> tuple[AudioClip, ...]:
        """Every clip in the order in which it is heard."""
        asked = tuple(c for m in self.messages for c in m.content if isinstance(c, AudioClip))
        return asked + tuple(t.audio for t in self.turns)


@dataclass(frozen=True, eq=False)
class Segment:
    """What was observed, then what was sampled.

    prompt_ids [P] int64: observed tokens, audio placeholders already expanded to the encoder's frame count.
    audio: the clips behind those placeholders, in order.
    ids [N] int64: sampled tokens, the stop token included.
    logprobs [N] float32: the engine's log-probs under the distribution it sampled from.
    Of a model that speaks also codes and prompt_codes [N or P, Q] int64 in delayed rows, -1 where a row is no frame,
    and code_mask [N, Q] bool, True for what was sampled; logprobs are [N, Q] then, 0 where nothing was.
    source_time, emit_time: seconds of source heard, and of wall clock passed, when the segment was complete.
    """

    prompt_ids: Tensor
    ids: Tensor
    logprobs: Tensor
    text: str = ""
    audio: tuple[AudioClip, ...] = ()
    stop_reason: StopReason = "eos"
    policy_version: int = 0
    source_time: float | None = None
    emit_time: float | None = None
    codes: Tensor | None = None
    prompt_codes: Tensor | None = None
    code_mask: Tensor | None = None


@dataclass(frozen=True)
class Score:
    """A reward for one rollout: `total` is what the advantage sees, `parts` what people read.

    Optionally one value per segment or per sampled token, for credit finer than the whole rollout. `segment_parts`:
    what those per segment are made of, NaN where undefined, for people too.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    per_segment: tuple[float, ...] | None = None
    per_token: tuple[float, ...] | None = None
    segment_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One trajectory of the policy on one sample. Rollouts with equal `group_id` answer the same prompt.

    `score`: filled in when the reward has scored it. `spoken_audio`: the recording of its speech, filled in when
    recorded rollouts are read.
    """

    sample: Sample
    segments: tuple[Segment, ...]
    group_id: str
    index: int = 0
    score: Score | None = None
    spoken_audio: AudioClip | None = None

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
        """Whether codes belong to it, written or heard."""
        return any(s.codes is not None or s.prompt_codes is not None for s in self.segments)

    @property
    def audio(self) -> tuple[AudioClip, ...]:
        return tuple(c for s in self.segments for c in s.audio)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.sample.id!r} (group {self.group_id}, answer {self.index})"

    def with_score(self, score: Score) -> Rollout:
        return dataclasses.replace(self, score=score)


@dataclass(frozen=True, eq=False)
class Experience:
    """One rollout as token streams of equal length L; entry t speaks of token t. No padding.

    ids [L] int64; loss_mask [L] bool, True where the token was sampled; engine_logprobs, old_logprobs, ref_logprobs,
    rewards, values, advantages, returns [L] float32, zero where loss_mask is False, None until computed.
    prompt_length: tokens before the first sampled one; a group's members share exactly these.
    segment [L] int64: the segment of its rollout that a token belongs to, from 0.
    audio: the clips behind the audio placeholders, in order.
    Of a model that speaks also codes [L, Q] int64, -1 where a row is no frame, and code_mask [L, Q] bool (see above);
    engine, old and reference log-probs are [L, Q] then, a text token's in column 0.
    name: what errors call it. score: the total of its Score; greedy_score: that of the greedy answer to its prompt,
    where ReMax asks for one.
    """

    ids: Tensor
    loss_mask: Tensor
    prompt_length: int
    audio: tuple[AudioClip, ...] = ()
    group_id: str = ""
    segment: Tensor | None = None
    engine_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rewards: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    name: str = ""
    score: float = 0.0
    greedy_score: float = 0.0
    codes: Tensor | None = None
    code_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_sampled(self) -> int:
        """N: sampled tokens and frames."""
        return int(self.loss_mask.sum())

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Experience:
        """Lay the segments of a rollout end to end; its score, if it has one, becomes token rewards."""
        segments = rollout.segments
        ids = torch.cat([t for s in segments for t in (s.prompt_ids, s.ids)])
        written = torch.cat(
            [
                torch.full((len(t),), sampled, dtype=torch.bool)
                for s in segments
                for t, sampled in ((s.prompt_ids, False), (s.ids, True))
            ]
        )
        lengths = torch.tensor([len(s.prompt_ids) + len(s.ids) for s in segments])
        mask, codes, code_mask = written, None, None
        logprobs = torch.zeros(len(ids))
        if rollout.speaks:
            codes = _laid_out(segments)
            code_mask = torch.zeros_like(codes, dtype=torch.bool)
            code_mask[written] = torch.cat([_code_mask(s, codes.shape[1]) for s in segments])
            mask = code_mask.any(1)
            logprobs = torch.zeros(codes.shape)
            logprobs[written] = torch.cat([_in_columns(s.logprobs.float(), codes.shape[1]) for s in segments])
        else:
            logprobs[written] = torch.cat([s.logprobs.float() for s in segments])
        return cls(
            ids=ids,
            loss_mask=mask,
            prompt_length=len(segments[0].prompt_ids),
            audio=rollout.audio,
            group_id=rollout.group_id,
            segment=torch.arange(len(lengths)).repeat_interleave(lengths),
            engine_logprobs=logprobs,
            rewards=None if rollout.score is None else _token_rewards(rollout, rollout.score, written, mask),
            name=rollout.name,
            score=0.0 if rollout.score is None else rollout.score.total,
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


def _token_rewards(rollout: Rollout, score: Score, written: Tensor, mask: Tensor) -> Tensor:
    """The score on its tokens, [L]: per token; else per segment, on the segment's last token; else on the last one.

    `written` [L] marks the segments' tokens, `mask` [L] those among them that were drawn. What falls on a token that
    was forced, or on a segment that wrote nothing, goes to the drawn token before it, or the first of all. Without any
    drawn token there is nothing to reward.
    """
    rewards = torch.zeros(len(mask))
    if not bool(mask.any()):
        return rewards
    places = written.nonzero().squeeze(-1)
    if score.per_token is not None:
        given = torch.tensor(score.per_token, dtype=torch.float32)
    elif score.per_segment is not None:
        ends = torch.tensor([len(s.ids) for s in rollout.segments]).cumsum(0) - 1
        places = places[ends.clamp(min=0)]
        given = torch.tensor(score.per_segment, dtype=torch.float32)
    else:
        places, given = places[-1:], torch.tensor([score.total])
    code_mask = mask.nonzero().squeeze(-1)
    before = (mask.cumsum(0)[places] - 1).clamp(min=0)
    return rewards.index_add_(0, code_mask[before], given)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Experiences laid end to end in one row of T tokens; sequences never see each other.

    ids, position_ids [T] int64; loss_mask [T] bool.
    span_ids [T] int64: which span a token belongs to. span_parents [number of spans] int64: the span whose tokens a
    span may also attend to (the shared prompt of its group), or -1.
    predecessor [T] int64: the row whose hidden state predicts this token, -1 for the first token of a prompt. With a
    shared prompt this is not always the row before.
    audio: the clips behind the placeholders, in row order.
    source: per experience, the rows of its L tokens [L]: gathers per-token results back into streams.
    codes [T, Q] int64, -1 where a row is no frame, and code_mask [T, Q] bool; None when no row is a frame.
    """

    ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    span_ids: Tensor
    span_parents: Tensor
    predecessor: Tensor
    audio: tuple[AudioClip, ...]
    source: tuple[Tensor, ...]
    codes: Tensor | None = None
    code_mask: Tensor | None = None


class Schedule(Protocol):
    """A fixed policy of listening and writing, such as wait-k, in words (or what `count` counts)."""

    def words(self, turn: int, turns: int, written: int) -> int | None:
        """How many to write in `turn` (from 0) of `turns` after `written`: 0 to listen on, None as the model likes."""
        ...

    def count(self, text: str) -> int: ...


@dataclass(frozen=True, eq=False)
class Request:
    """Ask an engine for `n` rollouts of one sample; `seed` makes each of them reproducible whatever the batch.

    `greedy` asks for the most probable token each time, whatever the engine's temperature. `schedule` takes the
    decisions to listen or to write away from the policy, for streams only.
    """

    sample: Sample
    n: int = 1
    seed: int = 0
    group_id: str = ""
    greedy: bool = False
    schedule: Schedule | None = None


@dataclass(frozen=True)
class PolicyOutput:
    """Per predicted token, in the order of the batch's True loss_mask rows [N]: log-prob, entropy, value.

    Of a frame the sums over its drawn codes, whose own log-probs are code_logprobs [N, Q] (a text token's in column 0,
    0 where nothing was drawn); None when the batch has no frames.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    code_logprobs: Tensor | None = None


class Reward(Protocol):
    """Rewards are batched: they see all rollouts of a step at once and return one Score each, in order.

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


class RolloutEngine(Protocol):
    """Writes rollouts. `policy_version` counts weight updates received."""

    policy_version: int

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """All rollouts of all requests, request by request, index ascending."""
        ...

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...


class Policy(Protocol):
    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> PolicyOutput: ...

    def encode_audio(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [frames, H] embedding per clip, exactly as the decoder receives it."""
        ...

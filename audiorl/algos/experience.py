"""Rollouts as token streams, and many of them as one packed row.

Shapes: L tokens of one stream, T of a packed row, N sampled tokens, Q codebooks. An interpreter hears two chunks and
speaks after the second (question answering is the same rollout with one segment)::

    Segment(prompt_ids=[s, a, a], ids=[w])          # chunk 1 observed, <wait> sampled
    Segment(prompt_ids=[a, a],    ids=[h, i, e])    # chunk 2 observed, "hi" and <end> sampled

    stream     s a a w a a h i e     Experience.ids
    loss_mask  0 0 0 1 0 0 1 1 1     only what was sampled is trained on
    rewards    . . . 0 . . 0 0 1     one reward, placed on the last sampled token
    advantages . . . A . . A A A     GRPO: the group-relative score on every sampled token

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.pictures import Picture
from audiorl.types import FlowPath, Rollout, Sample, Score


@dataclass(frozen=True, eq=False)
class Experience:
    """One rollout as token streams of equal length L; entry t belongs to token t. No padding.

    `from_rollout` fills in what comes from the engine and the reward; later stages fill in the fields that are None.
    Streams are 0 where `loss_mask` is False. Of a model that speaks log-probs are [L, Q], a text token's in column 0.
    """

    ids: Tensor  # [L] int64
    loss_mask: Tensor  # [L] bool: True where the token was sampled
    prompt_length: int  # Tokens before the first sampled one; the members of a group share exactly these
    audio: tuple[AudioClip, ...] = ()  # The clips behind the audio placeholders, in order
    group_id: str = ""  # Equal for responses to the same prompt
    segment: Tensor | None = None  # [L] int64: the segment of its rollout that a token belongs to, from 0
    rollout_logprobs: Tensor | None = None  # [L] float32, from the engine
    old_logprobs: Tensor | None = None
    """[L] float32: the policy before the step's updates; filled in by the trainer when it needs them."""
    ref_logprobs: Tensor | None = None
    """[L] float32: the reference; filled in by the trainer, or by processes that hold the reference."""
    rewards: Tensor | None = None  # [L] float32: the score placed on tokens
    step_ends: Tensor | None = None
    """[L] int64: how many steps with a reward of their own end on a token: as `Score.step_ends` says, else one on the
    last sampled token of each segment that was scored, else on the last of all. None without a score, or where credit
    knows no steps."""
    values: Tensor | None = None  # [L] float32: the critic; filled in by the trainer
    advantages: Tensor | None = None  # [L] float32: filled in by the driver (group estimators) or by the trainer
    returns: Tensor | None = None  # [L] float32: filled in by the trainer with `gae`
    name: str = ""  # The rollout's name in error messages
    score: float = 0.0  # The total of its Score
    score_terms: tuple[tuple[float, float], ...] = ()
    """(value, weight) of the terms whose weighted sum is the score; empty where it is no such sum."""
    greedy_score: float = 0.0  # The score of the greedy answer to its prompt, for ReMax
    codes: Tensor | None = None  # [L, Q] int64, -1 where a row is no frame
    code_mask: Tensor | None = None  # [L, Q] bool: which codes were sampled
    teacher_prompt: Sample | None = None  # The prompt as the teacher of distillation reads it; filled in by the driver
    teacher: TeacherOutput | None = None  # Filled in by the trainer, or by processes that hold the teacher
    images: tuple[Picture, ...] = ()  # The pictures behind the image placeholders, in order
    flow: FlowPath | None = None  # Of a flow: its noisy steps stand as sampled tokens after the bytes of the prompt

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> int:
        """Rows of a forward pass: its tokens; of a flow the prompt and the latent frames of every noisy step."""
        return len(self) if self.flow is None else self.prompt_length + self.flow.states[1:, :, 0].numel()

    @property
    def num_sampled(self) -> int:
        """N: sampled tokens and frames."""
        return int(self.loss_mask.sum())

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Experience:
        """Lay the segments of a rollout end to end; its score, if it has one, becomes token rewards."""
        segments, score = rollout.segments, rollout.score
        ids = torch.cat([t for s in segments for t in (s.prompt_ids, s.ids)])
        lengths = torch.tensor([(len(s.prompt_ids), len(s.ids)) for s in segments])
        response = torch.tensor([False, True] * len(segments)).repeat_interleave(lengths.flatten())
        mask, codes, code_mask = response, None, None
        logprobs = torch.zeros(len(ids))
        if rollout.speaks:
            both = [part for s in segments for part in ((s.prompt_ids, s.prompt_codes), (s.ids, s.codes))]
            width = next(c.shape[1] for _, c in both if c is not None)
            codes = torch.cat([torch.full((len(t), width), -1) if c is None else c for t, c in both])
            code_mask = torch.zeros_like(codes, dtype=torch.bool)
            logprobs = torch.zeros(codes.shape)
            sampled = [
                torch.ones(len(s.ids), dtype=torch.bool) if s.code_mask is None else s.code_mask for s in segments
            ]
            code_mask[response] = torch.cat([_in_columns(x, width) for x in sampled])
            logprobs[response] = torch.cat([_in_columns(s.logprobs.float(), width) for s in segments])
            mask = code_mask.any(1)
        else:
            logprobs[response] = torch.cat([s.logprobs.float() for s in segments])
        rewards, step_ends = (None, None) if score is None else _token_rewards(rollout, score, response, mask)
        return cls(
            ids=ids,
            loss_mask=mask,
            prompt_length=len(segments[0].prompt_ids),
            audio=rollout.audio,
            group_id=rollout.group_id,
            segment=torch.arange(len(segments)).repeat_interleave(lengths.sum(1)),
            rollout_logprobs=logprobs,
            rewards=rewards,
            step_ends=step_ends,
            name=rollout.name,
            score=0.0 if score is None else score.total,
            score_terms=() if score is None else tuple((score.parts[n], w) for n, w in score.weights.items()),
            codes=codes,
            code_mask=code_mask,
            images=rollout.images,
            flow=segments[0].flow,
        )

    def replace(self, **changes: Any) -> Experience:
        return dataclasses.replace(self, **changes)


def _in_columns(values: Tensor, width: int) -> Tensor:
    """[N] in column 0 of [N, Q], with nothing in the others; [N, Q] as it is."""
    return values if values.dim() == 2 else torch.nn.functional.pad(values[:, None], (0, width - 1))


def _token_rewards(rollout: Rollout, score: Score, response: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the score on its tokens [L] (per token, else on the last one of each segment, else on the last of all) and
    how many steps end on each, [L] int64 or None.

    `response` [L] marks the tokens of the segments' responses, `mask` [L] those among them that were sampled. A reward
    that falls on a forced token, or on an empty segment, goes to the sampled token before it, or to the first one.
    Without any sampled token nothing is rewarded.
    """
    rewards, ends = torch.zeros(len(mask)), torch.zeros(len(mask), dtype=torch.long)
    if not bool(mask.any()):
        return rewards, ends
    places = response.nonzero().squeeze(-1)
    steps: Sequence[int] | None = None
    if score.per_token is not None:
        placed, steps = torch.tensor(score.per_token, dtype=torch.float32), score.step_ends
    elif score.per_segment is not None:
        last = torch.tensor([len(s.ids) for s in rollout.segments]).cumsum(0) - 1
        places = places[last.clamp(min=0)]
        placed, steps = torch.tensor(score.per_segment, dtype=torch.float32), range(len(places))
    else:
        places, placed, steps = places[-1:], torch.tensor([float(score.total)]), (0,)
    sampled = mask.nonzero().squeeze(-1)
    before = (mask.cumsum(0)[places] - 1).clamp(min=0)
    rewards = rewards.index_add_(0, sampled[before], placed)
    if steps is None:
        return rewards, None
    at = sampled[before[list(steps)]]
    return rewards, ends.index_add_(0, at, torch.ones_like(at))


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Experiences laid end to end in one row of T tokens, made by `pack_experiences`. Sequences never see each
    other."""

    ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    span_ids: Tensor  # [T] int64: the span that a token belongs to
    span_parents: Tensor  # [spans] int64: the span whose tokens it also attends to (its group's shared prompt), or -1
    predecessor: Tensor
    """[T] int64: the row whose hidden state predicts this token, -1 for the first of a prompt; with a shared prompt not
    always the row before."""
    audio: tuple[AudioClip, ...]  # The clips behind the placeholders, in row order
    source: tuple[Tensor, ...]  # Per experience the rows [L] of its tokens: gathers per-token results back into streams
    codes: Tensor | None = None  # [T, Q] int64, -1 where a row is no frame; None when no row is one
    code_mask: Tensor | None = None  # [T, Q] bool
    images: tuple[Picture, ...] = ()  # The pictures behind the placeholders, in row order
    flows: tuple[FlowPath, ...] = ()  # Of each experience, where they are a flow's
    beside_picture: tuple[bool, ...] = ()  # Per clip: whether its prompt has pictures


@dataclass(frozen=True)
class PolicyOutput:
    """The output of `Policy.forward` per sampled token [N], in the order of the batch's True `loss_mask` rows."""

    logprobs: Tensor  # [N]; of a frame the sum over its sampled codes
    entropy: Tensor  # [N]
    values: Tensor | None = None  # [N], where a value head was asked for
    code_logprobs: Tensor | None = None
    """[N, Q] per codebook, a text token's in column 0, 0 where nothing was sampled; None when the batch has no
    frames."""
    hidden: Tensor | None = None  # [N, H]: what the text head reads, the decoder's states over the logit divisor
    noisy_steps: NoisySteps | None = None  # Of a flow, whose sampled tokens are noisy steps


@dataclass(frozen=True, eq=False)
class NoisySteps:
    """Values of the N noisy steps of a flow besides log-probs; F frames of all of them, D channels.

    Where finished sounds are noised again, a velocity is a step to noise - sound with a std of √½: its log-prob is
    minus the flow matching loss, and a KL the mean squared difference of two velocities.
    """

    means: Tensor  # [F, D]: where the steps lead without noise
    old_means: Tensor  # [F, D]: where they led when they were sampled, or before the step's updates
    after: Tensor  # [F, D]: where they led with noise
    times: Tensor  # [F, 1]: t before them
    lengths: list[int]  # [N]
    std: Tensor  # [N]: the deviation of their noise
    dt: Tensor  # [N]: how far they go, below 0
    drift: Tensor  # [N]: the exact KL to the steps as they were sampled, a mean over the numbers of the latents
    kl: Tensor | None = None  # [N]: the exact KL to the reference, likewise; None where its means are not known


@dataclass(frozen=True, eq=False)
class TeacherOutput:
    """What a teacher says of the N sampled tokens of one response; computed once, kept on the CPU."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor  # [N] float32, in nats
    counts: Tensor  # [N] bool: the tokens that `DistillConfig.tokens` selects.
    hidden: Tensor | None = None
    """[N, H]: the teacher's states that predict the tokens, for divergences over the vocabulary."""
    top_ids: Tensor | None = None  # [N, K] int64: its most probable tokens
    top_logits: Tensor | None = None  # [N, K + 1]: the logits of these, and of all other tokens as one

"""Rollouts with the transformers model itself: the engine that runs everywhere.

Each prompt is encoded and prefilled once; its key-value cache then serves all n samples. Rows that have ended make room
for the next prompts as soon as these fit, and leave the batch at the latest when half of it is idle. A sampler decides
what each row gets next, a token or a frame (`samplers.py`). A step waits for the device once, to read what was sampled.

Shapes: R prompts, B rows of the batch, S columns of a cache, H decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from audiorl.config import SamplingConfig
from audiorl.models.attention import ungrouped
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt, wants_speech
from audiorl.models.speech import padded_codes
from audiorl.models.weights import Weights
from audiorl.rollout.cache import RowCache
from audiorl.rollout.samplers import RolloutKey, Sampler, SegmentBuffer, StepOutput, sampler_for
from audiorl.rollout.streams import StreamDecoder
from audiorl.types import Request, Rollout, Segment, StopReason


@dataclass
class _Row:
    """One rollout in progress."""

    request: Request
    index: int
    prompt: Prompt
    buffer: SegmentBuffer = field(default_factory=SegmentBuffer)
    stop_reason: StopReason | None = None

    def key(self) -> RolloutKey:
        r = self.request
        return RolloutKey(r.seed, r.sample.id, self.index, r.greedy, wants_speech(r.sample))


@dataclass
class _Batch:
    """The rows that are decoded side by side. A row fills the columns of the cache from `first` to `last`."""

    policy: AudioPolicy
    cache: RowCache
    rollouts: list[int] = field(default_factory=list)
    """Which rollout each row belongs to."""
    ends: list[int] = field(default_factory=list)
    """The columns up to each row's last one, as `last` says on the device."""
    room: int = 0
    """Columns that the longest row may come to."""
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[B, H]: what the next token is sampled from."""
    first: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """[B], on the device."""
    last: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """[B], on the device."""

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows. rows: [n] int64 on the CPU."""
        if not len(rows):
            self.cache, self.rollouts, self.ends, self.room = RowCache(self.policy.new_cache()), [], [], 0
            return
        chosen = rows.tolist()
        self.rollouts, self.ends = [self.rollouts[b] for b in chosen], [self.ends[b] for b in chosen]
        rows = rows.to(self.first.device)
        self.first, self.last = self.first[rows], self.last[rows]
        self.cache.keep(rows)

    def join(self, prefill: _Prefill, repeat: Sequence[int], rollouts: Sequence[int], max_rows: int) -> None:
        """Append a row for each of `rollouts`, the samples of prompts `repeat`."""
        rows = torch.tensor(repeat, device=prefill.hidden.device)
        columns = prefill.mask.shape[1]
        new = prefill.hidden[rows], columns - prefill.lengths[rows], torch.full_like(rows, columns - 1)
        if self.rollouts:
            before = self.hidden, self.first, self.last
            self.hidden, self.first, self.last = (torch.cat(pair) for pair in zip(before, new, strict=True))
        else:
            self.hidden, self.first, self.last = new
        self.rollouts += rollouts
        self.ends += [columns] * len(rollouts)
        self.room = max(self.room, columns + max_rows)
        self.cache.join(prefill.cache, rows, self.room)

    def forward(self, inputs: dict[str, Any]) -> None:
        """One token of every row through the decoder."""
        # A row that has ended may go on beyond its room; what it writes there is never read.
        self.last = (self.last + 1).clamp(max=self.room - 1)
        self.ends = [min(end + 1, self.room) for end in self.ends]
        width = max(self.ends)
        columns = torch.arange(width, device=self.first.device)
        mask = columns >= self.first[:, None]
        if self.cache.aligned:
            self.cache.after_all()
            mask = mask.long()
        else:
            self.cache.at(self.last[:, None], width, together=min(self.ends) == width)
            mask = (mask & (columns <= self.last[:, None]))[:, None, None]
        decoder = self.policy.backbone.decoder(self.policy.model)
        out = decoder(
            **inputs,
            attention_mask=mask,
            position_ids=(self.last - self.first)[:, None],
            past_key_values=self.cache.layers,
            use_cache=True,
        )
        self.hidden = out.last_hidden_state[:, -1]


@dataclass
class _Prefill:
    """Prompts that went through the decoder, padded on the left: R rows of S columns."""

    cache: DynamicCache
    hidden: Tensor
    """[R, H]: the last hidden states."""
    mask: Tensor
    """[R, S]: 0 where a column is padding."""
    lengths: Tensor
    """[R]."""


class HFEngine:
    """`RolloutEngine` over an `AudioPolicy`. In one process it shares the trainer's weights."""

    def __init__(self, policy: AudioPolicy, sampling: SamplingConfig | None = None):
        self.policy = policy
        self.sampling = sampling or SamplingConfig()
        self.policy_version = 0

    def update_weights(self, weights: Weights, version: int) -> None:
        self.policy.load_weights(weights)
        self.policy_version = version

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """All rollouts of all requests, request by request, index ascending."""
        training = self.policy.model.training
        self.policy.model.eval()  # in training mode, gradient checkpointing would switch the cache off
        try:
            return self._generate(requests)
        finally:
            self.policy.model.train(training)

    def _generate(self, requests: Sequence[Request]) -> list[Rollout]:
        rollouts: list[Rollout] = []
        for streams, several in groupby(requests, key=lambda r: bool(r.sample.turns)):
            write = self._interpret if streams else self._answer
            rollouts += write(list(several))
        return rollouts

    def _interpret(self, requests: Sequence[Request]) -> list[Rollout]:
        with self.policy.autocast(), ungrouped(self.policy.backbone.decoder(self.policy.model)):
            return StreamDecoder(self.policy, self.sampling, self.policy_version).rollouts(requests)

    def _answer(self, requests: Sequence[Request]) -> list[Rollout]:
        prompts = [self.policy.prompt(r.sample) for r in requests]
        with self.policy.autocast(), ungrouped(self.policy.backbone.decoder(self.policy.model)):
            rows = self._decode(requests, prompts)
        rollouts: list[Rollout] = []
        for row in rows:
            assert row.stop_reason is not None
            rollouts.append(
                answered(
                    self.policy, row.request, row.index, row.prompt, row.buffer, row.stop_reason, self.policy_version
                )
            )
        return rollouts

    def _decode(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> list[_Row]:
        """One loop for all requests: rows that end make room for the next prompts."""
        rows = [_Row(r, k, p) for r, p in zip(requests, prompts, strict=True) for k in range(r.n)]
        sampler = sampler_for(self.policy, self.sampling, [row.key() for row in rows])
        batch = _Batch(self.policy, RowCache(self.policy.new_cache()))
        started = 0  # requests whose rows are in the batch or have ended
        output: StepOutput | None = None
        while True:
            active = [b for b, i in enumerate(batch.rollouts) if rows[i].stop_reason is None]
            joining = self._joining(requests, prompts, started, len(active), batch, sampler.max_rows)
            changes = bool(joining) or len(active) * 2 <= len(batch.rollouts)
            stay: Tensor | None = None  # all rows
            if changes and len(active) < len(batch.rollouts):
                stay = torch.tensor(active, dtype=torch.long)
                batch.keep(stay)
            if batch.rollouts:
                assert output is not None
                batch.forward(output.embedded(self.policy, stay))
            if joining:
                before = sum(r.n for r in requests[:started])
                repeat = [i for i, r in enumerate(requests[started : started + joining]) for _ in range(r.n)]
                batch.join(
                    self._prefill(prompts[started : started + joining]),
                    repeat,
                    range(before, before + len(repeat)),
                    sampler.max_rows,
                )
                started += joining
            if not batch.rollouts:
                return rows
            if changes:
                sampler.select(batch.rollouts)
            output = sampler.step(batch.hidden)
            for i, numbers in zip(batch.rollouts, output.rows(), strict=True):
                if rows[i].stop_reason is None:
                    rows[i].buffer.add(*numbers)
                    rows[i].stop_reason = self._stop_reason(sampler, i, rows[i].buffer)

    def _joining(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        started: int,
        active: int,
        batch: _Batch,
        max_rows: int,
    ) -> int:
        """How many of the next requests join the `active` rows now: as many as `max_batch_tokens` allows.

        A request is never split. To copy the cache less often, a few rows wait until an eighth of the batch can be
        replaced, unless they are the last.
        """
        if active and batch.cache.aligned:
            return 0
        count, rows, room = 0, 0, batch.room if active else 0
        for request, prompt in zip(requests[started:], prompts[started:], strict=True):
            room = max(room, len(prompt) + max_rows)
            fits = (active + rows + request.n) * room <= self.sampling.max_batch_tokens
            if not fits and active + rows:
                break
            count, rows = count + 1, rows + request.n
        last = started + count == len(requests)
        return count if last or not active or rows * 8 >= len(batch.rollouts) else 0

    def _prefill(self, prompts: Sequence[Prompt]) -> _Prefill:
        """Left-padded prompts through the decoder."""
        policy, device = self.policy, self.policy.device
        cache = policy.new_cache()
        longest = max(len(p) for p in prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        embeds = [policy.embed(p.ids, p.audio, codes=p.codes) for p in prompts]
        padded = torch.stack(
            [torch.cat([e.new_zeros(longest - len(e), e.shape[1]), e]) if len(e) < longest else e for e in embeds]
        )
        mask = (torch.arange(longest, device=device)[None] >= (longest - lengths)[:, None]).long()
        positions = (torch.arange(longest, device=device)[None] - (longest - lengths)[:, None]).clamp(min=0)
        out = policy.backbone.decoder(policy.model)(
            inputs_embeds=padded,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **policy.routed(padded_codes([p.codes for p in prompts], [len(p) for p in prompts], left=True)),
            **policy.read_by_decoder(prompts),
        )
        return _Prefill(cache, out.last_hidden_state[:, -1], mask, lengths)

    def _stop_reason(self, sampler: Sampler, i: int, buffer: SegmentBuffer) -> StopReason | None:
        reason = sampler.ended(i, buffer)
        if self.sampling.stop and reason != "eos":
            # a stop string spans a bounded number of tokens; byte-level tokens are at least one byte each
            tail = self.policy.decode(buffer.ids[-max(len(s.encode()) for s in self.sampling.stop) - 1 :])
            if any(s in tail for s in self.sampling.stop):
                return "stop"
        return reason


def answered(
    policy: AudioPolicy,
    request: Request,
    index: int,
    prompt: Prompt,
    buffer: SegmentBuffer,
    stop_reason: StopReason,
    policy_version: int,
) -> Rollout:
    """The rollout of one segment: a prompt and the answer in `buffer`."""
    segment = Segment(
        prompt_ids=prompt.ids,
        prompt_codes=prompt.codes,
        **buffer.fields(),
        text=policy.decode(buffer.ids),
        audio=prompt.audio,
        stop_reason=stop_reason,
        policy_version=policy_version,
    )
    return Rollout(
        sample=request.sample,
        segments=(segment,),
        group_id=request.group_id or request.sample.id,
        index=index,
    )

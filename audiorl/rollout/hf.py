"""Rollouts with the transformers model itself: the engine that runs everywhere.

Each prompt is encoded and prefilled once; its key-value cache then serves all n samples (`batch.py`). Rows that have
ended make room for the next prompts as soon as these fit, and leave the batch at the latest when half of it is idle. A
sampler decides what each row gets next, a token or a frame (`samplers.py`). A step waits for the device once, to read
what was sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from audiorl.config import SamplingConfig
from audiorl.models.attention import gqa_without_repeat
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt, wants_speech
from audiorl.models.speech import pad_codes
from audiorl.models.weights import Weights
from audiorl.protocols import Ended, Request
from audiorl.rollout.batch import Batch, Joining, Prefill, batch_for
from audiorl.rollout.compiled import check_compiles
from audiorl.rollout.samplers import RolloutKey, Sampler, SegmentBuffer, StepOutput, sampler_for
from audiorl.rollout.streams import StreamDecoder
from audiorl.types import Rollout, Segment, StopReason


@dataclass
class _Row:
    """One rollout in progress."""

    request: Request
    index: int
    prompt: Prompt
    buffer: SegmentBuffer = field(default_factory=SegmentBuffer)
    before: Segment | None = None
    """What a paused answer had sampled before."""
    stop_reason: StopReason | None = None

    def key(self) -> RolloutKey:
        r = self.request
        return RolloutKey(r.seed, r.sample.id, self.index, r.greedy, wants_speech(r.sample), self.num_before)

    @property
    def num_before(self) -> int:
        return 0 if self.before is None else len(self.before.ids)

    def reaches_limit(self) -> bool:
        """Whether it has sampled as much as it may now."""
        limit = self.request.token_limit
        return limit is not None and len(self.buffer.ids) - self.num_before >= limit


@dataclass
class _Start:
    """A prompt, and the rows that begin after it: the samples of a request, or one paused answer."""

    prompt: Prompt
    rows: list[_Row]
    sampled: Tensor | None = None
    """[P] bool: the tokens of the prompt that the policy sampled; None: none of them."""

    def max_rows(self, sampler: Sampler) -> int:
        """The most tokens or frames that a row may add."""
        rows, limit = sampler.max_rows - self.rows[0].num_before, self.rows[0].request.token_limit
        return rows if limit is None else min(rows, limit)


def _starts(request: Request, prompt: Prompt) -> list[_Start]:
    if not request.paused:
        return [_Start(prompt, [_Row(request, k, prompt) for k in range(request.n)])]
    starts = []
    for rollout in request.paused:
        (before,) = rollout.segments
        sampled = torch.arange(len(prompt) + len(before.ids)) >= len(prompt)
        row = _Row(request, rollout.index, prompt, SegmentBuffer.of(before), before)
        starts.append(_Start(prompt.followed_by(before.ids, ()), [row], sampled))
    return starts


class HFEngine:
    """`RolloutEngine` over an `AudioPolicy`. In one process it shares the trainer's weights.

    on_step: called after every token of answers with what each rollout has so far, for example to show it. It must not
    change the buffers. What it raises ends the call of `generate`.
    """

    def __init__(
        self,
        policy: AudioPolicy,
        sampling: SamplingConfig | None = None,
        on_step: Callable[[Sequence[SegmentBuffer]], None] | None = None,
    ):
        self.policy = policy
        self.sampling = sampling or SamplingConfig()
        if self.sampling.compile:
            check_compiles(policy)
        self.on_step = on_step
        self.policy_version = 0

    def update_weights(self, weights: Weights, version: int) -> None:
        self.policy.load_weights(weights)
        self.policy_version = version

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """All rollouts of all requests, request by request, index ascending.

        `ended` is called with the answers to a request once all of them have ended, streams excepted.
        """
        training = self.policy.model.training
        self.policy.model.eval()  # in training mode, gradient checkpointing would switch the cache off
        try:
            return self._generate(requests, ended)
        finally:
            self.policy.model.train(training)

    def _generate(self, requests: Sequence[Request], ended: Ended | None) -> list[Rollout]:
        rollouts: list[Rollout] = []
        for streams, group in groupby(requests, key=lambda r: bool(r.sample.turns)):
            several = list(group)
            rollouts += self._interpret(several) if streams else self._answer(several, ended)
        return rollouts

    def _interpret(self, requests: Sequence[Request]) -> list[Rollout]:
        with self.policy.autocast(), gqa_without_repeat(self.policy.backbone.decoder(self.policy.model)):
            return StreamDecoder(self.policy, self.sampling, self.policy_version).rollouts(requests)

    def _answer(self, requests: Sequence[Request], ended: Ended | None) -> list[Rollout]:
        starts = [start for r in requests for start in _starts(r, self.policy.prompt(r.sample))]
        with self.policy.autocast(), gqa_without_repeat(self.policy.backbone.decoder(self.policy.model)):
            rows = self._decode(starts, ended)
        return [self._rollout(row) for row in rows]

    def _rollout(self, row: _Row) -> Rollout:
        assert row.stop_reason is not None
        return answered(
            self.policy,
            row.request,
            row.index,
            row.prompt,
            row.buffer,
            row.stop_reason,
            self.policy_version,
            row.before,
        )

    def _decode(self, starts: Sequence[_Start], ended: Ended | None) -> list[_Row]:
        """One loop for all prompts: rows that end make room for the next ones."""
        rows = [row for start in starts for row in start.rows]
        of_request: dict[int, list[_Row]] = defaultdict(list)
        for row in rows:
            of_request[id(row.request)].append(row)
        sampler = sampler_for(self.policy, self.sampling, [row.key() for row in rows])
        batch = batch_for(self.policy, [len(start.rows) for start in starts], self.sampling.compile)
        started = 0  # prompts whose rows are in the batch or have ended
        output: StepOutput | None = None
        while True:
            active = [b for b, i in enumerate(batch.rollouts) if rows[i].stop_reason is None]
            joining = self._joining(starts[started:], active, batch, sampler)
            changes = bool(joining) or len(active) * 2 <= len(batch.rollouts)
            stay: Tensor | None = None  # all rows
            if changes and len(active) < len(batch.rollouts):
                stay = torch.tensor(active, dtype=torch.long)
                batch.keep(active)
            if batch.rollouts:
                assert output is not None
                batch.forward(output.embedded(self.policy, stay))
            if joining:
                new = starts[started : started + joining]
                before = sum(len(start.rows) for start in starts[:started])
                repeat = [i for i, start in enumerate(new) for _ in start.rows]
                most = max(start.max_rows(sampler) for start in new)
                batch.join(self._prefill(new), repeat, range(before, before + len(repeat)), most)
                started += joining
            if not batch.rollouts:
                return rows
            if changes:
                sampler.select(batch.rollouts)
            output = sampler.step(batch.hidden)
            for i, numbers in zip(batch.rollouts, output.rows(), strict=True):
                if rows[i].stop_reason is None:
                    rows[i].buffer.add(*numbers)
                    rows[i].stop_reason = self._stop_reason(sampler, i, rows[i])
                    if ended is not None and rows[i].stop_reason is not None:
                        siblings = of_request[id(rows[i].request)]
                        if all(row.stop_reason is not None for row in siblings):
                            ended([self._rollout(row) for row in siblings])
            if self.on_step is not None:
                self.on_step([row.buffer for row in rows])

    def _joining(self, waiting: Sequence[_Start], active: Sequence[int], batch: Batch, sampler: Sampler) -> int:
        """How many of the prompts that wait join the `active` rows now: as many as `max_batch_tokens` allows.

        The samples of a prompt are never split. To copy the cache less often, a few rows wait until an eighth of the
        batch can be replaced, unless they are the last.
        """
        if active and batch.aligned:
            return 0
        now = Joining()
        for start in waiting:
            more = Joining(
                now.prompts + 1,
                now.rows + len(start.rows),
                max(now.longest, len(start.prompt)),
                max(now.most, start.max_rows(sampler)),
            )
            if (active or now.prompts) and batch.tokens(active, more) > self.sampling.max_batch_tokens:
                break
            now = more
        last = now.prompts == len(waiting)
        return now.prompts if last or not active or now.rows * 8 >= len(batch.rollouts) else 0

    def _prefill(self, starts: Sequence[_Start]) -> Prefill:
        """Left-padded prompts through the decoder."""
        policy, device = self.policy, self.policy.device
        prompts = [start.prompt for start in starts]
        cache = policy.new_cache()
        longest = max(len(p) for p in prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        embeds = [policy.embed(s.prompt.ids, s.prompt.audio, s.sampled, s.prompt.codes) for s in starts]
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
            **policy.routing_kwargs(pad_codes([p.codes for p in prompts], [len(p) for p in prompts], left=True)),
            **policy.cross_attention_kwargs(prompts),
        )
        return Prefill(cache, out.last_hidden_state[:, -1], [len(p) for p in prompts])

    def _stop_reason(self, sampler: Sampler, i: int, row: _Row) -> StopReason | None:
        reason = sampler.ended(i, row.buffer)
        if reason != "eos" and ends_with_stop_string(self.policy, row.buffer.ids, self.sampling.stop):
            return "stop"
        return reason or ("paused" if row.reaches_limit() else None)


def ends_with_stop_string(policy: AudioPolicy, ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether one of the stop strings is in the text of the last tokens."""
    if not stop:
        return False
    # A stop string spans a bounded number of tokens; byte-level tokens are at least one byte each.
    tail = policy.decode(list(ids[-max(len(s.encode()) for s in stop) - 1 :]))
    return any(s in tail for s in stop)


def answered(
    policy: AudioPolicy,
    request: Request,
    index: int,
    prompt: Prompt,
    buffer: SegmentBuffer,
    stop_reason: StopReason,
    policy_version: int,
    before: Segment | None = None,
) -> Rollout:
    """The rollout of one segment: a prompt and the answer in `buffer`, which begins with what was sampled `before`."""
    versions = None
    if before is not None:
        versions = torch.full((len(buffer.ids),), policy_version)
        versions[: len(before.ids)] = versions_of(before)
    segment = Segment(
        prompt_ids=prompt.ids,
        prompt_codes=prompt.codes,
        **buffer.fields(),
        text=policy.decode(buffer.ids),
        audio=prompt.audio,
        stop_reason=stop_reason,
        policy_version=policy_version,
        policy_versions=versions,
    )
    return Rollout(
        sample=request.sample,
        segments=(segment,),
        group_id=request.group_id or request.sample.id,
        index=index,
    )


def versions_of(segment: Segment) -> Tensor:
    """[N] int64: the version of the weights that sampled each token."""
    if segment.policy_versions is not None:
        return segment.policy_versions
    return torch.full((len(segment.ids),), segment.policy_version)

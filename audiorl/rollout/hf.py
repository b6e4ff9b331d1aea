"""Rollouts with the transformers model itself: the engine that runs everywhere.

Each prompt is encoded and prefilled once; its key-value cache then serves all n samples. Rows that have finished leave
the batch as soon as half of it is idle. A sampler decides what each row gets next, a token or a frame (`samplers.py`).

Shapes: R prompts, B = sum of n rows, S cached length, H decoder width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from audiorl.config import SamplingConfig
from audiorl.models.attention import ungrouped
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt, wants_speech
from audiorl.models.speech import padded_codes
from audiorl.models.weights import Weights
from audiorl.rollout.samplers import RolloutKey, Sampler, SegmentBuffer, max_rows, sampler_for
from audiorl.rollout.streams import StreamDecoder, side_by_side
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


class _RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, S, D] in larger buffers: new tokens are written after the last one without a copy."""

    def __init__(self, prefilled: DynamicLayer, rows: Tensor, room: int):
        super().__init__()
        keys, values = prefilled.keys, prefilled.values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._length = keys.shape[-2]
        self._buffers = [x.new_empty(len(rows), x.shape[1], self._length + room, x.shape[3]) for x in (keys, values)]
        for buffer, x in zip(self._buffers, (keys, values), strict=True):
            buffer[:, :, : self._length] = x[rows]
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (b[:, :, : self._length] for b in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self._length + key_states.shape[-2]
        for buffer, x in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = x
        self._length = end
        self._show()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self._buffers = [b[indices] for b in self._buffers]
        self._show()


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
        rollouts: list[Rollout] = []
        for part in self._batches(requests, prompts):
            with self.policy.autocast(), ungrouped(self.policy.backbone.decoder(self.policy.model)):
                rows = self._decode([requests[i] for i in part], [prompts[i] for i in part])
            for row in rows:
                assert row.stop_reason is not None
                rollouts.append(
                    answered(
                        self.policy,
                        row.request,
                        row.index,
                        row.prompt,
                        row.buffer,
                        row.stop_reason,
                        self.policy_version,
                    )
                )
        return rollouts

    def _batches(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Requests in order, as many side by side as `max_batch_tokens` allows; one request is never split."""
        most = [max_rows(self.policy, self.sampling, wants_speech(r.sample)) for r in requests]
        lengths = [len(p) + n for p, n in zip(prompts, most, strict=True)]
        return side_by_side([r.n for r in requests], lengths, self.sampling.max_batch_tokens)

    def _decode(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> list[_Row]:
        device = self.policy.device
        decoder = self.policy.backbone.decoder(self.policy.model)
        cache = self.policy.new_cache()
        hidden, mask, position = self._prefill(prompts, cache)

        rows = [_Row(r, k, p) for r, p in zip(requests, prompts, strict=True) for k in range(r.n)]
        sampler = sampler_for(self.policy, self.sampling, [row.key() for row in rows])
        repeat = torch.tensor([i for i, r in enumerate(requests) for _ in range(r.n)], device=device)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[i] = _RoomyLayer(layer, repeat, sampler.max_rows)
            else:  # sliding windows and linear attention keep their own kind
                layer.batch_select_indices(repeat)
        length = mask.shape[1]
        hidden, mask, position = hidden[repeat], mask[repeat], position[repeat]
        mask = torch.cat([mask, mask.new_ones(len(mask), sampler.max_rows)], dim=1)

        active = torch.arange(len(rows))  # which rollout each row of the batch belongs to
        done = [False] * len(rows)
        for step in range(sampler.max_rows):
            written = sampler.step(hidden, active)
            for b, (i, row) in enumerate(zip(active.tolist(), written.rows(), strict=True)):
                if not done[b]:
                    rows[i].buffer.add(*row)
                    rows[i].stop_reason = self._stop_reason(sampler, i, rows[i].buffer)
                    done[b] = rows[i].stop_reason is not None
            if all(done):
                break
            keep = torch.arange(len(done))
            if sum(done) * 2 >= len(done):
                keep = torch.tensor([b for b, finished in enumerate(done) if not finished])
                cache.batch_select_indices(keep.to(device))
                mask, position = (x[keep.to(device)] for x in (mask, position))
                active, done = active[keep], [False] * len(keep)
            position = position + 1
            out = decoder(
                **written.embedded(self.policy, keep),
                attention_mask=mask[:, : length + step + 1],
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            hidden = out.last_hidden_state[:, -1]
        return rows

    def _prefill(self, prompts: Sequence[Prompt], cache: DynamicCache) -> tuple[Tensor, Tensor, Tensor]:
        """Left-padded prompts through the decoder: last hidden states [R, H], mask [R, S], last positions [R]."""
        policy, device = self.policy, self.policy.device
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
        return out.last_hidden_state[:, -1], mask, lengths - 1

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

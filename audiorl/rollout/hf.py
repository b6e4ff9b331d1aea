"""Rollouts with the transformers model itself: the engine that runs everywhere.

Each prompt is encoded and prefilled once; its key-value cache then serves all n samples. Rows that have finished leave
the batch as soon as half of it is idle.

Shapes: R prompts, B = sum of n rows, S cached length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from audiorl.rollout.sampling import choose, filtered_logprobs, uniforms
from audiorl.rollout.stream import StreamDecoder, side_by_side
from audiorl.types import Request, Rollout, Segment, StopReason


@dataclass
class _Row:
    """One rollout being written."""

    request: Request
    index: int
    prompt: Tensor
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None


class _RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, S, D] with room for more: a new token is written behind them, nothing is copied."""

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

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
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
        prompts = [self.policy.prompt_ids(r.sample) for r in requests]
        rollouts: list[Rollout] = []
        for part in self._batches(requests, prompts):
            with self.policy.autocast(), ungrouped(self.policy.backbone.decoder(self.policy.model)):
                rows = self._decode([requests[i] for i in part], [prompts[i] for i in part])
            rollouts.extend(self._rollout(row) for row in rows)
        return rollouts

    def _batches(self, requests: Sequence[Request], prompts: Sequence[Tensor]) -> Iterator[list[int]]:
        """Requests in order, as many side by side as `max_batch_tokens` allows; one request is never split."""
        lengths = [len(p) + self.sampling.max_new_tokens for p in prompts]
        return side_by_side([r.n for r in requests], lengths, self.sampling.max_batch_tokens)

    def _decode(self, requests: Sequence[Request], prompts: Sequence[Tensor]) -> list[_Row]:
        device, config = self.policy.device, self.sampling
        decoder = self.policy.backbone.decoder(self.policy.model)
        head = self.policy.backbone.head(self.policy.model)
        cache = DynamicCache(config=decoder.config)
        logits, mask, position = self._prefill(requests, prompts, cache)

        rows = [_Row(r, k, p) for r, p in zip(requests, prompts, strict=True) for k in range(r.n)]
        repeat = torch.tensor([i for i, r in enumerate(requests) for _ in range(r.n)], device=device)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[i] = _RoomyLayer(layer, repeat, config.max_new_tokens)
            else:  # sliding windows and linear attention keep their own kind
                layer.batch_select_indices(repeat)
        length = mask.shape[1]
        logits, mask, position = logits[repeat], mask[repeat], position[repeat]
        mask = torch.cat([mask, mask.new_ones(len(mask), config.max_new_tokens)], dim=1)
        noise = torch.stack(
            [uniforms(r.request.seed, r.request.sample.id, r.index, config.max_new_tokens) for r in rows]
        ).to(device)

        greedy = torch.tensor([config.temperature == 0 or r.request.greedy for r in rows], device=device)

        active = torch.arange(len(rows))  # which rollout each row of the batch belongs to
        done = [False] * len(rows)
        for step in range(config.max_new_tokens):
            logprobs = filtered_logprobs(logits, config)
            tokens = choose(logprobs, noise[active.to(device), step], greedy[active.to(device)])
            chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
            for b, (row, token, logprob) in enumerate(
                zip((rows[i] for i in active.tolist()), tokens.tolist(), chosen.tolist(), strict=True)
            ):
                if not done[b]:
                    row.ids.append(token)
                    row.logprobs.append(logprob)
                    row.stop_reason = self._stop_reason(row)
                    done[b] = row.stop_reason is not None
            if all(done):
                break
            if sum(done) * 2 >= len(done):
                keep = torch.tensor([b for b, finished in enumerate(done) if not finished])
                cache.batch_select_indices(keep.to(device))
                tokens, mask, position = (x[keep.to(device)] for x in (tokens, mask, position))
                active, done = active[keep], [False] * len(keep)
            position = position + 1
            out = decoder(
                inputs_embeds=decoder.get_input_embeddings()(tokens[:, None]),
                attention_mask=mask[:, : length + step + 1],
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits = head(out.last_hidden_state[:, -1])
        return rows

    def _prefill(
        self, requests: Sequence[Request], prompts: Sequence[Tensor], cache: DynamicCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Left-padded prompts through the decoder: next-token logits [R, V], mask [R, S], last positions [R]."""
        device = self.policy.device
        longest = max(len(p) for p in prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        embeds = [self.policy.embed(p, r.sample.audio) for p, r in zip(prompts, requests, strict=True)]
        padded = torch.stack(
            [torch.cat([e.new_zeros(longest - len(e), e.shape[1]), e]) if len(e) < longest else e for e in embeds]
        )
        mask = (torch.arange(longest, device=device)[None] >= (longest - lengths)[:, None]).long()
        positions = (torch.arange(longest, device=device)[None] - (longest - lengths)[:, None]).clamp(min=0)
        out = self.policy.backbone.decoder(self.policy.model)(
            inputs_embeds=padded, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits = self.policy.backbone.head(self.policy.model)(out.last_hidden_state[:, -1])
        return logits, mask, lengths - 1

    def _stop_reason(self, row: _Row) -> StopReason | None:
        if row.ids[-1] in self.policy.stop_ids:
            return "eos"
        if self.sampling.stop:
            # a stop string spans a bounded number of tokens; byte-level tokens are at least one byte each
            tail = self.policy.decode(row.ids[-max(len(s.encode()) for s in self.sampling.stop) - 1 :])
            if any(s in tail for s in self.sampling.stop):
                return "stop"
        return "length" if len(row.ids) >= self.sampling.max_new_tokens else None

    def _rollout(self, row: _Row) -> Rollout:
        assert row.stop_reason is not None
        segment = Segment(
            prompt_ids=row.prompt,
            ids=torch.tensor(row.ids),
            logprobs=torch.tensor(row.logprobs),
            text=self.policy.decode(row.ids),
            audio=row.request.sample.audio,
            stop_reason=row.stop_reason,
            policy_version=self.policy_version,
        )
        return Rollout(
            sample=row.request.sample,
            segments=(segment,),
            group_id=row.request.group_id or row.request.sample.id,
            index=row.index,
        )

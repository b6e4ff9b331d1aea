"""One stream that is interpreted while it comes, for as long as it lasts.

With `history` the model carries a bounded part of the past: when so many turns are in its key-value cache, all but the
last half of them are forgotten. What stays is computed again behind the instruction, in one forward pass, as a stream
that began there; so positions and memory are those of a short stream, and the cost of a chunk does not grow. The
instruction stays in front, where attention puts the weight that it needs nowhere else (attention sinks, Xiao et al.
2023, arXiv 2309.17453).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from audiorl.config import SamplingConfig
from audiorl.models.attention import gqa_without_repeat
from audiorl.models.policy import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.streams import Plan, Row, StreamDecoder, empty_cache
from audiorl.types import Rollout, Sample, Segment, Turn


class LiveStream:
    """Each turn is interpreted when it comes. Without `history` it gives the segments that `StreamDecoder` gives.

    sample: holds the messages; its turns are those to come. history: the most turns that are carried, at least 2; None:
    all. Raises ValueError for less, and for a history of a policy that speaks.
    """

    def __init__(
        self,
        policy: AudioPolicy,
        sampling: SamplingConfig,
        sample: Sample,
        seed: int = 0,
        history: int | None = None,
    ):
        if history is not None and history < 2:
            raise ValueError(f"history is {history} turns; give at least 2, or None to carry all")
        if history is not None and policy.speech is not None:
            raise ValueError("history: a policy that speaks carries its whole stream; leave it out")
        self._decoder = StreamDecoder(policy, sampling)
        self._policy = policy
        self._history = history
        request = Request(replace(sample, turns=()), seed=seed)
        with torch.no_grad():
            prompt = policy.prompt(request.sample)
        self._row = Row(Plan(request, prompt, []), 0)
        self._cache = empty_cache(policy)
        self._seconds = 0.0
        self._past: list[Segment] = []
        self._prompt_LH = torch.zeros(0)
        self._chunks_LH: list[Tensor] = []

    @property
    def rollout(self) -> Rollout:
        """The turns that are carried: everything so far, without `history`."""
        return self._row.rollout()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments so far, those that are not carried any more without their clips."""
        return (*self._past, *self._row.segments)

    @torch.no_grad()
    def observe(self, turn: Turn) -> Segment:
        """The segment that the policy writes after this turn. Emit times count the seconds spent in here."""
        training = self._policy.model.training
        self._policy.model.eval()  # in training mode, gradient checkpointing would switch the cache off
        try:
            with self._policy.autocast(), gqa_without_repeat(self._policy.backbone.decoder(self._policy.model)):
                return self._observe(turn)
        finally:
            self._policy.model.train(training)

    def _observe(self, turn: Turn) -> Segment:
        began = time.perf_counter()
        if self._row.turn == self._history:
            self._forget(self._history // 2)
        row = self._row
        plan, sample = row.plan, row.plan.request.sample
        chunk = self._policy.chunk_ids(turn.audio)
        request = replace(plan.request, sample=replace(sample, turns=(*sample.turns, turn)))
        row.plan = replace(plan, request=request, chunks=[*plan.chunks, chunk])
        hidden = self._decoder.observe([row], self._cache)
        if self._history is not None:
            before, own = row.observed_LH.split([len(row.observed_LH) - len(chunk), len(chunk)])
            self._prompt_LH = self._prompt_LH if self._chunks_LH else before
            self._chunks_LH.append(own)
        self._decoder.write_turn([row], self._cache, hidden)
        self._seconds += time.perf_counter() - began
        row.close(self._policy, self._decoder.policy_version, self._seconds)
        return row.segments[-1]

    def _forget(self, keep: int) -> None:
        """Carry the last `keep` turns only, as if the stream had begun with them."""
        old, policy = self._row, self._policy
        drop = old.turn - keep
        self._past += [replace(segment, audio=()) for segment in old.segments[:drop]]
        self._chunks_LH = self._chunks_LH[drop:]
        segments = old.segments[drop:]
        parts = [self._prompt_LH]
        for chunk_LH, segment in zip(self._chunks_LH, segments, strict=True):
            ended = [] if segment.stop_reason == "eos" else [policy.end_id]
            parts += [chunk_LH, policy.embed_tokens(torch.tensor([*segment.ids.tolist(), *ended]), None)]
        # As the row would have it: the last token is not read yet, and the end of its turn comes with the next chunk.
        last = segments[-1].ids.tolist()
        parts[-1] = policy.embed_tokens(torch.tensor(last[:-1], dtype=torch.long), None)
        embeds_LH = torch.cat(parts)
        self._cache = empty_cache(policy)
        places = torch.arange(len(embeds_LH), device=embeds_LH.device)[None]
        inputs = {"inputs_embeds": embeds_LH[None], **policy.routing_kwargs(None)}
        self._decoder.forward(inputs, places, len(embeds_LH), self._cache)
        sample = old.plan.request.sample
        request = replace(old.plan.request, sample=replace(sample, turns=sample.turns[drop:]))
        self._row = Row(
            replace(old.plan, request=request, chunks=old.plan.chunks[drop:]),
            0,
            length=len(embeds_LH),
            turn=keep,
            forgotten=old.forgotten + drop,
            segments=segments,
            unread=last[-1:],
        )

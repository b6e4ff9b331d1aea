"""Segmented rollouts: a chunk of audio arrives, the policy writes until it ends its turn, the next chunk arrives.

All observed and sampled tokens stay in one key-value cache. The token at position p of a row is in column p, so that
rows may have different lengths and nothing is computed twice. All streams of a batch take their turns together; after
the first token of a turn only those that write on are decoded. A model that speaks may add speech to the text of any
turn (`samplers.py`).

Shapes: B rows, L new tokens, S cached columns, H decoder width, Q codebooks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiorl.config import SamplingConfig
from audiorl.models.attention import ungrouped
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt
from audiorl.models.speech import padded_codes
from audiorl.rollout.cache import RowCache
from audiorl.rollout.samplers import RolloutKey, Sampler, SegmentBuffer, max_rows, sampler_for
from audiorl.types import Request, Rollout, Sample, Segment, StopReason, Turn


def side_by_side(rows: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Requests in order, in batches of at most `budget` tokens (all rows times the longest); none is ever split."""
    part: list[int] = []
    for i in range(len(rows)):
        together = [*part, i]
        if part and sum(rows[j] for j in together) * max(lengths[j] for j in together) > budget:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


class StreamDecoder:
    """Writes one segment after every turn of its requests' samples."""

    def __init__(self, policy: AudioPolicy, sampling: SamplingConfig, policy_version: int = 0):
        self.policy, self.sampling, self.policy_version = policy, sampling, policy_version
        self._decoder = policy.backbone.decoder(policy.model)

    def rollouts(self, requests: Sequence[Request]) -> list[Rollout]:
        """All rollouts, request by request, index ascending; as many side by side as `max_batch_tokens` allows."""
        plans = [plan_of(self.policy, r) for r in requests]
        out: list[Rollout] = []
        for part in self._batches(plans):
            out += [row.rollout() for row in self._interpret(part)]
        return out

    def _batches(self, plans: Sequence[Plan]) -> Iterator[list[Plan]]:
        """Plans in order; one request is never split. Turns are counted with a quarter of the tokens they may take."""
        most = max_rows(self.policy, self.sampling)
        lengths = [len(p.prompt) + sum(map(len, p.chunks)) + len(p.chunks) * most // 4 for p in plans]
        for part in side_by_side([p.request.n for p in plans], lengths, self.sampling.max_batch_tokens):
            yield [plans[i] for i in part]

    # -- one batch -------------------------------------------------------------------------------------------------

    def _interpret(self, plans: Sequence[Plan]) -> list[Row]:
        began = time.perf_counter()
        cache = _empty_cache(self.policy)
        first = [Row(p, 0) for p in plans]
        hidden = self._observe(first, cache)
        # The first chunk is encoded once for all rollouts of a request.
        repeat = torch.tensor([i for i, p in enumerate(plans) for _ in range(p.request.n)])
        cache, hidden = cache.select(repeat.to(hidden.device)), hidden[repeat.to(hidden.device)]
        rows = [Row(p, k, length=first[i].length) for i, p in enumerate(plans) for k in range(p.request.n)]
        living = rows
        encode_seconds = 0.0
        while True:
            turn = living[0].turn
            encode_seconds += sum(p.encode_seconds[turn] for p in plans if turn < len(p.encode_seconds))
            self._write_turn(living, cache, hidden)
            for row in living:
                row.close(self.policy, self.policy_version, encode_seconds + time.perf_counter() - began)
            keep = [b for b, row in enumerate(living) if row.turn < len(row.plan.chunks)]
            if not keep:
                return rows
            if len(keep) < len(living):
                cache = cache.select(torch.tensor(keep, device=self.policy.device))
                living = [living[b] for b in keep]
            hidden = self._observe(living, cache)

    def _observe(self, rows: Sequence[Row], cache: RowCache) -> Tensor:
        """What each row has not read yet, up to and including its next chunk. Returns the last hidden states [B, H]."""
        embeds, codes, lengths, starts = [], [], [], []
        for row in rows:
            observed = row.observed(self.policy)
            ids = torch.cat([torch.tensor(row.unread, dtype=torch.long), observed.ids])
            # A placeholder among the unread tokens is one that the policy wrote itself.
            own = torch.arange(len(ids)) < len(row.unread)
            embeds.append(self.policy.embed(ids, observed.audio, own, observed.codes))
            codes.append(observed.codes)
            lengths.append(len(ids))
            starts.append(row.length)
            row.length, row.unread = row.length + len(ids), []
        padded = pad_sequence(embeds, batch_first=True)
        places = torch.tensor(starts, device=padded.device)[:, None] + torch.arange(
            padded.shape[1], device=padded.device
        )
        inputs = {"inputs_embeds": padded, **self.policy.routed(padded_codes(codes, lengths))}
        hidden = self._forward(inputs, places, max(starts) + padded.shape[1], cache)
        last = torch.tensor(lengths, device=padded.device) - 1
        return hidden[torch.arange(len(rows), device=padded.device), last]

    def _forward(self, inputs: dict[str, Any], places: Tensor, width: int, cache: RowCache) -> Tensor:
        """Hidden states [B, L, H] of new tokens at positions `places` [B, L], all below `width`. Padding lies behind a
        row's last token, where nothing looks and where the next tokens overwrite it."""
        cache.at(places, width)
        visible = torch.arange(cache.width, device=places.device) <= places[:, :, None]
        out = self._decoder(
            **inputs,
            attention_mask=visible[:, None],
            position_ids=places,
            past_key_values=cache.layers,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _write_turn(self, rows: Sequence[Row], cache: RowCache, hidden: Tensor) -> None:
        """One turn of every row: tokens until the turn ends or has its most tokens."""
        device = self.policy.device
        sampler = sampler_for(self.policy, self.sampling, [row.key() for row in rows])
        allowed = [row.allowed() for row in rows]
        for row, words in zip(rows, allowed, strict=True):
            row.stop_reason = "stop" if words == 0 else None
        # Rows that must write a number of words may not end their turn themselves.
        forced = torch.tensor([words is not None for words in allowed])
        going = forced.to(device) if bool(forced.any()) else None
        part, active = cache, list(range(len(rows)))
        for _ in range(sampler.max_rows):
            written = sampler.step(hidden, going)
            for i, now in zip(active, written.rows(), strict=True):
                if rows[i].stop_reason is None:
                    self._append(rows[i], sampler, i, now, allowed[i])
            still = [b for b, i in enumerate(active) if rows[i].stop_reason is None]
            if not still:
                break
            stay: Tensor | None = None  # all rows
            if len(still) * 2 <= len(active):
                # Rows that have ended their turn leave the batch; most end with the first token.
                if part is not cache:
                    cache.write_back(part, torch.tensor(active, device=device))
                active, stay = [active[b] for b in still], torch.tensor(still)
                part = cache.select(torch.tensor(active, device=device))
                sampler.select(active)
                going = None if going is None else forced[active].to(device)
            ends = [rows[i].length for i in active]
            places = torch.tensor(ends, device=device)[:, None]
            hidden = self._forward(written.embedded(self.policy, stay), places, max(ends) + 1, part)[:, -1]
            for i in active:
                if rows[i].stop_reason is None:
                    rows[i].length, rows[i].unread = rows[i].length + 1, []
        if part is not cache:
            cache.write_back(part, torch.tensor(active, device=device))

    def _append(self, row: Row, sampler: Sampler, i: int, now: tuple[Any, ...], words: int | None) -> None:
        """A turn's row as the sampler gives it; it ends with a token, never in the middle of speech."""
        if words is not None and row.plan.count(self.policy.decode([*row.buffer.ids, now[0]])) > words:
            row.stop_reason = "stop"  # the token would begin one word too many
            return
        row.buffer.add(*now)
        row.unread = [now[0]]
        row.stop_reason = sampler.ended(i, row.buffer)


class LiveStream:
    """One live stream: each turn is interpreted when it comes. Gives the segments that `StreamDecoder` gives.

    `sample` holds the messages; its turns are those to come.
    """

    def __init__(self, policy: AudioPolicy, sampling: SamplingConfig, sample: Sample, seed: int = 0):
        self._decoder = StreamDecoder(policy, sampling)
        self._policy = policy
        request = Request(replace(sample, turns=()), seed=seed)
        with torch.no_grad():
            prompt = policy.prompt(request.sample)
        self._row = Row(Plan(request, prompt, []), 0)
        self._cache = _empty_cache(policy)
        self._seconds = 0.0

    @property
    def rollout(self) -> Rollout:
        """Everything so far."""
        return self._row.rollout()

    @torch.no_grad()
    def observe(self, turn: Turn) -> Segment:
        """The segment that the policy writes after this turn. Emit times count the seconds spent in here."""
        training = self._policy.model.training
        self._policy.model.eval()  # in training mode, gradient checkpointing would switch the cache off
        try:
            return self._observe(turn)
        finally:
            self._policy.model.train(training)

    def _observe(self, turn: Turn) -> Segment:
        began = time.perf_counter()
        plan, sample = self._row.plan, self._row.plan.request.sample
        request = replace(plan.request, sample=replace(sample, turns=(*sample.turns, turn)))
        self._row.plan = replace(plan, request=request, chunks=[*plan.chunks, self._policy.chunk_ids(turn.audio)])
        with self._policy.autocast(), ungrouped(self._policy.backbone.decoder(self._policy.model)):
            self._decoder._write_turn([self._row], self._cache, self._decoder._observe([self._row], self._cache))
        self._seconds += time.perf_counter() - began
        self._row.close(self._policy, self._decoder.policy_version, self._seconds)
        return self._row.segments[-1]


def _empty_cache(policy: AudioPolicy) -> RowCache:
    empty = policy.new_cache()
    kinds = [type(layer).__name__ for layer in empty.layers]
    cache = RowCache(empty)
    if cache.aligned:
        raise ValueError(f"streams need full attention in every layer; the layers of this model keep {set(kinds)}")
    return cache


@dataclass(frozen=True)
class Plan:
    """The inputs of a request: its prompt, the token ids of each turn's chunk, and the seconds each took."""

    request: Request
    prompt: Prompt
    chunks: list[Tensor]
    encode_seconds: list[float] = field(default_factory=list)

    def count(self, text: str) -> int:
        assert self.request.schedule is not None
        return self.request.schedule.count(text)


def plan_of(policy: AudioPolicy, request: Request) -> Plan:
    """Encodes the audio of all turns and times it. A chunk's tokens do not depend on later chunks."""
    chunks, encode_seconds = [], []
    for turn in request.sample.turns:
        began = time.perf_counter()
        chunks.append(policy.chunk_ids(turn.audio))
        encode_seconds.append(time.perf_counter() - began)
    return Plan(request, policy.prompt(request.sample), chunks, encode_seconds)


@dataclass
class Row:
    """One rollout in progress. `length` rows of it are in the cache; `unread` is the sampled token that is not yet."""

    plan: Plan
    index: int
    length: int = 0
    turn: int = 0
    segments: list[Segment] = field(default_factory=list)
    buffer: SegmentBuffer = field(default_factory=SegmentBuffer)
    unread: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def key(self) -> RolloutKey:
        request = self.plan.request
        return RolloutKey(request.seed, f"{request.sample.id}\0{self.turn}", self.index, request.greedy)

    def observed(self, policy: AudioPolicy) -> Prompt:
        """What comes before this turn's tokens. A turn that did not end itself is ended here."""
        chunk, clip = self.plan.chunks[self.turn], self.plan.request.sample.turns[self.turn].audio
        if self.turn == 0:
            return self.plan.prompt.followed_by(chunk, (clip,))
        if self.segments[-1].stop_reason != "eos":
            chunk = torch.cat([torch.tensor([policy.end_id]), chunk])
        return Prompt(chunk, audio=(clip,))

    def allowed(self) -> int | None:
        """How many words a forced schedule wants now; None: the policy decides."""
        schedule = self.plan.request.schedule
        if schedule is None:
            return None
        written = schedule.count("".join(s.text for s in self.segments))
        return schedule.words(self.turn, len(self.plan.chunks), written)

    def close(self, policy: AudioPolicy, policy_version: int, seconds: float) -> None:
        """The turn as a segment, and the row ready for the next one. `seconds` of computing went by until now."""
        assert self.stop_reason is not None
        turn = self.plan.request.sample.turns[self.turn]
        observed = self.observed(policy)
        segment = Segment(
            prompt_ids=observed.ids,
            prompt_codes=observed.codes,
            **self.buffer.fields(),
            text=policy.decode(self.buffer.ids),
            audio=observed.audio,
            stop_reason=self.stop_reason,
            policy_version=policy_version,
            source_time=turn.end,
            emit_time=turn.end + seconds,
        )
        self.segments.append(segment)
        self.turn += 1
        self.buffer, self.stop_reason = SegmentBuffer(), None

    def rollout(self) -> Rollout:
        """Everything so far."""
        request = self.plan.request
        return Rollout(request.sample, tuple(self.segments), request.group_id or request.sample.id, self.index)

"""Segmented rollouts: a chunk of audio arrives, the policy writes until it ends its turn, the next chunk arrives.

All observed and sampled tokens stay in one key-value cache. The token at position p of a row is in column p, so that
rows may have different lengths and nothing is computed twice. All streams of a batch take their turns together; after
the first token of a turn only those that write on are decoded. A model that speaks may add speech to the text of any
turn (`samplers.py`).

A schedule may cut what the model wrote in a turn (`Schedule.review`): the row goes back to the column after the last
token that is kept, and what is observed next overwrites the rest.

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
from audiorl.models.attention import as_mask, recording
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt
from audiorl.models.speech import pad_codes
from audiorl.protocols import Hypothesis, Request, Review
from audiorl.rollout.cache import RowCache
from audiorl.rollout.samplers import RolloutKey, Sampler, SegmentBuffer, max_rows, sampler_for
from audiorl.types import Rollout, Segment, StopReason


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
        cache = empty_cache(self.policy)
        first = [Row(p, 0) for p in plans]
        hidden = self.observe(first, cache)
        # The first chunk is encoded once for all rollouts of a request.
        repeat = torch.tensor([i for i, p in enumerate(plans) for _ in range(p.request.n)])
        cache, hidden = cache.select(repeat.to(hidden.device)), hidden[repeat.to(hidden.device)]
        rows = [row.sibling(k) for row in first for k in range(row.plan.request.n)]
        living = rows
        encode_seconds = 0.0
        while True:
            turn = living[0].turn
            encode_seconds += sum(p.encode_seconds[turn] for p in plans if turn < len(p.encode_seconds))
            self.write_turn(living, cache, hidden)
            self._review_turn(living, cache)
            for row in living:
                row.close(self.policy, self.policy_version, encode_seconds + time.perf_counter() - began)
            keep = [b for b, row in enumerate(living) if row.turn < len(row.plan.chunks)]
            if not keep:
                return rows
            if len(keep) < len(living):
                cache = cache.select(torch.tensor(keep, device=self.policy.device))
                living = [living[b] for b in keep]
            hidden = self.observe(living, cache)

    def observe(self, rows: Sequence[Row], cache: RowCache) -> Tensor:
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
            row.observe(self.policy.is_audio(ids, own), embeds[-1])
        padded = pad_sequence(embeds, batch_first=True)
        places = torch.tensor(starts, device=padded.device)[:, None] + torch.arange(
            padded.shape[1], device=padded.device
        )
        inputs = {"inputs_embeds": padded, **self.policy.routing_kwargs(pad_codes(codes, lengths))}
        hidden = self.forward(inputs, places, max(starts) + padded.shape[1], cache)
        last = torch.tensor(lengths, device=padded.device) - 1
        return hidden[torch.arange(len(rows), device=padded.device), last]

    def forward(self, inputs: dict[str, Any], places: Tensor, width: int, cache: RowCache) -> Tensor:
        """Hidden states [B, L, H] of tokens at positions `places` [B, L], all below `width`. Padding lies behind a
        row's last token, where nothing looks and where the next tokens overwrite it."""
        cache.at(places, width)
        visible = torch.arange(cache.width, device=places.device) <= places[:, :, None]
        out = self._decoder(
            **inputs,
            attention_mask=as_mask(self._decoder, visible[:, None], inputs["inputs_embeds"].dtype),
            position_ids=places,
            past_key_values=cache.layers,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def write_turn(self, rows: Sequence[Row], cache: RowCache, hidden: Tensor) -> None:
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
            hidden = self.forward(written.embedded(self.policy, stay), places, max(ends) + 1, part)[:, -1]
            for i in active:
                if rows[i].stop_reason is None:
                    rows[i].length, rows[i].unread = rows[i].length + 1, []
                    rows[i].passes += 1
        if part is not cache:
            cache.write_back(part, torch.tensor(active, device=device))

    def _review_turn(self, rows: Sequence[Row], cache: RowCache) -> None:
        """Cut the turns of rows whose schedule reviews them, all but the last turn of a row."""
        reviews = [None if row.is_last else row.review for row in rows]
        for layers in {r.layers for r in reviews if r is not None}:
            reviewed = [b for b, r in enumerate(reviews) if r is not None and r.layers == layers]
            attention = {} if layers is None else self._attention(rows, reviewed, cache, layers)
            for b in reviewed:
                rows[b].cut(self.policy, attention.get(b))

    def _attention(
        self, rows: Sequence[Row], reviewed: Sequence[int], cache: RowCache, layers: tuple[int, ...]
    ) -> dict[int, Tensor]:
        """How the prediction of each token [n] of a turn attends to the row's audio tokens [A]: [n, A], rows sum to 1,
        for the `reviewed` rows that have written something.

        One forward pass, of the last observed token and those of the turn. It writes their columns again, in all rows:
        the padding of a row that did not take part would overwrite them.
        """
        turns = [row.hypothesis_ids(self.policy) for row in rows]
        reviewed = [b for b in reviewed if turns[b]]
        if not reviewed:
            return {}
        embeds = [
            torch.cat([row.observed_LH[-1:], self.policy.embed_tokens(torch.tensor(ids, dtype=torch.long), None)])
            for row, ids in zip(rows, turns, strict=True)
        ]
        padded = pad_sequence(embeds, batch_first=True)
        starts = [row.start - 1 for row in rows]
        places = torch.tensor(starts, device=padded.device)[:, None] + torch.arange(
            padded.shape[1], device=padded.device
        )
        with recording(self._decoder, layers) as record:
            inputs = {"inputs_embeds": padded, "record": record, **self.policy.routing_kwargs(None)}
            self.forward(inputs, places, max(starts) + padded.shape[1], cache)
        weights_BLS = record.mean()
        attention = {}
        for b in reviewed:
            rows[b].passes += 1
            columns = torch.tensor(rows[b].audio_columns, device=weights_BLS.device)
            audio_nA = weights_BLS[b, : len(turns[b])][:, columns].cpu()
            attention[b] = audio_nA / audio_nA.sum(-1, keepdim=True)
        return attention

    def _append(self, row: Row, sampler: Sampler, i: int, now: tuple[Any, ...], words: int | None) -> None:
        """A turn's row as the sampler gives it; it ends with a token, never in the middle of speech."""
        if words is not None and row.plan.count(self.policy.decode([*row.buffer.ids, now[0]])) > words:
            row.stop_reason = "stop"  # the token would begin one word too many
            return
        row.buffer.add(*now)
        row.unread = [now[0]]
        row.stop_reason = sampler.ended(i, row.buffer)


def empty_cache(policy: AudioPolicy) -> RowCache:
    """Raises ValueError for a model whose layers do not keep all keys and values."""
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
    if policy.speech is not None and request.schedule is not None and request.schedule.review is not None:
        raise ValueError(
            f"sample {request.sample.id!r}: its schedule reviews what the model writes, but this model also speaks; "
            "choose wait-k or offline"
        )
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
    forgotten: int = 0
    """Turns before the first one of `plan`."""
    segments: list[Segment] = field(default_factory=list)
    buffer: SegmentBuffer = field(default_factory=SegmentBuffer)
    unread: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    start: int = 0
    """The column of this turn's first token."""
    observed_LH: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The embeddings of what was observed before it."""
    audio_columns: list[int] = field(default_factory=list)
    """The columns of all audio tokens."""
    earlier: list[tuple[int, ...]] = field(default_factory=list)
    """As `Hypothesis.earlier`."""
    passes: int = 0
    """Forward passes of the decoder in this turn."""

    @property
    def is_last(self) -> bool:
        """Whether the source ends with this turn."""
        return self.turn == len(self.plan.chunks) - 1

    @property
    def review(self) -> Review | None:
        schedule = self.plan.request.schedule
        return None if schedule is None else schedule.review

    def key(self) -> RolloutKey:
        request = self.plan.request
        greedy = request.greedy or self.review is not None
        return RolloutKey(request.seed, f"{request.sample.id}\0{self.forgotten + self.turn}", self.index, greedy)

    def sibling(self, index: int) -> Row:
        """Another rollout of the same request, before the first turn is written."""
        fresh = replace(self, index=index, segments=[], buffer=SegmentBuffer(), unread=[], earlier=[])
        return replace(fresh, audio_columns=list(self.audio_columns))

    def observe(self, is_audio_L: Tensor, embeds_LH: Tensor) -> None:
        """What is observed before this turn's tokens goes to the next L columns; is_audio_L: which are audio tokens."""
        if self.review is not None:
            self.audio_columns += (self.length + is_audio_L.nonzero()[:, 0]).tolist()
        self.observed_LH = embeds_LH
        self.length, self.unread = self.length + len(embeds_LH), []
        self.start = self.length
        self.passes += 1

    def hypothesis_ids(self, policy: AudioPolicy) -> tuple[int, ...]:
        """[n]: this turn's tokens without the one that ends it."""
        ids = self.buffer.ids
        return tuple(ids[:-1] if ids and ids[-1] in policy.stop_ids else ids)

    def cut(self, policy: AudioPolicy, attention_nA: Tensor | None) -> None:
        """Take back the tokens that the schedule does not keep, in whole words. A turn that is kept as a whole stays as
        it is, with the token that ends it."""
        review = self.review
        assert review is not None
        ids = self.hypothesis_ids(policy)
        keep = review.keep(Hypothesis(ids, tuple(self.earlier), attention_nA)) if ids else 0
        words = self.plan.count(policy.decode(ids))
        while 0 < keep < len(ids) and words != sum(self.plan.count(policy.decode(x)) for x in (ids[:keep], ids[keep:])):
            keep -= 1
        if keep < len(ids):
            self.buffer = SegmentBuffer(list(ids[:keep]), self.buffer.logprobs[:keep])
            self.length, self.unread, self.stop_reason = self.start + keep, [], "stop"
        if review.earlier:
            hypotheses = [x[keep:] for x in (*self.earlier, ids) if x[:keep] == ids[:keep]]
            self.earlier = hypotheses[-review.earlier :]

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
            decoder_passes=self.passes,
        )
        self.segments.append(segment)
        self.turn += 1
        self.buffer, self.stop_reason, self.passes = SegmentBuffer(), None, 0

    def rollout(self) -> Rollout:
        """Everything so far."""
        request = self.plan.request
        return Rollout(request.sample, tuple(self.segments), request.group_id or request.sample.id, self.index)

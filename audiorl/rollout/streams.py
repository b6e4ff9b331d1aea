"""Segmented rollouts: a chunk of audio arrives, the policy writes until it ends its turn, the next chunk arrives.

All tokens stay in one key-value cache: that at position p of a stream is in column p, so streams may have different
lengths and nothing is computed twice. All streams of a batch take their turns together; after the first token of a turn
only those that write on are decoded. A schedule may cut a turn (`Schedule.review`): the stream returns to the column
after the last token that is kept, and the next observed tokens overwrite the rest.

`LiveStream` interprets one stream while it comes, for as long as it lasts.

Shapes: B streams, L new tokens, S cached columns, H decoder width, Q codebooks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiorl.config import SamplingConfig
from audiorl.models.attention import as_mask, gqa_without_repeat, recording
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt
from audiorl.models.speech import pad_codes
from audiorl.protocols import Hypothesis, Request, Review
from audiorl.rollout.batch import RowCache
from audiorl.rollout.samplers import RolloutKey, SegmentBuffer, max_rows, sampler_for
from audiorl.types import Rollout, Sample, Segment, StopReason, Turn


@dataclass(frozen=True)
class StreamInputs:
    """The inputs of a request: its prompt, the token ids of each turn's chunk, and the seconds each took."""

    request: Request
    prompt: Prompt
    chunks: list[Tensor]
    encode_seconds: list[float] = field(default_factory=list)


def stream_inputs(policy: AudioPolicy, request: Request) -> StreamInputs:
    """Encode the audio of all turns and time it. A chunk's tokens do not depend on later chunks."""
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
    return StreamInputs(request, policy.prompt(request.sample), chunks, encode_seconds)


@dataclass
class StreamState:
    """One rollout in progress. `length` tokens are in the cache; `unread` is the sampled token that is not yet."""

    inputs: StreamInputs
    index: int
    length: int = 0
    turn: int = 0
    forgotten: int = 0
    """Turns before the first one of `inputs`."""
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
    def review(self) -> Review | None:
        schedule = self.inputs.request.schedule
        return None if schedule is None else schedule.review

    def key(self) -> RolloutKey:
        request = self.inputs.request
        greedy = request.greedy or self.review is not None
        return RolloutKey(request.seed, f"{request.sample.id}\0{self.forgotten + self.turn}", self.index, greedy)

    def sibling(self, index: int) -> StreamState:
        """Return another rollout of the same request, before the first turn is written."""
        fresh = replace(self, index=index, segments=[], buffer=SegmentBuffer(), unread=[], earlier=[])
        return replace(fresh, audio_columns=list(self.audio_columns))

    def observe(self, is_audio_L: Tensor, embeds_LH: Tensor) -> None:
        """Put the tokens observed before this turn into the next L columns; is_audio_L: which are audio tokens."""
        if self.review is not None:
            self.audio_columns += (self.length + is_audio_L.nonzero()[:, 0]).tolist()
        self.observed_LH = embeds_LH
        self.length, self.unread = self.length + len(embeds_LH), []
        self.start = self.length
        self.passes += 1

    def hypothesis_ids(self, policy: AudioPolicy) -> tuple[int, ...]:
        """Return [n]: this turn's tokens without the one that ends it."""
        ids = self.buffer.ids
        return tuple(ids[:-1] if ids and ids[-1] in policy.stop_ids else ids)

    def cut(self, policy: AudioPolicy, attention_nA: Tensor | None) -> None:
        """Take back the words that the schedule does not keep. A turn that is kept whole keeps its end."""
        schedule, review, ids = self.inputs.request.schedule, self.review, self.hypothesis_ids(policy)
        assert schedule is not None and review is not None
        keep = review.keep(Hypothesis(ids, tuple(self.earlier), attention_nA)) if ids else 0
        words = schedule.count(policy.decode(ids))
        while 0 < keep < len(ids):  # a word is kept whole or not at all
            if words == schedule.count(policy.decode(ids[:keep])) + schedule.count(policy.decode(ids[keep:])):
                break
            keep -= 1
        if keep < len(ids):
            self.buffer = SegmentBuffer(list(ids[:keep]), self.buffer.logprobs[:keep])
            self.length, self.unread, self.stop_reason = self.start + keep, [], "stop"
        if review.earlier:
            hypotheses = [x[keep:] for x in (*self.earlier, ids) if x[:keep] == ids[:keep]]
            self.earlier = hypotheses[-review.earlier :]

    def observed(self, policy: AudioPolicy) -> Prompt:
        """Return the input before this turn's tokens. A turn that did not end itself is ended here."""
        chunk, clip = self.inputs.chunks[self.turn], self.inputs.request.sample.turns[self.turn].audio
        if self.turn == 0:
            return self.inputs.prompt.followed_by(chunk, (clip,))
        if self.segments[-1].stop_reason != "eos":
            chunk = torch.cat([torch.tensor([policy.end_id]), chunk])
        return Prompt(chunk, audio=(clip,))

    def allowed(self) -> int | None:
        """Return how many words a forced schedule wants now; None: the policy decides."""
        schedule = self.inputs.request.schedule
        if schedule is None:
            return None
        written = schedule.count("".join(s.text for s in self.segments))
        return schedule.words(self.turn, len(self.inputs.chunks), written)

    def close(self, policy: AudioPolicy, policy_version: int, seconds: float) -> None:
        """Store the turn as a segment and begin the next one. `seconds` of computing went by until now."""
        assert self.stop_reason is not None
        turn = self.inputs.request.sample.turns[self.turn]
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
        """Return everything so far."""
        request = self.inputs.request
        return Rollout(request.sample, tuple(self.segments), request.group_id or request.sample.id, self.index)


class StreamDecoder:
    """Writes one segment after every turn of its requests' samples."""

    def __init__(self, policy: AudioPolicy, sampling: SamplingConfig, policy_version: int = 0):
        self.policy, self.sampling, self.policy_version = policy, sampling, policy_version
        self._decoder = policy.backbone.decoder(policy.model)

    def rollouts(self, requests: Sequence[Request]) -> list[Rollout]:
        """Return all rollouts, request by request, index ascending.

        `max_batch_tokens` bounds a batch: all its streams times the longest, turns with a quarter of what they may
        take.
        """
        most = max_rows(self.policy, self.sampling)
        batches: list[list[StreamInputs]] = []
        count = longest = 0
        for one in [stream_inputs(self.policy, r) for r in requests]:
            schedule = one.request.schedule
            at_end = schedule is not None and schedule.review is None  # the sampling has room for all in the last turn
            length = len(one.prompt) + sum(map(len, one.chunks)) + (1 if at_end else len(one.chunks)) * most // 4
            if not batches or (count + one.request.n) * max(longest, length) > self.sampling.max_batch_tokens:
                batches.append([])
                count = longest = 0
            batches[-1].append(one)
            count, longest = count + one.request.n, max(longest, length)
        return [stream.rollout() for batch in batches for stream in self._interpret(batch)]

    def _interpret(self, inputs: Sequence[StreamInputs]) -> list[StreamState]:
        began = time.perf_counter()
        cache = empty_cache(self.policy)
        first = [StreamState(one, 0) for one in inputs]
        hidden = self.observe(first, cache)
        # The first chunk is encoded once for all rollouts of a request.
        repeat = torch.tensor([i for i, one in enumerate(inputs) for _ in range(one.request.n)])
        cache, hidden = cache.select(repeat.to(hidden.device)), hidden[repeat.to(hidden.device)]
        streams = [stream.sibling(k) for stream in first for k in range(stream.inputs.request.n)]
        active = streams
        encode_seconds = 0.0
        while True:
            turn = active[0].turn
            encode_seconds += sum(one.encode_seconds[turn] for one in inputs if turn < len(one.encode_seconds))
            self.write_turn(active, cache, hidden)
            self._review_turn(active, cache)
            for stream in active:
                stream.close(self.policy, self.policy_version, encode_seconds + time.perf_counter() - began)
            keep = [b for b, stream in enumerate(active) if stream.turn < len(stream.inputs.chunks)]
            if not keep:
                return streams
            if len(keep) < len(active):
                cache = cache.select(torch.tensor(keep, device=self.policy.device))
                active = [active[b] for b in keep]
            hidden = self.observe(active, cache)

    def observe(self, streams: Sequence[StreamState], cache: RowCache) -> Tensor:
        """Read what each stream has not read yet, with its next chunk. Returns the last hidden states [B, H]."""
        embeds, read, codes, lengths, starts = [], [], [], [], []
        for stream in streams:
            observed = stream.observed(self.policy)
            ids = torch.cat([torch.tensor(stream.unread, dtype=torch.long), observed.ids])
            # A placeholder among the unread tokens is one that the policy wrote itself.
            own = torch.arange(len(ids)) < len(stream.unread)
            embeds.append(self.policy.embed(ids, observed.audio, own, observed.codes))
            read.append(ids)
            codes.append(observed.codes)
            lengths.append(len(ids))
            starts.append(stream.length)
            stream.observe(self.policy.is_audio(ids, own), embeds[-1])
        padded = pad_sequence(embeds, batch_first=True)
        places = torch.tensor(starts, device=padded.device)[:, None] + torch.arange(
            padded.shape[1], device=padded.device
        )
        ids, frames = pad_sequence(read, batch_first=True), pad_codes(codes, lengths)
        inputs = {"inputs_embeds": padded, **self.policy.decoder_arguments(ids, frames)}
        hidden = self.forward(inputs, places, max(starts) + padded.shape[1], cache)
        last = torch.tensor(lengths, device=padded.device) - 1
        return hidden[torch.arange(len(streams), device=padded.device), last]

    def forward(self, inputs: dict[str, Any], places: Tensor, width: int, cache: RowCache) -> Tensor:
        """Return hidden states [B, L, H] of tokens at positions `places` [B, L], all below `width`.

        Padding lies behind a stream's last token, where nothing looks and where the next tokens overwrite it.
        """
        cache.at(places, width)
        visible = torch.arange(width, device=places.device) <= places[:, :, None]
        out = self._decoder(
            **inputs,
            attention_mask=as_mask(self._decoder, visible[:, None], inputs["inputs_embeds"].dtype),
            position_ids=places,
            past_key_values=cache.layers,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def write_turn(self, streams: Sequence[StreamState], cache: RowCache, hidden: Tensor) -> None:
        """Write one turn of every stream: tokens until the turn ends or has its most tokens."""
        device = self.policy.device
        sampler = sampler_for(self.policy, self.sampling, [stream.key() for stream in streams])
        allowed = [stream.allowed() for stream in streams]
        for stream, words in zip(streams, allowed, strict=True):
            stream.stop_reason = "stop" if words == 0 else None
        # Streams that must write a number of words may not end their turn themselves.
        forced = torch.tensor([words is not None for words in allowed])
        must_continue = forced.to(device) if bool(forced.any()) else None
        part, active = cache, list(range(len(streams)))
        for _ in range(sampler.max_rows):
            written = sampler.step(hidden, must_continue)
            for i, now in zip(active, written.rows(), strict=True):
                stream, words = streams[i], allowed[i]
                if stream.stop_reason is not None:
                    continue
                schedule = stream.inputs.request.schedule
                if words is not None:
                    assert schedule is not None
                    text = self.policy.decode([*stream.buffer.ids, now[0]])
                    if schedule.count(text) > words:
                        stream.stop_reason = "stop"  # the token would begin one word too many
                        continue
                # A turn ends with a token, never in the middle of speech.
                try:
                    stream.buffer.add(*now)
                except FloatingPointError as error:
                    name = f"stream {stream.inputs.request.sample.id!r}, turn {stream.turn + 1}"
                    raise FloatingPointError(f"{name}, {error}") from None
                stream.unread = [now[0]]
                stream.stop_reason = sampler.ended(i, stream.buffer)
            still = [b for b, i in enumerate(active) if streams[i].stop_reason is None]
            if not still:
                break
            stay: Tensor | None = None  # all streams
            if len(still) * 2 <= len(active):
                # Streams that have ended their turn leave the batch; most end with the first token.
                if part is not cache:
                    cache.write_back(part, torch.tensor(active, device=device))
                active, stay = [active[b] for b in still], torch.tensor(still)
                part = cache.select(torch.tensor(active, device=device))
                sampler.select(active)
                must_continue = None if must_continue is None else forced[active].to(device)
            ends = [streams[i].length for i in active]
            places = torch.tensor(ends, device=device)[:, None]
            hidden = self.forward(written.next_inputs(self.policy, stay), places, max(ends) + 1, part)[:, -1]
            for i in active:
                if streams[i].stop_reason is None:
                    streams[i].length, streams[i].unread = streams[i].length + 1, []
                    streams[i].passes += 1
        if part is not cache:
            cache.write_back(part, torch.tensor(active, device=device))

    def _review_turn(self, streams: Sequence[StreamState], cache: RowCache) -> None:
        """Cut the turns of streams whose schedule reviews them, all but the last turn of a stream."""
        reviews = [None if s.turn == len(s.inputs.chunks) - 1 else s.review for s in streams]
        for layers in {r.layers for r in reviews if r is not None}:
            reviewed = [b for b, r in enumerate(reviews) if r is not None and r.layers == layers]
            attention = {} if layers is None else self._attention(streams, reviewed, cache, layers)
            for b in reviewed:
                streams[b].cut(self.policy, attention.get(b))

    def _attention(
        self, streams: Sequence[StreamState], reviewed: Sequence[int], cache: RowCache, layers: tuple[int, ...]
    ) -> dict[int, Tensor]:
        """Return how the prediction of each token [n] of a turn attends to the audio tokens [A]: [n, A], summing to 1,
        for the `reviewed` streams that have written something.

        One forward pass, of the last observed token and those of the turn. It writes their columns again, in all
        streams: the padding of a stream that did not take part would overwrite them.
        """
        turns = [stream.hypothesis_ids(self.policy) for stream in streams]
        reviewed = [b for b in reviewed if turns[b]]
        if not reviewed:
            return {}
        written = [torch.tensor(ids, dtype=torch.long) for ids in turns]
        embeds = [
            torch.cat([stream.observed_LH[-1:], self.policy.embed_tokens(ids, None)])
            for stream, ids in zip(streams, written, strict=True)
        ]
        padded = pad_sequence(embeds, batch_first=True)
        read = [
            torch.cat([stream.observed(self.policy).ids[-1:], ids])
            for stream, ids in zip(streams, written, strict=True)
        ]
        read_BL = pad_sequence(read, batch_first=True)
        starts = [stream.start - 1 for stream in streams]
        places = torch.tensor(starts, device=padded.device)[:, None] + torch.arange(
            padded.shape[1], device=padded.device
        )
        with recording(self._decoder, layers) as record:
            inputs = {"inputs_embeds": padded, **self.policy.decoder_arguments(read_BL, None)}
            self.forward(inputs, places, max(starts) + padded.shape[1], cache)
        weights_BLS = torch.stack(record).mean(0)
        attention = {}
        for b in reviewed:
            streams[b].passes += 1
            columns = torch.tensor(streams[b].audio_columns, device=weights_BLS.device)
            audio_nA = weights_BLS[b, : len(turns[b])][:, columns].cpu()
            attention[b] = audio_nA / audio_nA.sum(-1, keepdim=True)
        return attention


def empty_cache(policy: AudioPolicy) -> RowCache:
    """Return a cache for streams. Raises ValueError for a decoder that keeps less than all keys and values."""
    cache = RowCache(policy.new_cache())
    if cache.aligned:
        kind = policy.backbone.decoder(policy.model).config.model_type
        raise ValueError(
            f"streams: a decoder of type {kind!r} has layers with sliding windows or a state, which cannot return to "
            "an earlier token; choose a model whose layers attend to everything"
        )
    return cache


class LiveStream:
    """One stream that is interpreted while it comes. Without `history` its segments are those of `StreamDecoder`.

    With `history` at most so many turns are carried: when they are in the cache, all but the last half are forgotten,
    and the rest is computed again behind the instruction, as a stream that began there. So positions, memory and the
    cost of a chunk do not grow, and the instruction stays in front, where attention needs it (attention sinks, arXiv
    2309.17453).

    sample: holds the messages; its turns are those to come. Raises ValueError for a history below 2 or of a policy that
    speaks.
    """

    def __init__(
        self, policy: AudioPolicy, sampling: SamplingConfig, sample: Sample, seed: int = 0, history: int | None = None
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
        self._stream = StreamState(StreamInputs(request, prompt, []), 0)
        self._cache = empty_cache(policy)
        self._seconds = 0.0
        self._past: list[Segment] = []
        self._prompt_LH = torch.zeros(0)
        self._chunks_LH: list[Tensor] = []

    @property
    def rollout(self) -> Rollout:
        """The turns that are carried: everything so far, without `history`."""
        return self._stream.rollout()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments so far, those that are not carried any more without their clips."""
        return (*self._past, *self._stream.segments)

    @torch.no_grad()
    def observe(self, turn: Turn) -> Segment:
        """Return the segment that the policy writes after this turn. Emit times count the seconds spent in here."""
        policy = self._policy
        with policy.evaluating(), policy.autocast(), gqa_without_repeat(policy.backbone.decoder(policy.model)):
            return self._observe(turn)

    def _observe(self, turn: Turn) -> Segment:
        began = time.perf_counter()
        if self._stream.turn == self._history:
            self._forget(self._history // 2)
        stream = self._stream
        inputs, sample = stream.inputs, stream.inputs.request.sample
        chunk = self._policy.chunk_ids(turn.audio)
        request = replace(inputs.request, sample=replace(sample, turns=(*sample.turns, turn)))
        stream.inputs = replace(inputs, request=request, chunks=[*inputs.chunks, chunk])
        hidden = self._decoder.observe([stream], self._cache)
        if self._history is not None:
            before, own = stream.observed_LH.split([len(stream.observed_LH) - len(chunk), len(chunk)])
            self._prompt_LH = self._prompt_LH if self._chunks_LH else before
            self._chunks_LH.append(own)
        self._decoder.write_turn([stream], self._cache, hidden)
        self._seconds += time.perf_counter() - began
        stream.close(self._policy, self._decoder.policy_version, self._seconds)
        return stream.segments[-1]

    def _forget(self, keep: int) -> None:
        """Carry the last `keep` turns only, as if the stream had begun with them."""
        old, policy = self._stream, self._policy
        drop = old.turn - keep
        self._past += [replace(segment, audio=()) for segment in old.segments[:drop]]
        self._chunks_LH = self._chunks_LH[drop:]
        segments = old.segments[drop:]
        parts, read = [self._prompt_LH], [old.inputs.prompt.ids]
        chunks = old.inputs.chunks[drop:]
        for chunk_LH, chunk, segment in zip(self._chunks_LH, chunks, segments, strict=True):
            ended = [] if segment.stop_reason == "eos" else [policy.end_id]
            written = torch.tensor([*segment.ids.tolist(), *ended])
            if segment is segments[-1]:
                # As in a stream: the last token is not read yet, and the end of its turn comes with the next chunk.
                written = segment.ids[:-1]
            parts += [chunk_LH, policy.embed_tokens(written, None)]
            read += [chunk, written]
        embeds_LH = torch.cat(parts)
        self._cache = empty_cache(policy)
        places = torch.arange(len(embeds_LH), device=embeds_LH.device)[None]
        inputs = {"inputs_embeds": embeds_LH[None], **policy.decoder_arguments(torch.cat(read)[None], None)}
        self._decoder.forward(inputs, places, len(embeds_LH), self._cache)
        sample = old.inputs.request.sample
        request = replace(old.inputs.request, sample=replace(sample, turns=sample.turns[drop:]))
        self._stream = StreamState(
            replace(old.inputs, request=request, chunks=chunks),
            0,
            length=len(embeds_LH),
            turn=keep,
            forgotten=old.forgotten + drop,
            segments=segments,
            unread=segments[-1].ids[-1:].tolist(),
        )

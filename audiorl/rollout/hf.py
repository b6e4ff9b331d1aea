"""Rollouts with the transformers model itself: the engine that runs everywhere.

Each prompt is encoded and prefilled once; its key-value cache then serves all n answers (`batch.py`). Answers that have
ended make room for the next prompts as soon as these fit, and leave the batch at the latest when half of it is idle. A
sampler decides what each answer gets next, a token or a frame (`samplers.py`). A step waits for the device once, to
read what was sampled. On a GPU answers have slots (`slots.py`), steps are captured as CUDA graphs (`graphs.py`), and
each is read while the next runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from audiorl.config import SamplingConfig
from audiorl.distributed.local import gpu_work
from audiorl.models.attention import gqa_without_repeat
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt, wants_speech
from audiorl.models.speech import pad_codes
from audiorl.models.weights import Weights
from audiorl.protocols import Ended, Request
from audiorl.rollout.batch import Batch, PendingBatch, Prefill, new_batch
from audiorl.rollout.graphs import GraphRecorder, SlotSteps
from audiorl.rollout.samplers import RolloutKey, Sampler, SegmentBuffer, StepOutput, TextSampler, sampler_for
from audiorl.rollout.slots import Slots, takes_slots
from audiorl.rollout.streams import StreamDecoder
from audiorl.types import Rollout, Segment, StopReason

logger = logging.getLogger(__name__)


@dataclass
class AnswerState:
    """One answer in progress, new or paused before."""

    request: Request
    index: int
    prompt: Prompt
    before: Segment | None = None
    """Sampled by earlier calls, where the answer was paused."""
    buffer: SegmentBuffer = field(default_factory=SegmentBuffer)
    stop_reason: StopReason | None = None
    siblings: list[AnswerState] = field(default_factory=list, repr=False)
    """All answers to the request that this call continues, itself among them."""

    @property
    def num_before(self) -> int:
        return 0 if self.before is None else len(self.before.ids)

    def key(self) -> RolloutKey:
        r = self.request
        return RolloutKey(
            r.seed, r.sample.id, self.index, r.greedy, wants_speech(r.sample), self.num_before, self.prompt
        )

    def room(self, most: int) -> int:
        """Return how many tokens or frames this call may add, of `most` in an answer."""
        limit = self.request.token_limit
        return most - self.num_before if limit is None else min(most - self.num_before, limit)

    def reaches_limit(self) -> bool:
        limit = self.request.token_limit
        return limit is not None and len(self.buffer.ids) - self.num_before >= limit


def pending_answers(request: Request, prompt: Prompt) -> list[AnswerState]:
    """Return the answers that a request asks for: n new ones, or those that were paused."""
    answers = [] if request.paused else [AnswerState(request, k, prompt) for k in range(request.n)]
    for rollout in request.paused:
        before = rollout.segments[0]
        answers.append(AnswerState(request, rollout.index, prompt, before, SegmentBuffer.from_segment(before)))
    for answer in answers:
        answer.siblings = answers
    return answers


@dataclass
class _PromptGroup:
    """A prompt, and the answers that begin after it: all of a request, or one that was paused."""

    prompt: Prompt
    answers: list[AnswerState]
    sampled: Tensor | None = None
    """[P] bool: the tokens of the prompt that the policy sampled; None: none of them."""


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
        self.on_step = on_step
        self._in_slots = policy.device.type == "cuda" and takes_slots(policy)
        self._recorder: GraphRecorder | None = None
        if self.sampling.cuda_graphs and policy.device.type == "cuda":
            if self._in_slots:
                self._recorder = GraphRecorder(policy.device)
            elif policy.speech is None:
                _say_uncaptured(policy.backbone.decoder(policy.model).config.model_type)
        self.policy_version = 0

    def update_weights(self, weights: Weights, version: int) -> None:
        self.policy.load_weights(weights)
        self.policy_version = version

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Generate all rollouts of all requests, request by request, index ascending.

        `ended` is called with the answers to a request once all of them have ended, streams excepted.
        """
        policy = self.policy
        rollouts: list[Rollout] = []
        with policy.evaluating():
            # Triton starts kernels on torch's current device.
            on_device = torch.cuda.device(policy.device) if policy.device.type == "cuda" else nullcontext()
            with on_device, policy.autocast(), gqa_without_repeat(policy.backbone.decoder(policy.model)):
                for streams, group in groupby(requests, key=lambda r: bool(r.sample.turns)):
                    if streams:
                        rollouts += StreamDecoder(policy, self.sampling, self.policy_version).rollouts(list(group))
                        continue
                    groups, asked = [], list(group)
                    policy.encode_ahead(request.sample for request in asked)
                    for request in asked:
                        prompt = policy.prompt(request.sample)
                        answers = pending_answers(request, prompt)
                        if not request.paused:
                            groups.append(_PromptGroup(prompt, answers))
                        for answer in answers:
                            if answer.before is not None:  # what it has sampled becomes a part of its prompt
                                longer = prompt.followed_by(answer.before.ids, ())
                                sampled = torch.arange(len(longer)) >= len(prompt)
                                groups.append(_PromptGroup(longer, [answer], sampled))
                    decode = self._decode_in_slots if self._in_slots else self._decode
                    rollouts += [self._rollout(answer) for answer in decode(groups, ended)]
        return rollouts

    def _rollout(self, a: AnswerState) -> Rollout:
        assert a.stop_reason is not None
        return build_rollout(self.policy, a, a.buffer, a.stop_reason, self.policy_version)

    def _decode(self, groups: Sequence[_PromptGroup], ended: Ended | None) -> list[AnswerState]:
        """Decode all prompts in one loop: answers that end make room for the next ones."""
        answers = [answer for group in groups for answer in group.answers]
        sampler = sampler_for(self.policy, self.sampling, [answer.key() for answer in answers])
        batch = new_batch(self.policy, [len(group.answers) for group in groups])
        started = 0  # prompts whose answers are in the batch or have ended
        output: StepOutput | None = None
        while True:
            active = [b for b, i in enumerate(batch.rollouts) if answers[i].stop_reason is None]
            joining = self._joining(groups[started:], active, batch, sampler)
            # Dropping ended answers copies the cache: only when others join, or when half of the batch is idle.
            changes = bool(joining) or len(active) * 2 <= len(batch.rollouts)
            stay: Tensor | None = None  # all
            if changes and len(active) < len(batch.rollouts):
                stay = torch.tensor(active, dtype=torch.long)
                batch.keep(active)
            if batch.rollouts:
                assert output is not None
                with gpu_work():
                    batch.forward(output.next_inputs(self.policy, stay))
            if joining:
                new = groups[started : started + joining]
                before = sum(len(group.answers) for group in groups[:started])
                repeat = [i for i, group in enumerate(new) for _ in group.answers]
                most = max(group.answers[0].room(sampler.max_rows) for group in new)
                batch.join(self._prefill(new), repeat, range(before, before + len(repeat)), most)
                started += joining
            if not batch.rollouts:
                return answers
            if changes:
                sampler.select(batch.rollouts)
            with gpu_work():
                output = sampler.step(batch.hidden)
            self._add(answers, batch.rollouts, output, sampler, ended)

    def _decode_in_slots(self, groups: Sequence[_PromptGroup], ended: Ended | None) -> list[AnswerState]:
        """Decode all prompts in one loop, each step started before the one before it is read."""
        answers = [answer for group in groups for answer in group.answers]
        sampler = TextSampler(self.policy, self.sampling, [answer.key() for answer in answers])
        prompts = [(len(group.prompt), len(group.answers)) for group in groups]
        most = max(answer.room(sampler.max_rows) for answer in answers)
        slots = Slots(self.policy, prompts, most, self.sampling.max_batch_tokens, len(answers))
        steps = SlotSteps(self._recorder, self.policy, slots, sampler)
        started, begun = 0, 0  # prompts, and their answers, that are in slots or have ended
        ahead: StepOutput | None = None  # started, and not read yet
        while True:
            active = {
                b: answers[i].buffer.ids[-1]
                for b, i in enumerate(slots.rollouts)
                if i is not None and answers[i].stop_reason is None
            }
            joining = self._joining_slots(prompts[started:], active, slots)
            if not active and not joining:
                return answers
            if joining or slots.fewer(len(active)):
                if ahead is not None:  # it is of the rows as they are
                    self._add(answers, slots.rollouts, ahead, sampler, ended)
                    ahead = None
                    continue
                new = groups[started : started + joining]
                numbers: list[list[int]] = []
                for group in new:
                    numbers.append(list(range(begun, begun + len(group.answers))))
                    begun += len(group.answers)
                started += joining
                if not new:
                    slots.change(active)
                    continue
                prefill, flat = self._prefill(new), [i for rows in numbers for i in rows]
                repeat = [r for r, rows in enumerate(numbers) for _ in rows]
                sampler.select(flat)
                first = sampler.step(prefill.hidden[torch.tensor(repeat, device=prefill.hidden.device)])
                self._add(answers, flat, first, sampler, ended)
                joined = [
                    [(i, answers[i].buffer.ids[-1]) for i in rows if answers[i].stop_reason is None] for rows in numbers
                ]
                slots.change(active, prefill, joined)
                continue
            output = steps.launch() if ahead is None else ahead
            ahead = steps.launch()
            self._add(answers, slots.rollouts, output, sampler, ended)

    def _joining_slots(self, waiting: Sequence[tuple[int, int]], active: Collection[int], slots: Slots) -> int:
        """Count the waiting prompts for whose answers there are slots now; as `_joining`, rarely for a few."""
        prompts = rows = 0
        free_prompts, free_rows = slots.free(active)
        for _, count in waiting[:free_prompts]:
            if rows + count > free_rows:
                break
            prompts, rows = prompts + 1, rows + count
        last = prompts == len(waiting)
        return prompts if last or not active or rows * 8 >= len(slots.rollouts) else 0

    def _add(
        self,
        answers: Sequence[AnswerState],
        rollouts: Sequence[int | None],
        output: StepOutput,
        sampler: Sampler,
        ended: Ended | None,
    ) -> None:
        """Add a step of `rollouts` to their answers; None: nobody's."""
        for i, numbers in zip(rollouts, output.rows(), strict=False):
            if i is None or answers[i].stop_reason is not None:
                continue  # it stays in the batch until the next change
            answer = answers[i]
            try:
                answer.buffer.add(*numbers)
            except FloatingPointError as error:
                raise FloatingPointError(f"sample {answer.request.sample.id!r}, {error}") from None
            answer.stop_reason = sampler.ended(i, answer.buffer)
            stop = self.sampling.stop
            if answer.stop_reason != "eos" and ends_with_stop_string(self.policy, answer.buffer.ids, stop):
                answer.stop_reason = "stop"
            if answer.stop_reason is None and answer.reaches_limit():
                answer.stop_reason = "paused"
            if ended is not None and all(a.stop_reason is not None for a in answer.siblings):
                ended([self._rollout(a) for a in answer.siblings])
        if self.on_step is not None:
            self.on_step([answer.buffer for answer in answers])

    def _joining(self, waiting: Sequence[_PromptGroup], active: Sequence[int], batch: Batch, sampler: Sampler) -> int:
        """Count the waiting prompts that join the `active` answers now: what `max_batch_tokens` allows.

        To copy the cache less often, a few wait until an eighth of the batch can be replaced, unless they are the last.
        """
        if active and batch.aligned:
            return 0
        now = PendingBatch()
        for group in waiting:
            more = PendingBatch(
                now.prompts + 1,
                now.rows + len(group.answers),
                max(now.max_prompt_len, len(group.prompt)),
                max(now.max_new_tokens, group.answers[0].room(sampler.max_rows)),
            )
            if (active or now.prompts) and batch.tokens(active, more) > self.sampling.max_batch_tokens:
                break
            now = more
        last = now.prompts == len(waiting)
        return now.prompts if last or not active or now.rows * 8 >= len(batch.rollouts) else 0

    @gpu_work()
    def _prefill(self, groups: Sequence[_PromptGroup]) -> Prefill:
        """Run left-padded prompts through the decoder."""
        policy, device = self.policy, self.policy.device
        prompts = [group.prompt for group in groups]
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        embeds = [
            policy.embed(g.prompt.ids, g.prompt.audio, g.sampled, g.prompt.codes, g.prompt.images) for g in groups
        ]
        padded = torch.stack([pad(e, (0, 0, longest - len(e), 0)) for e in embeds])
        places = torch.arange(longest, device=device) - (longest - torch.tensor(lengths, device=device))[:, None]
        positions, ends = places.clamp(min=0), lengths
        deep: dict[str, Any] = {}
        if images := [picture for p in prompts for picture in p.images]:
            seen = [policy.is_image(g.prompt.ids, g.sampled) for g in groups]
            deep = policy.deep_pictures(torch.stack([pad(s, (longest - len(s), 0)) for s in seen]), images)
        if images and policy.backbone.mrope:
            own = [policy.positions(g.prompt.ids, g.sampled, g.prompt.images) for g in groups]
            positions = torch.stack([pad(p, (longest - p.shape[1], 0)) for p in own], 1).to(device)
            ends = [int(p.max()) + 1 for p in own]
        cache = policy.new_cache()
        out = policy.backbone.decoder(policy.model)(
            inputs_embeds=padded,
            attention_mask=(places >= 0).long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **policy.decoder_arguments(
                pad_sequence([p.ids for p in prompts], batch_first=True, padding_side="left"),
                pad_codes([p.codes for p in prompts], lengths, left=True),
            ),
            **policy.cross_attention_kwargs(prompts),
            **deep,
        )
        return Prefill(cache, out.last_hidden_state[:, -1], lengths, ends)


@lru_cache
def _say_uncaptured(kind: str) -> None:
    logger.warning("decoding without CUDA graphs, several times as slowly: they take no decoder of type %r", kind)


def ends_with_stop_string(policy: AudioPolicy, ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Tell if one of the stop strings is in the text of the last tokens."""
    if not stop:
        return False
    # A stop string spans a bounded number of tokens; byte-level tokens are at least one byte each.
    tail = policy.decode(list(ids[-max(len(s.encode()) for s in stop) - 1 :]))
    return any(s in tail for s in stop)


def build_rollout(
    policy: AudioPolicy, answer: AnswerState, buffer: SegmentBuffer, stop_reason: StopReason, policy_version: int
) -> Rollout:
    """Return the rollout of one segment: a prompt and all of its answer, in `buffer`."""
    request, prompt, versions = answer.request, answer.prompt, None
    if answer.before is not None:
        versions = torch.full((len(buffer.ids),), policy_version)
        versions[: answer.num_before] = token_versions(answer.before)
    segment = Segment(
        prompt_ids=prompt.ids,
        prompt_codes=prompt.codes,
        **buffer.fields(),
        text=policy.decode(buffer.ids),
        audio=prompt.audio,
        images=prompt.images,
        stop_reason=stop_reason,
        policy_version=policy_version,
        policy_versions=versions,
    )
    return Rollout(request.sample, (segment,), request.group_id or request.sample.id, answer.index)


def token_versions(segment: Segment) -> Tensor:
    """Return [N] int64: the version of the weights that sampled each token."""
    if segment.policy_versions is not None:
        return segment.policy_versions
    return torch.full((len(segment.ids),), segment.policy_version)

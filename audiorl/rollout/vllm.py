"""Rollouts with vLLM: continuous batching and paged attention, with weights of its own that follow the trainer's.

The engine reads prompts with the policy's own code, by a policy without weights (device "meta"), and gives vLLM token
ids and mel frames. So prompts, chunks of streams and their features are those of `HFEngine`. Rollouts differ from
its rollouts by their random numbers, and log-probs by the rounding of other kernels.

`audiorl.rollout.vllm_start` starts vLLM, `audiorl.rollout.vllm_weights` makes the weights that it is given, and its
workers load them by `audiorl.rollout.vllm_worker`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import adapted_model, load_policy
from audiorl.models.lora import adapter_config, saved_adapter
from audiorl.models.prompts import Prompt
from audiorl.models.weights import Weights
from audiorl.protocols import Ended, Request
from audiorl.rollout.hf import answered, ends_with_stop_string
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.rollout.sampling import seed_of
from audiorl.rollout.streams import Row, plan_of
from audiorl.rollout.vllm_start import VLLMConfig, check_served, start
from audiorl.rollout.vllm_weights import adapter_obstacle, load_checked, lora_layers, served_weights
from audiorl.types import Rollout, Segment, StopReason


class VLLMEngine:
    """`RolloutEngine` over vLLM in this process, made from a model folder or a hub id, or from an adapter's folder.

    Log-probs are those of the distribution that was sampled from; of a greedy answer, the model's own. Answers depend
    on (seed, sample, index), not on their batch, as far as the kernels' rounding does not.

    Raises ValueError without vLLM, with `sampling.compile`, and for models that it does not serve here: those that
    write speech, and families other than `SERVED`.
    """

    def __init__(
        self, folder: str | Path, sampling: SamplingConfig | None = None, config: VLLMConfig | None = None
    ) -> None:
        self.sampling = sampling or SamplingConfig()
        if self.sampling.compile:
            raise ValueError("sampling.compile is for the engine hf; vLLM compiles its steps itself: turn it off")
        self.policy_version = 0
        base = adapted_model(folder) or folder
        check_served(base)
        if find_spec("vllm") is None:
            raise ValueError(
                'the engine vllm needs vLLM: pip install "audiorl[gpu]"; without a GPU "audiorl[rollout-cpu]"'
            )
        config = config or VLLMConfig()
        with_adapter = config.lora == "adapter" and base is not folder
        self._policy = load_policy(folder if with_adapter else base, ModelConfig(device="meta"))
        self._shapes = self._policy.parameters_by_name()
        if with_adapter and (reason := adapter_obstacle(self._policy, config.dtype)):
            raise ValueError(f"{folder}: vLLM cannot run this adapter: {reason}; take vllm.lora merged")
        self._llm = start(base, self._policy, config)
        self._broken = ""
        self._num_questions = 0
        self._feature_cache: dict[str, tuple[Any, int]] = {}
        self._lora_request: Any = None
        if with_adapter:
            self._use_adapter(Path(folder))
        elif base is not folder:
            self.update_weights(served_weights(load_policy(folder, ModelConfig(audio="full"))), 0)

    def _use_adapter(self, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        from audiorl.rollout.vllm_worker import LORA_ID

        saved = adapter_config(folder)
        self._llm.collective_rpc("audiorl_set_lora", args=(saved.r, saved.lora_alpha, lora_layers(self._policy)))
        # The path is never read: the adapter is in vLLM's workers before the first question.
        self._lora_request = LoRARequest("policy", LORA_ID, str(folder))
        self.update_weights(saved_adapter(folder, self._policy.backbone.weight_name), 0)

    # -- rollouts --------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """All rollouts of all requests, request by request, index ascending.

        `ended` is called with the answers to a request once all of them have ended, streams excepted.
        """
        if self._broken:
            raise RuntimeError(f"the engine has weights of two versions ({self._broken}); send them again")
        rollouts: list[Rollout] = []
        try:
            for streams, group in groupby(requests, key=lambda r: bool(r.sample.turns)):
                several = list(group)
                rollouts += self._interpret(several) if streams else self._answer(several, ended)
        finally:
            self._feature_cache = {}
        return rollouts

    def _answer(self, requests: Sequence[Request], ended: Ended | None) -> list[Rollout]:
        answers = [answer for r in requests for answer in _answers(r, self._policy.prompt(r.sample))]
        rollouts: dict[int, Rollout] = {}
        missing = Counter(id(answer.request) for answer in answers)

        def written(i: int, buffer: SegmentBuffer, reason: StopReason) -> None:
            request = answers[i].request
            rollouts[i] = self._answered(answers[i], buffer, reason)
            missing[id(request)] -= 1
            if ended is not None and not missing[id(request)]:
                ended([rollouts[k] for k, answer in enumerate(answers) if answer.request is request])

        self._write([self._answer_question(a) for a in answers], written)
        return [rollouts[i] for i in range(len(answers))]

    def _answer_question(self, answer: _Answer) -> tuple[Any, Any]:
        """A paused answer is a prompt with everything sampled before. Its random numbers begin with another seed."""
        request, prompt = answer.request, answer.prompt
        ids, own, name = prompt.ids.tolist(), [False] * len(prompt), request.sample.id
        before, limit = answer.num_before, request.token_limit
        if answer.before is not None:
            ids, own, name = ids + answer.before.ids.tolist(), own + [True] * before, f"{name}\0{before}"
        room = self.sampling.max_new_tokens - before
        return self._question(
            request, name, answer.index, ids, prompt.audio, own, room if limit is None else min(room, limit)
        )

    def _answered(self, answer: _Answer, buffer: SegmentBuffer, reason: StopReason) -> Rollout:
        if answer.before is not None:
            buffer, reason = self._joined(answer.before, buffer, reason)
        if reason == "length" and len(buffer.ids) < self.sampling.max_new_tokens:
            reason = "paused"
        return answered(
            self._policy,
            answer.request,
            answer.index,
            answer.prompt,
            buffer,
            reason,
            self.policy_version,
            answer.before,
        )

    def _joined(self, before: Segment, after: SegmentBuffer, reason: StopReason) -> tuple[SegmentBuffer, StopReason]:
        """Both parts of an answer, up to a stop string that began in the first one, which vLLM did not see."""
        out = SegmentBuffer.of(before)
        for id, logprob in zip(after.ids, after.logprobs, strict=True):
            out.add(id, logprob)
            if ends_with_stop_string(self._policy, out.ids, self.sampling.stop):
                return out, "stop"
        return out, reason

    def _interpret(self, requests: Sequence[Request]) -> list[Rollout]:
        """All streams take their turns together. Each asks with everything so far, which vLLM has in its cache."""
        for r in requests:
            if r.schedule is not None:
                raise ValueError(f"sample {r.sample.id!r}: vLLM follows no schedule; take the engine hf for it")
        began = time.perf_counter()
        plans = [plan_of(self._policy, r) for r in requests]
        rows = [_Stream(Row(plan, k)) for plan in plans for k in range(plan.request.n)]
        living = rows
        while living:
            for s in living:
                observed = s.row.observed(self._policy)
                s.ids += observed.ids.tolist()
                s.own += [False] * len(observed.ids)
                s.audio += observed.audio
            written = self._write(
                [
                    self._question(s.row.plan.request, s.row.key().name, s.row.index, s.ids, s.audio, s.own)
                    for s in living
                ]
            )
            for s, (s.row.buffer, s.row.stop_reason) in zip(living, written, strict=True):
                s.ids += s.row.buffer.ids
                s.own += [True] * len(s.row.buffer.ids)
                s.row.close(self._policy, self.policy_version, time.perf_counter() - began)
            living = [s for s in living if s.row.turn < len(s.row.plan.chunks)]
        return [s.row.rollout() for s in rows]

    def _question(
        self,
        request: Request,
        name: str,
        index: int,
        ids: list[int],
        audio: Sequence[AudioClip],
        own: Sequence[bool] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Any, Any]:
        """A prompt and its sampling parameters as vLLM takes them. `own`: what of the prompt the policy wrote."""
        from vllm import SamplingParams
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        config = self.sampling
        params = SamplingParams(
            temperature=0.0 if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=max_tokens or config.max_new_tokens,
            seed=seed_of(request.seed, name, index),
            logprobs=0,
            stop=list(config.stop),
            include_stop_str_in_output=True,
            stop_token_ids=list(self._policy.stop_ids),
            ignore_eos=True,
            detokenize=bool(config.stop),
        )
        if not audio:
            return tokens_input(ids), params
        features = [self._features(clip) for clip in audio]
        places = _places(ids, own, self._policy.audio_token_id, [tokens for _, tokens in features])
        prompt = mm_input(
            ids,
            MultiModalKwargsItems({"audio": [item for item, _ in features]}),
            {"audio": [clip.key for clip in audio]},
            {"audio": [PlaceholderRange(offset, tokens) for offset, (_, tokens) in zip(places, features, strict=True)]},
        )
        return prompt, params

    def _features(self, clip: AudioClip) -> tuple[Any, int]:
        """What the model is given of a clip, and how many audio tokens it becomes."""
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

        if clip.key not in self._feature_cache:
            mel, before = self._policy.audio.mel(clip)
            on_gpu, on_cpu = MultiModalBatchedField(), MultiModalBatchedField(keep_on_cpu=True)
            item = MultiModalKwargsItem(
                {"mels": MultiModalFieldElem(mel, on_gpu), "skip": MultiModalFieldElem(torch.tensor(before), on_cpu)}
            )
            self._feature_cache[clip.key] = item, self._policy.audio.num_tokens(clip)
        return self._feature_cache[clip.key]

    def _write(
        self,
        questions: Sequence[tuple[Any, Any]],
        written: Callable[[int, SegmentBuffer, StopReason], None] | None = None,
    ) -> list[tuple[SegmentBuffer, StopReason]]:
        """What vLLM answers to each question; `written` is called with the number of each as soon as it is there."""
        names: list[str] = []
        for prompt, params in questions:
            names.append(str(self._num_questions))
            self._num_questions += 1
            self._llm.add_request(names[-1], prompt, params, lora_request=self._lora_request)
        numbers = {name: i for i, name in enumerate(names)}
        outputs: dict[int, tuple[SegmentBuffer, StopReason]] = {}
        try:
            while self._llm.has_unfinished_requests():
                for out in self._llm.step():
                    if out.finished:
                        number = numbers[out.request_id]
                        outputs[number] = _written(out.outputs[0])
                        if written is not None:
                            written(number, *outputs[number])
        except BaseException:
            self._llm.abort_request(names)
            raise
        return [outputs[i] for i in range(len(names))]

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int) -> None:
        """New weights by checkpoint name (`served_weights`), in place, a bucket at a time.

        Raises ValueError for a weight that the model does not have or has in another shape, and where one of several
        that vLLM keeps together is missing: of an adapter all matrices must come. After an error the engine writes
        nothing until it has had all weights.
        """
        self._broken = f"an update to version {version} was broken off"
        try:
            load_checked(weights, self._shapes, lambda method, *args: self._llm.collective_rpc(method, args=args))
        finally:
            self._llm.reset_prefix_cache()
            self._llm.reset_encoder_cache()
        self._broken = ""
        self.policy_version = version

    def connect(self, address: str, first: int, receivers: int, options: Mapping[str, Any]) -> str | None:
        """Let vLLM's workers receive weights themselves, each its own connection: receivers `first`, `first` + 1, ….

        Weights then do not pass through this process. options: those of `WeightReceiver`. Returns None, or why a worker
        has no connection.
        """
        return _first(self._llm.collective_rpc("audiorl_connect", args=(address, first, receivers, dict(options))))

    def receive(self, version: int) -> str | None:
        """Load what the sender sends next to all workers. Returns None, or why it did not arrive; the engine then
        writes nothing until it has had all weights."""
        self._broken = f"an update to version {version} was broken off"
        shapes = {name: tuple(p.shape) for name, p in self._shapes.items()}
        try:
            reason = _first(self._llm.collective_rpc("audiorl_receive", args=(version, shapes)))
        finally:
            self._llm.reset_prefix_cache()
            self._llm.reset_encoder_cache()
        if reason is None:
            self._broken, self.policy_version = "", version
        return reason

    def disconnect(self, reason: str) -> None:
        self._llm.collective_rpc("audiorl_disconnect", args=(reason,))

    # -- the GPU ---------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Sleep level 1: weights are offloaded to CPU memory, the KV cache is discarded. Needs `sleep=True`."""
        self._check_can_sleep()
        self._llm.sleep(1)

    def wake(self) -> None:
        """Load the weights to the GPU again; needed before `generate` and `update_weights`."""
        self._check_can_sleep()
        self._llm.wake_up()

    @property
    def can_sleep(self) -> bool:
        return bool(self._llm.vllm_config.model_config.enable_sleep_mode)

    def _check_can_sleep(self) -> None:
        if not self.can_sleep:
            raise ValueError("this engine cannot sleep: vllm.sleep is for GPUs and must be set when it is made")

    def close(self) -> None:
        """End vLLM's workers and free its memory."""
        self._llm.engine_core.shutdown()


@dataclass(frozen=True)
class _Answer:
    """One answer to be written, or to be gone on with."""

    request: Request
    index: int
    prompt: Prompt
    before: Segment | None = None
    """What a paused answer had sampled before."""

    @property
    def num_before(self) -> int:
        return 0 if self.before is None else len(self.before.ids)


def _answers(request: Request, prompt: Prompt) -> list[_Answer]:
    if request.paused:
        return [_Answer(request, r.index, prompt, r.segments[0]) for r in request.paused]
    return [_Answer(request, k, prompt) for k in range(request.n)]


@dataclass
class _Stream:
    """A row with all its observed and sampled tokens. `own`: which of `ids` the policy sampled."""

    row: Row
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    audio: tuple[AudioClip, ...] = ()


def _first(reasons: Sequence[str | None]) -> str | None:
    """The first reason of several workers."""
    return next((reason for reason in reasons if reason is not None), None)


def _places(ids: Sequence[int], own: Sequence[bool] | None, placeholder: int, lengths: Sequence[int]) -> list[int]:
    """Where each clip of so many tokens begins among the placeholders that were not written by the policy."""
    free = [i for i, id in enumerate(ids) if id == placeholder and not (own and own[i])]
    assert len(free) == sum(lengths), "a clip is its placeholder, once per audio token"
    starts, at = [], 0
    for length in lengths:
        starts.append(free[at])
        at += length
    return starts


def _written(out: Any) -> tuple[SegmentBuffer, StopReason]:
    buffer = SegmentBuffer()
    for id, logprobs in zip(out.token_ids, out.logprobs, strict=True):
        buffer.add(id, logprobs[id].logprob)
    if out.finish_reason == "length":
        return buffer, "length"
    assert out.finish_reason == "stop", out.finish_reason
    return buffer, "stop" if isinstance(out.stop_reason, str) else "eos"

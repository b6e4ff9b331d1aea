"""Rollouts with vLLM: continuous batching and paged attention, with weights of its own that follow the trainer's.

The engine reads prompts with the policy's own code, by a policy without weights (device "meta"), and gives vLLM token
ids and mel frames. So prompts, chunks of streams and their features are those of `HFEngine`. Rollouts differ from
its rollouts by their random numbers, and log-probs by the rounding of other kernels.

`audiorl.rollout.vllm_weights` makes the weights that vLLM is given, and its workers load them by
`audiorl.rollout.vllm_worker`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import AudioPolicy, adapted_model, load_policy, read_config
from audiorl.models.lora import adapter_config, saved_adapter
from audiorl.models.speech import LAYOUT_KEY
from audiorl.models.weights import Weights
from audiorl.protocols import Ended, Request
from audiorl.rollout.hf import AnswerState, build_rollout, ends_with_stop_string, pending_answers
from audiorl.rollout.samplers import SegmentBuffer, rollout_seed
from audiorl.rollout.streams import StreamState, stream_inputs
from audiorl.rollout.vllm_weights import (
    Lora,
    adapter_obstacle,
    load_checked,
    lora_layers,
    lora_options,
    served_dtype,
    served_weights,
)
from audiorl.types import Rollout, Segment, StopReason

SERVED = (
    "qwen2_5_omni",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "qwen2_audio",
    "llama",
    "qwen2",
    "qwen3",
)
"""By model_type."""
CPU_KV_CACHE_MB = 64
CPU_STEP_TOKENS = 4096


@dataclass(frozen=True)
class VLLMConfig:
    """How vLLM runs a model. Options for GPUs have no effect without one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` keeps what the checkpoint says."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory for weights and cache; less where a trainer shares the GPU."""
    tensor_parallel_size: int = 1
    """GPUs that one engine is spread over."""
    sleep: bool = False
    """Make `VLLMEngine.sleep` possible: weights are offloaded to CPU memory, the KV cache is discarded."""
    enforce_eager: bool = False
    """Without CUDA graphs: starts faster, generates slower."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer, of all turns of a stream; None: as many as the model has positions."""
    max_num_seqs: int = 256
    """Maximum number of answers generated at the same time."""
    max_clips: int = 256
    """Maximum number of clips in one prompt; a stream's chunks count."""
    kv_cache_mb: int | None = None
    """MiB for keys and values; None: on a GPU what remains of its fraction, on a CPU 64."""
    lora: Lora = "merged"
    """How an adapter's folder is run, and which weights `update_weights` takes. merged: in the weights of the model.
    adapter: next to them (vLLM's enable_lora); no effect on a whole model."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs", "max_clips"):
            if getattr(self, name) < 1:
                raise ValueError(f"vllm.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_model_len", "kv_cache_mb"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"vllm.{name} is {getattr(self, name)}; it must be at least 1, or None")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"vllm.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]")


def check_served(folder: str | Path) -> None:
    """Raise ValueError for a model that vLLM does not serve here."""
    config = read_config(folder)
    kind = str(config.get("model_type"))
    if LAYOUT_KEY in config or kind == "higgs_audio_v2":
        raise ValueError(f"{folder}: vLLM serves no model that writes speech; take the engine hf")
    if kind not in SERVED:
        raise ValueError(
            f"{folder}: vLLM does not serve model_type {kind!r} here ({', '.join(SERVED)}); take the engine hf"
        )


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
        self._llm = start_vllm(base, self._policy, config)
        self._broken = ""
        self._num_inputs = 0
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
        # The path is never read: the adapter is in vLLM's workers before the first prompt.
        self._lora_request = LoRARequest("policy", LORA_ID, str(folder))
        self.update_weights(saved_adapter(folder, self._policy.backbone.weight_name), 0)

    # -- rollouts --------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Generate all rollouts of all requests, request by request, index ascending.

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
        answers = [answer for r in requests for answer in pending_answers(r, self._policy.prompt(r.sample))]
        rollouts: dict[int, Rollout] = {}
        missing = Counter(id(answer.request) for answer in answers)

        def finished(i: int, buffer: SegmentBuffer, reason: StopReason) -> None:
            request = answers[i].request
            rollouts[i] = self._rollout(answers[i], buffer, reason)
            missing[id(request)] -= 1
            if ended is not None and not missing[id(request)]:
                ended([rollouts[k] for k, answer in enumerate(answers) if answer.request is request])

        self._run([self._answer_input(a) for a in answers], finished)
        return [rollouts[i] for i in range(len(answers))]

    def _answer_input(self, answer: AnswerState) -> tuple[Any, Any]:
        """Ask for an answer; a paused one is a prompt with everything sampled before, and another seed."""
        request, prompt, before = answer.request, answer.prompt, answer.num_before
        ids, own, name = prompt.ids.tolist(), [False] * len(prompt), request.sample.id
        if answer.before is not None:
            ids, own, name = ids + answer.before.ids.tolist(), own + [True] * before, f"{name}\0{before}"
        room = answer.room(self.sampling.max_new_tokens)
        return self._vllm_input(request, name, answer.index, ids, prompt.audio, own, room)

    def _rollout(self, a: AnswerState, buffer: SegmentBuffer, reason: StopReason) -> Rollout:
        if a.before is not None:
            buffer, reason = self._after_pause(a.before, buffer, reason)
        if reason == "length" and len(buffer.ids) < self.sampling.max_new_tokens:
            reason = "paused"
        version = self.policy_version
        return build_rollout(self._policy, a.request, a.index, a.prompt, buffer, reason, version, a.before)

    def _after_pause(
        self, before: Segment, after: SegmentBuffer, reason: StopReason
    ) -> tuple[SegmentBuffer, StopReason]:
        """Join both parts of an answer, up to a stop string that began in the first one, which vLLM did not see."""
        out = SegmentBuffer.from_segment(before)
        for id, logprob in zip(after.ids, after.logprobs, strict=True):
            out.add(id, logprob)
            if ends_with_stop_string(self._policy, out.ids, self.sampling.stop):
                return out, "stop"
        return out, reason

    def _interpret(self, requests: Sequence[Request]) -> list[Rollout]:
        """Interpret streams that take their turns together; each asks with everything so far, which vLLM has cached."""
        for r in requests:
            if r.schedule is not None:
                raise ValueError(f"sample {r.sample.id!r}: vLLM follows no schedule; take the engine hf for it")
        began = time.perf_counter()
        inputs = [stream_inputs(self._policy, r) for r in requests]
        streams = [_VLLMStream(StreamState(one, k)) for one in inputs for k in range(one.request.n)]
        active = streams
        while active:
            for s in active:
                observed = s.state.observed(self._policy)
                s.ids += observed.ids.tolist()
                s.own += [False] * len(observed.ids)
                s.audio += observed.audio
            outputs = self._run(
                [
                    self._vllm_input(s.state.inputs.request, s.state.key().name, s.state.index, s.ids, s.audio, s.own)
                    for s in active
                ]
            )
            for s, (buffer, reason) in zip(active, outputs, strict=True):
                s.state.buffer, s.state.stop_reason = buffer, reason
                s.ids += buffer.ids
                s.own += [True] * len(buffer.ids)
                s.state.close(self._policy, self.policy_version, time.perf_counter() - began)
            active = [s for s in active if s.state.turn < len(s.state.inputs.chunks)]
        return [s.state.rollout() for s in streams]

    def _vllm_input(
        self,
        request: Request,
        name: str,
        index: int,
        ids: list[int],
        audio: Sequence[AudioClip],
        own: Sequence[bool],
        max_tokens: int | None = None,
    ) -> tuple[Any, Any]:
        """Return a prompt and its sampling parameters as vLLM takes them. `own`: which tokens the policy wrote."""
        from vllm import SamplingParams
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        config = self.sampling
        params = SamplingParams(
            temperature=0.0 if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=max_tokens or config.max_new_tokens,
            seed=rollout_seed(request.seed, name, index),
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
        """Return a clip as the model takes it, and the number of its audio tokens."""
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

        if clip.key not in self._feature_cache:
            mel, before = self._policy.audio.mel(clip)
            on_gpu, on_cpu = MultiModalBatchedField(), MultiModalBatchedField(keep_on_cpu=True)
            item = MultiModalKwargsItem(
                {"mels": MultiModalFieldElem(mel, on_gpu), "skip": MultiModalFieldElem(torch.tensor(before), on_cpu)}
            )
            self._feature_cache[clip.key] = item, self._policy.audio.num_tokens(clip)
        return self._feature_cache[clip.key]

    def _run(
        self,
        inputs: Sequence[tuple[Any, Any]],
        finished: Callable[[int, SegmentBuffer, StopReason], None] | None = None,
    ) -> list[tuple[SegmentBuffer, StopReason]]:
        """Return vLLM's output for each input; `finished` is called with its number as soon as it is there."""
        names: list[str] = []
        for prompt, params in inputs:
            names.append(str(self._num_inputs))
            self._num_inputs += 1
            self._llm.add_request(names[-1], prompt, params, lora_request=self._lora_request)
        numbers = {name: i for i, name in enumerate(names)}
        outputs: dict[int, tuple[SegmentBuffer, StopReason]] = {}
        try:
            while self._llm.has_unfinished_requests():
                for out in self._llm.step():
                    if out.finished:
                        number = numbers[out.request_id]
                        outputs[number] = _segment_of(out.outputs[0])
                        if finished is not None:
                            finished(number, *outputs[number])
        except BaseException:
            self._llm.abort_request(names)
            raise
        return [outputs[i] for i in range(len(names))]

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int) -> None:
        """Take new weights by checkpoint name (`served_weights`), in place, a bucket at a time.

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
        return _first_reason(
            self._llm.collective_rpc("audiorl_connect", args=(address, first, receivers, dict(options)))
        )

    def receive(self, version: int) -> str | None:
        """Load what the sender sends next to all workers. Returns None, or why it did not arrive; the engine then
        writes nothing until it has had all weights."""
        self._broken = f"an update to version {version} was broken off"
        shapes = {name: tuple(p.shape) for name, p in self._shapes.items()}
        try:
            reason = _first_reason(self._llm.collective_rpc("audiorl_receive", args=(version, shapes)))
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
        """Sleep at level 1: weights are offloaded to CPU memory, the KV cache is discarded. Needs `sleep=True`."""
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


@dataclass
class _VLLMStream:
    """A stream with all its observed and sampled tokens. `own`: which of `ids` the policy sampled."""

    state: StreamState
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    audio: tuple[AudioClip, ...] = ()


def _first_reason(reasons: Sequence[str | None]) -> str | None:
    """Return the first reason of several workers."""
    return next((reason for reason in reasons if reason is not None), None)


def _places(ids: Sequence[int], own: Sequence[bool], placeholder: int, lengths: Sequence[int]) -> list[int]:
    """Return where each clip of so many tokens begins among the placeholders that the policy did not write."""
    free = [i for i, id in enumerate(ids) if id == placeholder and not own[i]]
    assert len(free) == sum(lengths), "a clip is its placeholder, once per audio token"
    starts, at = [], 0
    for length in lengths:
        starts.append(free[at])
        at += length
    return starts


def _segment_of(out: Any) -> tuple[SegmentBuffer, StopReason]:
    buffer = SegmentBuffer()
    for id, logprobs in zip(out.token_ids, out.logprobs, strict=True):
        buffer.add(id, logprobs[id].logprob)
    if out.finish_reason == "length":
        return buffer, "length"
    assert out.finish_reason == "stop", out.finish_reason
    return buffer, "stop" if isinstance(out.stop_reason, str) else "eos"


# -- starting ----------------------------------------------------------------------------------------------------------


@contextmanager
def _keep_random_numbers() -> Iterator[None]:
    """Keep a trainer's random numbers: vLLM seeds every generator of the process when it starts."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@_keep_random_numbers()
def start_vllm(folder: str | Path, policy: AudioPolicy, config: VLLMConfig) -> Any:
    """Start vLLM's engine, in this process but for tensor parallel workers."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the whole process is bound to some cores
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from audiorl.rollout.vllm_worker import ListenerOnly

    options: dict[str, Any] = {}
    longest = config.max_model_len or policy.backbone.decoder(policy.model).config.max_position_embeddings
    if policy.backbone.audio_token is not None:
        tied = policy.backbone.head(policy.model).weight is policy.backbone.decoder(policy.model).embed_tokens.weight
        options = dict(
            hf_overrides=ListenerOnly(tied),
            limit_mm_per_prompt={"audio": config.max_clips, "image": 0, "video": 0},
            skip_mm_profiling=True,
            mm_processor_cache_gb=0,
        )
    if current_platform.is_cpu():
        _hide_llvmlite()
        kv_cache = (config.kv_cache_mb or CPU_KV_CACHE_MB) << 20
        # A prompt in several steps takes back the random number of all but the last, which CPU generators cannot.
        whole = dict(enable_chunked_prefill=False, max_num_batched_tokens=max(CPU_STEP_TOKENS, longest))
        options |= dict(enforce_eager=True, kv_cache_memory_bytes=kv_cache, block_size=32, **whole)
    else:
        options |= dict(
            enforce_eager=config.enforce_eager,
            enable_sleep_mode=config.sleep,
            gpu_memory_utilization=config.gpu_memory_utilization,
        )
        if config.kv_cache_mb is not None:
            options |= dict(kv_cache_memory_bytes=config.kv_cache_mb << 20)
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype=served_dtype(policy, config.dtype),
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_model_len=longest,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
            enable_prefix_caching=True,
            **lora_options(policy),
            worker_extension_cls="audiorl.rollout.vllm_worker.Loading",
            **options,
        )
    )


def _hide_llvmlite() -> None:
    """Let vLLM for the CPU start in a process that has imported numba, as librosa does.

    vLLM looks for its kernels in `vars` of each object of each module, and llvmlite's library makes a function of
    every name that it is asked for, `__dict__` among them.
    """
    if llvmlite := sys.modules.get("llvmlite.binding.ffi"):
        getattr(llvmlite.lib, "_fntab", {})["__dict__"] = {}

"""Rollouts with vLLM: continuous batching and paged attention, with weights of its own that follow the trainer's.

The engine reads prompts with the policy's own code, by a policy without weights (device "meta"), and gives vLLM token
ids and mel frames. So prompts, chunks of streams and their features are those of `HFEngine`. Rollouts differ by their
random numbers, and log-probs by the rounding of other kernels.
"""

from __future__ import annotations

import math
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
from audiorl.errors import install
from audiorl.models import AudioPolicy, adapted_model, load_policy, read_config
from audiorl.models.lora import adapter_config, saved_adapter
from audiorl.models.speech import LAYOUT_KEY
from audiorl.models.weights import Weights
from audiorl.protocols import Ended, Request
from audiorl.rollout.hf import AnswerState, build_rollout, ends_with_stop_string, pending_answers
from audiorl.rollout.samplers import SegmentBuffer, rollout_seed
from audiorl.rollout.streams import StreamState, stream_inputs
from audiorl.rollout.vllm_weights import (
    LORA_RANKS,
    Lora,
    adapter_obstacle,
    load_checked,
    lora_layers,
    served_dtype,
    served_weights,
)
from audiorl.rollout.weight_transfer import SyncError
from audiorl.types import Rollout, StopReason

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
MAX_CLIPS = 256
"""Of one prompt; a stream's chunks count."""


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
    kv_cache_mb: int | None = None
    """MiB for keys and values; None: on a GPU what remains of its fraction, on a CPU 64."""
    lora: Lora = "merged"
    """How an adapter's folder is run and updated: merged, in the model's weights; adapter, next to them."""


class VLLMEngine:
    """`RolloutEngine` over vLLM in this process, made from a model folder or a hub id, or from an adapter's folder.

    Log-probs are those of the distribution that was sampled from; of a greedy answer, the model's own. Answers depend
    on (seed, sample, index), not on their batch, as far as the kernels' rounding does not. Raises ValueError without
    vLLM and for models that it does not serve here: those that write speech, and families other than `SERVED`.
    """

    def __init__(
        self, folder: str | Path, sampling: SamplingConfig | None = None, config: VLLMConfig | None = None
    ) -> None:
        self.sampling = sampling or SamplingConfig()
        self.policy_version = 0
        base = adapted_model(folder) or folder
        saved = read_config(base)
        kind = str(saved.get("model_type"))
        if LAYOUT_KEY in saved or kind == "higgs_audio_v2":
            raise ValueError(f"{base}: vLLM serves no model that writes speech; take the engine hf")
        if kind not in SERVED:
            raise ValueError(
                f"{base}: vLLM does not serve model_type {kind!r} here ({', '.join(SERVED)}); take the engine hf"
            )
        if find_spec("vllm") is None:
            raise ValueError(f"the engine vllm needs vLLM: {install('gpu')}; without a GPU {install('rollout-cpu')}")
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
            from vllm.lora.request import LoRARequest

            from audiorl.rollout.vllm_worker import LORA_ID

            lora = adapter_config(Path(folder))
            self._llm.collective_rpc("audiorl_set_lora", args=(lora.r, lora.lora_alpha, lora_layers(self._policy)))
            # The path is never read: the adapter is in vLLM's workers before the first prompt.
            self._lora_request = LoRARequest("policy", LORA_ID, str(folder))
            self.update_weights(saved_adapter(Path(folder), self._policy.backbone.weight_name), 0)
        elif base is not folder:
            self.update_weights(served_weights(load_policy(folder, ModelConfig(audio="full"))), 0)

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

        inputs = []
        for a in answers:
            ids, own, name = a.prompt.ids.tolist(), [False] * len(a.prompt), a.request.sample.id
            if a.before is not None:  # a paused answer is a prompt with everything sampled before, and another seed
                ids, own, name = ids + a.before.ids.tolist(), own + [True] * a.num_before, f"{name}\0{a.num_before}"
            room = a.room(self.sampling.max_new_tokens)
            if a.prompt.images:
                what = "vLLM gets no pictures here; take the transformers engine (--engine hf)"
                raise ValueError(f"sample {a.request.sample.id!r}: {what}")
            inputs.append(self._vllm_input(a.request, name, a.index, ids, a.prompt.audio, own, room))
        self._run(inputs, finished)
        return [rollouts[i] for i in range(len(answers))]

    def _rollout(self, a: AnswerState, buffer: SegmentBuffer, reason: StopReason) -> Rollout:
        if a.before is not None:
            # vLLM did not see the first part, in which a stop string may have begun.
            sampled, buffer = buffer, SegmentBuffer.from_segment(a.before)
            for id, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
                buffer.ids.append(id)
                buffer.logprobs.append(logprob)  # nan: unknown, see `_run`
                if ends_with_stop_string(self._policy, buffer.ids, self.sampling.stop):
                    reason = "stop"
                    break
        a.buffer = buffer
        longest = self._llm.vllm_config.model_config.max_model_len  # with the prompt; vLLM ends an answer there, too
        room = len(buffer.ids) < min(self.sampling.max_new_tokens, longest - len(a.prompt))
        if reason == "length" and room and a.reaches_limit():
            reason = "paused"
        return build_rollout(self._policy, a, buffer, reason, self.policy_version)

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
            asked = []
            for s in active:
                observed = s.state.observed(self._policy)
                s.ids += observed.ids.tolist()
                s.own += [False] * len(observed.ids)
                s.audio += observed.audio
                key = s.state.key()
                asked.append(self._vllm_input(s.state.inputs.request, key.name, key.index, s.ids, s.audio, s.own))
            for s, (buffer, reason) in zip(active, self._run(asked), strict=True):
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
    ) -> tuple[str, Any, Any]:
        """Return a sample's id, its prompt and its sampling parameters as vLLM takes them.

        own: which tokens the policy wrote.
        """
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
            return request.sample.id, tokens_input(ids), params
        features = [self._features(clip) for clip in audio]
        # A clip is its placeholder once per audio token, but for those that the policy wrote itself.
        free = [i for i, id in enumerate(ids) if id == self._policy.audio_token_id and not own[i]]
        places, at = [], 0
        for _, tokens in features:
            places.append(PlaceholderRange(free[at], tokens))
            at += tokens
        assert at == len(free)
        items = MultiModalKwargsItems({"audio": [item for item, _ in features]})
        prompt = mm_input(ids, items, {"audio": [clip.key for clip in audio]}, {"audio": places})
        return request.sample.id, prompt, params

    def _features(self, clip: AudioClip) -> tuple[Any, int]:
        """Return a clip as the model takes it, and the number of its audio tokens."""
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

        if clip.key not in self._feature_cache:
            features, before = self._policy.audio.features(clip), self._policy.audio.context_tokens(clip)
            on_gpu, on_cpu = MultiModalBatchedField(), MultiModalBatchedField(keep_on_cpu=True)
            item = MultiModalKwargsItem(
                {name: MultiModalFieldElem(x, on_gpu) for name, x in features.items()}
                | {"skip": MultiModalFieldElem(torch.tensor(before), on_cpu)}
            )
            self._feature_cache[clip.key] = item, self._policy.audio.num_tokens(clip)
        return self._feature_cache[clip.key]

    def _run(
        self,
        inputs: Sequence[tuple[str, Any, Any]],
        finished: Callable[[int, SegmentBuffer, StopReason], None] | None = None,
    ) -> list[tuple[SegmentBuffer, StopReason]]:
        """Return vLLM's output for each input; `finished` is called with its number as soon as it is there."""
        numbers: dict[str, int] = {}
        outputs: dict[int, tuple[SegmentBuffer, StopReason]] = {}
        try:
            for sample, prompt, params in inputs:
                name = str(self._num_inputs)
                numbers[name] = len(numbers)
                self._num_inputs += 1
                try:
                    self._llm.add_request(name, prompt, params, lora_request=self._lora_request)
                except Exception as error:
                    from vllm.exceptions import VLLMClientError

                    if not isinstance(error, ValueError | VLLMClientError):
                        raise
                    raise ValueError(f"sample {sample!r}: {error}") from error
            while self._llm.has_unfinished_requests():
                for out in self._llm.step():
                    if not out.finished:
                        continue
                    number, (answer,) = numbers[out.request_id], out.outputs
                    # None or nan for some near-certain tokens: the trainer counts them as unknown.
                    given = [row[id].logprob for id, row in zip(answer.token_ids, answer.logprobs, strict=True)]
                    logprobs = [math.nan if logprob is None else logprob for logprob in given]
                    buffer = SegmentBuffer(list(answer.token_ids), logprobs)
                    reason: StopReason = "length"
                    if answer.finish_reason != "length":
                        assert answer.finish_reason == "stop", answer.finish_reason
                        reason = "stop" if isinstance(answer.stop_reason, str) else "eos"
                    outputs[number] = buffer, reason
                    if finished is not None:
                        finished(number, buffer, reason)
        except BaseException:
            self._llm.abort_request(list(numbers))
            raise
        return [outputs[i] for i in range(len(inputs))]

    # -- weights ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        """Clear vLLM's caches after the block. After an error in it, the engine writes nothing until the next one."""
        self._broken = f"an update to version {version} was broken off"
        try:
            yield
        finally:
            self._llm.reset_prefix_cache()
            self._llm.reset_encoder_cache()
        self._broken, self.policy_version = "", version

    def update_weights(self, weights: Weights, version: int) -> None:
        """Take new weights by checkpoint name (`served_weights`), in place, a bucket at a time.

        Raises ValueError as `load_checked` does. After an error the engine writes nothing until it has had all weights.
        """
        with self._updating(version):
            load_checked(weights, self._shapes, lambda method, *args: self._llm.collective_rpc(method, args=args))

    def connect(self, address: str, first: int, receivers: int, options: Mapping[str, Any]) -> str | None:
        """Let vLLM's workers receive weights themselves: they are receivers `first`, `first` + 1, ….

        options: those of `WeightReceiver`. Returns None, or why a worker has no connection.
        """
        reasons = self._llm.collective_rpc("audiorl_connect", args=(address, first, receivers, dict(options)))
        return next(filter(None, reasons), None)

    def receive(self, version: int) -> str | None:
        """Load what the sender sends next to all workers. Returns None, or why it did not arrive; the engine then
        writes nothing until it has had all weights."""
        shapes = {name: tuple(p.shape) for name, p in self._shapes.items()}
        try:
            with self._updating(version):
                reasons = self._llm.collective_rpc("audiorl_receive", args=(version, shapes))
                if reason := next(filter(None, reasons), None):
                    raise SyncError(reason)
        except SyncError as error:
            return str(error)
        return None

    def disconnect(self, reason: str) -> None:
        self._llm.collective_rpc("audiorl_disconnect", args=(reason,))

    # -- the GPU ---------------------------------------------------------------------------------------------------

    @property
    def can_sleep(self) -> bool:
        return bool(self._llm.vllm_config.model_config.enable_sleep_mode)

    def sleep(self) -> None:
        """Offload weights to CPU memory and discard the KV cache. Needs `VLLMConfig.sleep`."""
        self._llm.sleep(1)

    def wake(self) -> None:
        """Load the weights to the GPU again; needed before `generate` and `update_weights`."""
        self._llm.wake_up()

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
    decoder, rank = policy.backbone.decoder(policy.model), policy.config.lora.rank
    longest = config.max_model_len or decoder.config.max_position_embeddings
    if policy.backbone.audio_token is not None:
        tied = policy.backbone.head(policy.model).weight is decoder.embed_tokens.weight
        options = dict(
            hf_overrides=ListenerOnly(tied),
            limit_mm_per_prompt={"audio": MAX_CLIPS, "image": 0, "video": 0},
            skip_mm_profiling=True,
            mm_processor_cache_gb=0,
        )
    if rank:
        max_rank = next(r for r in LORA_RANKS if r >= rank)
        options |= dict(enable_lora=True, max_loras=1, max_lora_rank=max_rank, lora_target_modules=lora_layers(policy))
    kv_cache_mb = config.kv_cache_mb
    if current_platform.is_cpu():
        # vLLM looks for its kernels in `vars` of each object of each module. llvmlite's library, which numba imports
        # and librosa numba, makes a function of every name that it is asked for, `__dict__` among them.
        if llvmlite := sys.modules.get("llvmlite.binding.ffi"):
            getattr(llvmlite.lib, "_fntab", {})["__dict__"] = {}
        kv_cache_mb = kv_cache_mb or CPU_KV_CACHE_MB
        # A prompt in several steps takes back the random number of all but the last, which CPU generators cannot.
        whole = dict(enable_chunked_prefill=False, max_num_batched_tokens=max(CPU_STEP_TOKENS, longest))
        options |= dict(enforce_eager=True, block_size=32, **whole)
    else:
        options |= dict(
            enforce_eager=config.enforce_eager,
            enable_sleep_mode=config.sleep,
            gpu_memory_utilization=config.gpu_memory_utilization,
        )
    if kv_cache_mb is not None:
        options |= dict(kv_cache_memory_bytes=kv_cache_mb << 20)
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype=served_dtype(policy, config.dtype),
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_model_len=longest,
            max_num_seqs=256,
            tensor_parallel_size=config.tensor_parallel_size,
            distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
            enable_prefix_caching=True,
            worker_extension_cls="audiorl.rollout.vllm_worker.Loading",
            **options,
        )
    )

"""Rollouts with vLLM: continuous batching and paged attention, with weights of its own that follow the trainer's.

The engine reads prompts with the policy's own code, by a policy without weights (device "meta"), and gives vLLM token
ids and mel frames. So prompts, chunks of streams and their features are those of `HFEngine`. Rollouts differ from
its rollouts by their random numbers, and log-probs by the rounding of other kernels.

vLLM's workers are given `audiorl.rollout.vllm_worker`, which is where weights are loaded.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import AudioPolicy, adapted_model, load_policy, read_config
from audiorl.models.lora import merged_weights
from audiorl.models.speech import CONFIG_KEY
from audiorl.models.weights import Weights, check_weight, named
from audiorl.rollout.hf import answered
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.rollout.sampling import seed_of
from audiorl.rollout.streams import Row, plan_of
from audiorl.rollout.weight_transfer import BUCKET, buckets
from audiorl.types import Request, Rollout, StopReason

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
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Linears that vLLM keeps in one: their weights must come together."""
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

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs", "max_clips"):
            if getattr(self, name) < 1:
                raise ValueError(f"vllm.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_model_len", "kv_cache_mb"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"vllm.{name} is {getattr(self, name)}; it must be at least 1, or None")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"vllm.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]")


class VLLMEngine:
    """`RolloutEngine` over vLLM in this process, made from a model folder or a hub id, or from an adapter's folder.

    Log-probs are those of the distribution that was sampled from; of a greedy answer, the model's own. Answers depend
    on (seed, sample, index), not on their batch, as far as the kernels' rounding does not.

    Raises ValueError without vLLM, and for models that it does not serve here: those that write speech, and families
    other than `SERVED`.
    """

    def __init__(
        self, folder: str | Path, sampling: SamplingConfig | None = None, config: VLLMConfig | None = None
    ) -> None:
        self.sampling = sampling or SamplingConfig()
        self.policy_version = 0
        base = adapted_model(folder) or folder
        _check_served(base)
        if find_spec("vllm") is None:
            raise ValueError(
                'the engine vllm needs vLLM: pip install "audiorl[gpu]"; without a GPU "audiorl[rollout-cpu]"'
            )
        self._policy = load_policy(base, ModelConfig(device="meta"))
        self._shapes = self._policy.parameters_by_name()
        with _same_random_numbers():
            self._llm = _start(base, self._policy, config or VLLMConfig())
        self._broken = ""
        self._num_questions = 0
        self._feature_cache: dict[str, tuple[Any, int]] = {}
        if base is not folder:
            self.update_weights(served_weights(load_policy(folder)), 0)

    # -- rollouts --------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """All rollouts of all requests, request by request, index ascending."""
        if self._broken:
            raise RuntimeError(f"the engine has weights of two versions ({self._broken}); send them again")
        rollouts: list[Rollout] = []
        try:
            for streams, several in groupby(requests, key=lambda r: bool(r.sample.turns)):
                rollouts += (self._interpret if streams else self._answer)(list(several))
        finally:
            self._feature_cache = {}
        return rollouts

    def _answer(self, requests: Sequence[Request]) -> list[Rollout]:
        prompts = [self._policy.prompt(r.sample) for r in requests]
        questions = [(r, k, p) for r, p in zip(requests, prompts, strict=True) for k in range(r.n)]
        written = self._write([self._question(r, r.sample.id, k, p.ids.tolist(), p.audio) for r, k, p in questions])
        return [
            answered(self._policy, r, k, p, buffer, reason, self.policy_version)
            for (r, k, p), (buffer, reason) in zip(questions, written, strict=True)
        ]

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
            max_tokens=config.max_new_tokens,
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

    def _write(self, questions: Sequence[tuple[Any, Any]]) -> list[tuple[SegmentBuffer, StopReason]]:
        names = []
        for prompt, params in questions:
            names.append(str(self._num_questions))
            self._num_questions += 1
            self._llm.add_request(names[-1], prompt, params)
        outputs = {}
        try:
            while self._llm.has_unfinished_requests():
                for out in self._llm.step():
                    if out.finished:
                        outputs[out.request_id] = out.outputs[0]
        except BaseException:
            self._llm.abort_request(names)
            raise
        return [_written(outputs[name]) for name in names]

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int) -> None:
        """New weights by checkpoint name (`served_weights`), in place, a bucket at a time.

        Raises ValueError for a weight that the model does not have or has in another shape, and where one of several
        that vLLM keeps together is missing. After an error the engine writes nothing until it has had all weights.
        """
        self._broken = f"an update to version {version} was broken off"
        names: set[str] = set()
        self._llm.collective_rpc("audiorl_begin")
        try:
            for bucket in buckets(self._checked(weights, names), BUCKET):
                self._llm.collective_rpc("audiorl_load", args=(bucket,))
            check_together(names, self._shapes)
        finally:
            self._llm.collective_rpc("audiorl_end")
            self._llm.reset_prefix_cache()
            self._llm.reset_encoder_cache()
        self._broken = ""
        self.policy_version = version

    def _checked(self, weights: Weights, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named(weights):
            check_weight(name, tensor, self._shapes, "weights for vLLM")
            names.add(name)
            yield name, tensor.detach()

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


@dataclass
class _Stream:
    """A row with all its observed and sampled tokens. `own`: which of `ids` the policy sampled."""

    row: Row
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    audio: tuple[AudioClip, ...] = ()


def served_weights(policy: AudioPolicy) -> Iterator[tuple[str, Tensor]]:
    """The trained weights by checkpoint name, for an engine without the policy's adapter.

    With an adapter, all weights of the decoder, merged one at a time.
    """
    if policy.adapter is None:
        yield from policy.weights().items()
        return
    decoder = {id(p) for p in policy.backbone.decoder(policy.model).parameters()}
    yield from merged_weights(policy, lambda p: p.requires_grad or id(p) in decoder)


def check_together(names: Iterable[str], all_names: Iterable[str]) -> None:
    """Raise ValueError where `names` holds a part of a module's weights, or of those of several that vLLM fuses."""
    sent = set(names)
    groups = {_group(name) for name in sent}
    for name in all_names:
        if name not in sent and _group(name) in groups:
            raise ValueError(f"weights for vLLM: {name!r} is missing, but others come that it is kept together with")


def _group(name: str) -> str:
    module = name.rpartition(".")[0]
    parent, _, last = module.rpartition(".")
    return f"{parent}.{FUSED.get(last, last)}"


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


def _check_served(folder: str | Path) -> None:
    config = read_config(folder)
    kind = str(config.get("model_type"))
    if CONFIG_KEY in config or kind == "higgs_audio_v2":
        raise ValueError(f"{folder}: vLLM serves no model that writes speech; take the engine hf")
    if kind not in SERVED:
        raise ValueError(
            f"{folder}: vLLM does not serve model_type {kind!r} here ({', '.join(SERVED)}); take the engine hf"
        )


def _start(folder: str | Path, policy: AudioPolicy, config: VLLMConfig) -> Any:
    """vLLM's engine, in this process but for tensor parallel workers."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the whole process is bound to some cores
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from audiorl.rollout import vllm_worker

    options: dict[str, Any] = {}
    longest = config.max_model_len or policy.backbone.decoder(policy.model).config.max_position_embeddings
    if policy.backbone.audio_token is not None:
        tied = policy.backbone.head(policy.model).weight is policy.backbone.decoder(policy.model).embed_tokens.weight
        options = dict(
            hf_overrides=vllm_worker.ListenerOnly(tied),
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
            dtype=_dtype(policy, config),
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_model_len=longest,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
            enable_prefix_caching=True,
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


def _dtype(policy: AudioPolicy, config: VLLMConfig) -> str:
    """vLLM's own `auto` would turn float32 into bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    return str(policy.model.config.dtype or torch.float32).removeprefix("torch.")


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts; a trainer's own go on as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

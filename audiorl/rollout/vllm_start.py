"""Starts vLLM: the options here, and what they become in vLLM's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from audiorl.models import AudioPolicy, read_config
from audiorl.models.speech import LAYOUT_KEY
from audiorl.rollout.vllm_weights import Lora, lora_options, served_dtype

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


@_same_random_numbers()
def start(folder: str | Path, policy: AudioPolicy, config: VLLMConfig) -> Any:
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

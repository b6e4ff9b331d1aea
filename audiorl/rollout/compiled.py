"""The decode step under `torch.compile` (`SamplingConfig.compile`).

Shapes are symbolic: a compiled step serves any number of rows and prompts, but one row, one prompt and one sample of a
prompt are cases of their own, each compiled when it first occurs. On CUDA the mode is "reduce-overhead": steps are
recorded as CUDA graphs, one for each shape, so the columns of the cache that they read grow by `WIDTH` at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from audiorl.algos.prompt_attention import PromptAttention
from audiorl.models.attention import no_mask, takes_prompts
from audiorl.models.policy import AudioPolicy
from audiorl.rollout.cache import RowCache

WIDTH = 128
"""Columns of the rows' own tokens by which a compiled step grows."""
RECOMPILES = 64
"""Compiled steps of one process. Beyond it torch runs steps as they are, and says so."""


def decode_step(
    decoder: Any, inputs: dict[str, Any], cache: Any, prompts: PromptAttention, positions: Tensor
) -> Tensor:
    """One token of every row through the decoder: hidden states [B, H] from positions [B, 1]."""
    hidden: Tensor = decoder(
        **inputs,
        attention_mask=no_mask(positions.device),
        prompts=prompts,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return hidden[:, -1]


def compiled_step(device: torch.device) -> Callable[..., Tensor]:
    """`decode_step`, compiled for a type of device at its first call."""
    return _compiled(device.type)


@cache
def _compiled(device: str) -> Callable[..., Tensor]:
    # torch._dynamo takes a second to import
    from torch._dynamo.config import patch as patch_dynamo  # type: ignore[attr-defined]
    from torch.fx.experimental._config import patch as patch_shapes  # type: ignore[attr-defined]

    graphs = device == "cuda"
    mode = "reduce-overhead" if graphs else None
    run = torch.compile(decode_step, dynamic=True, mode=mode)

    def step(*args: Any) -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        # Equal sizes of one call, such as 64 rows and 64 columns, are not equal in the next.
        with patch_dynamo(recompile_limit=RECOMPILES), patch_shapes(use_duck_shape=False):
            return run(*args)

    return step


def mark_static(tensors: Iterable[Tensor]) -> None:
    """CUDA graphs read and write these in place. Without the mark a step that writes to its arguments is not
    recorded."""
    for x in tensors:
        if x.is_cuda:
            torch._dynamo.mark_static_address(x)


def check_compiles(policy: AudioPolicy) -> None:
    """Raise ValueError where the decode step of a policy cannot be compiled."""
    decoder = policy.backbone.decoder(policy.model)
    if policy.speech is not None:
        raise ValueError("sampling.compile: the step of a model that speaks is not compiled; turn it off")
    if RowCache(policy.new_cache()).aligned or not takes_prompts(decoder):
        raise ValueError(
            f"sampling.compile: {type(decoder).__name__} has sliding windows, linear attention, cross-attention or "
            "eager attention, whose step is not compiled; turn it off"
        )
    if missing := _missing_compiler(policy.device.type):
        raise ValueError(f"sampling.compile: {missing}")


def _missing_compiler(device: str) -> str | None:
    """What torch.compile lacks on this type of device."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "torch compiles for this GPU with triton, which is missing or does not know it"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch compiles for the CPU with a C++ compiler, and none was found; install g++, or name one in CXX"
    return None

"""Attention functions that replace transformers' "sdpa", and the precision of forward passes.

Packed batches attend by `audiorl.algos.varlen`, decoding reads grouped keys without repeating them, and audio encoders
attend within chunks; everything else is computed as "sdpa" does it. A decoder gets the name `VARLEN` once, when its
policy is made, and its layers a `SegmentAttention` as the argument `packed` in every pass over a packed batch. Both
still hold when checkpointed layers run again in the backward pass.

Shapes: B batch, T tokens of a packed batch, L new tokens, S cached columns, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from audiorl.algos.prompt_attention import PromptAttention
from audiorl.algos.varlen import KERNELS, Attention, SegmentAttention, Segments, Spans, choose_kernel, compute_dtype
from audiorl.config import ModelConfig

VARLEN, GQA = "audiorl_varlen", "audiorl_gqa"
CHUNKS = "audiorl_flash_chunks_"
"""Followed by `ModelConfig.attention`. With "flash" in its name transformers calls an attention once for all chunks,
otherwise once for each."""


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[object]:
    """Run matrix products of forward passes in bfloat16 where `config.autocast` asks for it."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if config.autocast else nullcontext()


def emulates_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Tell if a CPU with these capabilities (`torch.cpu.get_capabilities`) has no instructions that help in bfloat16.

    Then a product of matrices takes tens of times as long as in float32, as `audiorl doctor` measures.
    """
    return capabilities.get("architecture") == "x86_64" and not capabilities.get("avx512_f")


# -- choosing ----------------------------------------------------------------------------------------------------------


def set_chunk_attention(encoder: Any, attention: Attention) -> None:
    """Make an audio encoder that attends within chunks (Qwen-Omni's) compute all of them in one call."""
    if hasattr(encoder, "n_window") and attention != "eager" and encoder.config._attn_implementation == "sdpa":
        encoder.config._attn_implementation = CHUNKS + attention


def set_attention(decoder: Any, attention: Attention) -> None:
    """Make a decoder take `packed_attention`, unless it shall run "eager" or has sliding windows, which need a mask."""
    config = decoder.config
    # Of transformers' attentions only "eager" bounds scores (Gemma 2); the others would leave them as they are.
    if attention == "eager" or getattr(config, "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"
    elif config._attn_implementation == "sdpa" and not _has_windows(config):
        config._attn_implementation = VARLEN


def takes_segments(decoder: Any) -> bool:
    """Tell if a packed batch needs no mask of T × T."""
    return bool(decoder.config._attn_implementation == VARLEN)


def takes_prompts(decoder: Any) -> bool:
    """Tell if it takes a `PromptAttention` within `gqa_without_repeat`."""
    return decoder.config._attn_implementation in (VARLEN, GQA)


@contextmanager
def gqa_without_repeat(decoder: Any) -> Iterator[None]:
    """Use native GQA kernels for a cache: do not repeat its keys and values for every query head of a group.

    A decoder then takes a `PromptAttention` as `prompts`. With several new tokens a rollout this holds on the CPU only:
    CUDA has no fast kernel that reads grouped keys with a mask.
    """
    config = decoder.config
    before = config._attn_implementation
    if before == VARLEN:
        config._attn_implementation = GQA
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def recording(decoder: Any, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Record attention weights of a forward pass in the block, by eager attention: of each layer (() for all) the mean
    over its heads, [B, L, S] float32. Raises ValueError for a layer that the decoder does not have."""
    config, record, hooks = decoder.config, [], []
    for layer in layers or range(config.num_hidden_layers):
        if not 0 <= layer < config.num_hidden_layers:
            raise ValueError(f"attention of layer {layer}: the decoder has layers 0 to {config.num_hidden_layers - 1}")
        attention = decoder.layers[layer].self_attn
        hooks.append(attention.register_forward_hook(lambda _, args, out: record.append(out[1].float().mean(1))))
    before, config._attn_implementation = config._attn_implementation, "eager"
    try:
        yield record
    finally:
        config._attn_implementation = before
        for hook in hooks:
            hook.remove()


# -- arguments ---------------------------------------------------------------------------------------------------------


def packed_attention(decoder: Any, spans: Spans, attention: Attention, inputs: Tensor) -> SegmentAttention:
    """Return the attention of a packed batch, with its spans on the device of the decoder's `inputs` [1, T, width].

    A decoder takes it as `packed`, with `no_mask`. Raises ValueError when no kernel of `attention` can run.
    """
    kernel = choose_kernel(attention, inputs.device, compute_dtype(inputs), head_width(decoder.config))
    return SegmentAttention(kernel, Segments.of_spans(spans, inputs.device))


def no_mask(device: torch.device) -> Tensor:
    """Return a mask for attention that needs none: transformers makes T × T of None, and hands four dimensions on."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def mask_argument(decoder: Any, mask: Tensor, positions: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return mask [T, T] bool as a decoder takes it.

    positions: [T] int64, of each token in its own sequence, for layers with a sliding window: they get a mask of their
    own. Raises ValueError for layers of other kinds, which a mask does not keep to one sequence.
    """
    config = decoder.config
    full = as_mask(decoder, mask[None, None], dtype)
    if not _has_windows(config):
        return {"attention_mask": full}
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{config.model_type}: layers of the kind {sorted(other)[0]!r} cannot read several answers in one row"
        )
    near = mask & (positions[:, None] - positions < config.sliding_window)
    windowed = as_mask(decoder, near[None, None], dtype)
    if not kinds:
        return {"attention_mask": windowed}
    return {"attention_mask": {"full_attention": full, "sliding_attention": windowed}}


def as_mask(decoder: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return mask [B, 1, L, S] bool, true where a query may look, as a decoder takes it: eager attention adds it."""
    if decoder.config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def spans_of(span_ids: Tensor, span_parents: Tensor) -> Spans:
    """Return the spans of a `PackedBatch`: span_ids [T], span_parents [number of spans]. A span is contiguous."""
    ends = torch.bincount(span_ids, minlength=len(span_parents)).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [
        (starts[i], ends[i], *((starts[p], ends[p]) if p >= 0 else (0, 0)))
        for i, p in enumerate(span_parents.tolist())
        if ends[i] > starts[i]
    ]


def _has_windows(config: Any) -> bool:
    """Tell if a layer is not plain attention to everything before. Without `layer_types` all layers share a window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return any(kind != "full_attention" for kind in kinds)


# -- attention functions -----------------------------------------------------------------------------------------------


def _gqa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    prompts: PromptAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if prompts is not None:
        return prompts(module.layer_idx, query, key, value, kwargs.get("scaling")), None
    one_token = query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1
    # A mask of one column per key serves both fast ways: one token on any device, or several on the CPU.
    if attention_mask is None or kwargs.get("position_bias") is not None or not (one_token or query.is_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    if one_token:  # the heads of a group are queries of the same keys under the same mask
        grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [B, kv heads, heads of a group, D]
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
        return out.flatten(1, 2)[:, None], None
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: SegmentAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return packed(query, key, value, kwargs.get("scaling")).contiguous(), None


def _chunks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: Attention,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    kernel = choose_kernel(attention, query.device, compute_dtype(query), query.shape[-1])
    return SegmentAttention(kernel, _chunk_segments(cu_seq_lens_q, max_length_q))(query, key, value, scaling), None


@lru_cache(maxsize=1)
def _chunk_segments(offsets: Tensor, longest: int) -> Segments:
    """Make it once for all layers, which get the same tensor."""
    return Segments(offsets, offsets, int(longest), int(longest), causal=False)


for _attention in KERNELS:
    AttentionInterface.register(CHUNKS + _attention, partial(_chunks, attention=_attention))
for _name, _function in ((VARLEN, _varlen), (GQA, _gqa)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)

"""What transformers' decoders run in place of "sdpa": packed rows by `audiorl.algos.varlen`, everything else as "sdpa"
does; and audio encoders that attend within chunks.

A decoder gets the name `VARLEN` once, when its policy is made. A forward pass over a packed row gives every layer a
`SegmentAttention` as the argument `packed`. Both still hold when checkpointed layers run again in the backward pass.

Shapes: B rows, T tokens of a packed row, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from audiorl.algos.varlen import (
    KERNELS,
    Attention,
    SegmentAttention,
    Segments,
    Spans,
    choose_kernel,
    compute_dtype,
)

VARLEN, UNGROUPED = "audiorl_varlen", "audiorl_ungrouped"


CHUNKS = "audiorl_flash_chunks_"
"""With "flash" in its name transformers calls an attention once for all chunks, otherwise once for each. What follows
is `ModelConfig.attention`."""


def set_chunk_attention(encoder: Any, attention: Attention) -> None:
    """Make an audio encoder that attends within chunks (Qwen-Omni's) compute all of them in one call."""
    if hasattr(encoder, "n_window") and attention != "eager" and encoder.config._attn_implementation == "sdpa":
        encoder.config._attn_implementation = CHUNKS + attention


def set_attention(decoder: Any, attention: Attention) -> None:
    """Make a decoder of transformers take `packed_arguments`, unless it shall run "eager" or has sliding windows, which
    need a mask."""
    config = decoder.config
    if attention == "eager":
        config._attn_implementation = "eager"
    elif config._attn_implementation == "sdpa" and not _has_windows(config):
        config._attn_implementation = VARLEN


def takes_segments(decoder: Any) -> bool:
    """Whether a packed row needs no mask of T × T."""
    return bool(decoder.config._attn_implementation == VARLEN)


def packed_arguments(decoder: Any, spans: Spans, attention: Attention, inputs: Tensor) -> dict[str, Any]:
    """The arguments that a decoder takes instead of a mask for a packed row. inputs: [1, T, width].

    Raises ValueError when no kernel of `attention` can run.
    """
    # transformers passes a mask of four dimensions on as it is, and makes one of T × T where there is none.
    unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device)
    return {"attention_mask": unused, "packed": packed_attention(decoder, spans, attention, inputs)}


def mask_argument(decoder: Any, mask: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """mask [T, T] bool as a decoder takes it; eager attention adds its mask to the scores."""
    if decoder.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    return {"attention_mask": mask[None, None]}


def packed_attention(decoder: Any, spans: Spans, attention: Attention, inputs: Tensor) -> SegmentAttention:
    """The attention of a packed row, with its spans on the device. inputs: what the decoder reads, on its device."""
    kernel = choose_kernel(attention, inputs.device, compute_dtype(inputs), head_width(decoder.config))
    return SegmentAttention(kernel, Segments.of_spans(spans, inputs.device))


def head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def spans_of(span_ids: Tensor, span_parents: Tensor) -> Spans:
    """The spans of a `PackedBatch`: span_ids [T], span_parents [number of spans]. A span's rows are contiguous."""
    ends = torch.bincount(span_ids, minlength=len(span_parents)).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [
        (starts[i], ends[i], *((starts[p], ends[p]) if p >= 0 else (0, 0)))
        for i, p in enumerate(span_parents.tolist())
        if ends[i] > starts[i]
    ]


@contextmanager
def ungrouped(decoder: Any) -> Iterator[None]:
    """Attention to a cache without a copy of it for every query head of a group.

    Of one new token a row this holds on every device. Of several it holds on the CPU: CUDA has no fast kernel that
    reads grouped keys with a mask.
    """
    config = decoder.config
    before = config._attn_implementation
    if before == VARLEN:
        config._attn_implementation = UNGROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def _has_windows(config: Any) -> bool:
    return any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())


def _ungrouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    one_token = query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1
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
    """Made once for all layers, which get the same tensor."""
    return Segments(offsets, offsets, int(longest), int(longest), causal=False)


for _attention in KERNELS:
    AttentionInterface.register(CHUNKS + _attention, partial(_chunks, attention=_attention))
AttentionInterface.register(VARLEN, _varlen)
AttentionMaskInterface.register(VARLEN, sdpa_mask)
AttentionInterface.register(UNGROUPED, _ungrouped)
AttentionMaskInterface.register(UNGROUPED, sdpa_mask)

"""Attention as transformers' "sdpa" computes it, with less work on the CPU.

`by_span` and `ungrouped` replace "sdpa" in a decoder inside a `with` block, on the CPU only and where every layer has
full attention; elsewhere they change nothing. Results are the same up to rounding.

Shapes: B rows, T tokens of a packed row, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

Spans = Sequence[tuple[int, int, int, int]]
"""Per span (start, end, start of its parent, end of its parent) as row indices; the parent is (0, 0) without one."""


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
def by_span(decoder: Any) -> Iterator[bool]:
    """Attention of a packed row span by span. Yields whether the decoder takes `spans` in place of a mask.

    A kernel with a mask computes all T² products of a row, also those that are masked.
    """
    with _replaced(decoder, "audiorl_by_span") as replaced:
        yield replaced


@contextmanager
def ungrouped(decoder: Any) -> Iterator[None]:
    """Attention to a cache without a copy of it for every query head of a group.

    On the CPU only: with a mask, CUDA has no fast kernel that would read grouped keys.
    """
    with _replaced(decoder, "audiorl_ungrouped"):
        yield


@contextmanager
def _replaced(decoder: Any, name: str) -> Iterator[bool]:
    config = decoder.config
    before = config._attn_implementation
    sliding = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    replaced = before == "sdpa" and not sliding and decoder.get_input_embeddings().weight.device.type == "cpu"
    if replaced:
        config._attn_implementation = name
    try:
        yield replaced
    finally:
        config._attn_implementation = before


def _ungrouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _by_span(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    out = attend_by_span(query, key, value, kwargs["spans"], kwargs.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


def attend_by_span(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None = None) -> Tensor:
    """query [1, heads, T, D], key and value [1, kv heads, T, D] -> [1, heads, T, D]: each row attends to the rows of
    its span up to itself and to all rows of the parent. `scale` is D^-0.5 where it is None."""
    grouped = query.shape[1] != key.shape[1]
    lengths = [end - first for first, end, _, _ in spans]
    # One split: the backward pass of a slice would fill a tensor of all T rows for every span.
    queries, keys, values = (x.split(lengths, 2) for x in (query, key, value))
    number = {first: i for i, (first, _, _, _) in enumerate(spans)}
    pieces = []
    for q, k, v, (_, _, above, below) in zip(queries, keys, values, spans, strict=True):
        mask = None
        if below:
            parent = number[above]
            k, v = torch.cat([keys[parent], k], 2), torch.cat([values[parent], v], 2)
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(below - above)
        pieces.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(pieces, 2)


AttentionInterface.register("audiorl_ungrouped", _ungrouped)
AttentionMaskInterface.register("audiorl_ungrouped", sdpa_mask)
AttentionInterface.register("audiorl_by_span", _by_span)
AttentionMaskInterface.register("audiorl_by_span", lambda *args, **kwargs: None)

"""Attention of segments of different lengths in one call, and the kernels that compute it.

A packed row (`packing`) is such a call: each span is a segment of queries, and its keys are the rows of its parent
followed by its own. The chunks of an audio encoder and Whisper's cross-attention are others. Keys and values are
gathered by one index per pack; gradients of a prompt that several responses share are summed by the gather. No kernel
makes a tensor of all queries times all keys. Shapes: N segments, Q queries, K gathered keys, D head width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attention = Literal["auto", "varlen", "flex", "sdpa", "eager"]  # What `ModelConfig.attention` may be
BLOCK = 128  # Rows of a block of FlexAttention's mask
SHORT = 256  # Most keys of a segment that a CPU computes in 16 bits by whole matrices
FEW_PAIRS = 2**24  # Of padded queries and keys, up to which a GPU without a variable-length kernel computes one call

Spans = Sequence[tuple[int, int, int, int]]
"""Per span (start, end, start of its parent, end of its parent) as row indices; the parent is (0, 0) without one."""


@dataclass(frozen=True)
class Segments:
    """Segment i of the queries attends to segment i of the keys.

    With `causal` the last query of a segment attends to all its keys, and each query before it to one key less.
    """

    query_offsets: Tensor  # [N + 1] int32, on the device: where each segment of queries starts, and Q
    key_offsets: Tensor  # [N + 1] int32, on the device: where each segment of gathered keys starts, and K
    longest_query: int
    longest_key: int
    causal: bool
    parents: tuple[int | None, ...] = ()
    """The segment whose rows each segment's keys begin with, its own rows following; empty where keys are not
    gathered."""
    key_rows: Tensor | None = None
    """[K] int64, on the device: the row that is each gathered key; None where keys are not gathered."""
    lengths_on_host: tuple[Sequence[int], Sequence[int]] | None = None
    """Lengths of the segments of queries and of keys; None where only the device has the offsets."""

    @classmethod
    def of_lengths(cls, queries: Sequence[int], keys: Sequence[int], causal: bool, device: torch.device) -> Segments:
        """Segments from their lengths, which are copied to the device once, without waiting for it."""
        offsets = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
        offsets = offsets.to(device, non_blocking=True)
        longest = max(queries, default=0), max(keys, default=0)
        return cls(offsets[0], offsets[1], *longest, causal, lengths_on_host=(queries, keys))

    @classmethod
    def of_spans(cls, spans: Spans, device: torch.device) -> Segments:
        """Return the spans of a packed row, in the order of its rows."""
        queries = [end - start for start, end, _, _ in spans]
        keys = [end - start + parent_end - parent_start for start, end, parent_start, parent_end in spans]
        segments = cls.of_lengths(queries, keys, True, device)
        if queries == keys:
            return segments
        number = {start: i for i, (start, _, _, _) in enumerate(spans)}
        parents = tuple(number[parent_start] if parent_end else None for _, _, parent_start, parent_end in spans)
        ranges = [x for start, end, *parent in spans for x in (torch.arange(*parent), torch.arange(start, end))]
        return replace(segments, parents=parents, key_rows=torch.cat(ranges).to(device, non_blocking=True))

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, kv heads, D] -> [K, kv heads, D]."""
        if self.key_rows is None:
            return key, value
        return key.index_select(0, self.key_rows), value.index_select(0, self.key_rows)

    @cached_property
    def lengths(self) -> tuple[Sequence[int], Sequence[int]]:
        """Lengths of the segments of queries and of keys. Waits for the device where the host does not have them."""
        return self.lengths_on_host or (self.query_offsets.diff().tolist(), self.key_offsets.diff().tolist())

    @property
    def padded_pairs(self) -> int:
        """Pairs of queries and keys where every segment is as long as the longest."""
        return (len(self.query_offsets) - 1) * self.longest_query * self.longest_key

    @cached_property
    def padding(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the padded segments, [N, longest query] and [N, longest key] int64, Q and K where there is nothing;
        and which pairs are visible, [N, 1, longest query, longest key] bool. The host does not wait for them."""
        rows, lengths, places = [], [], []
        for offsets, longest in ((self.query_offsets, self.longest_query), (self.key_offsets, self.longest_key)):
            place = torch.arange(longest, device=offsets.device)
            length = offsets.diff()[:, None].long()
            rows.append(torch.where(place < length, offsets[:-1, None] + place, offsets[-1]))
            lengths.append(length)
            places.append(place)
        visible = (places[1] < lengths[1])[:, None]
        if self.causal:
            visible = visible & (places[1] <= (lengths[1] - lengths[0] + places[0])[..., None])
        # What pads sees its first key: a softmax over nothing is NaN, and so are its gradients.
        visible = visible.expand(-1, self.longest_query, -1) | (places[1] == 0)
        return rows[0], rows[1], visible[:, None]

    @cached_property
    def visible(self) -> tuple[Tensor, Tensor]:
        """[Q] int64 each: the first gathered key that a query attends to, and the one after the last."""
        device, queries, keys = self.query_offsets.device, self.query_offsets.long(), self.key_offsets.long()
        rows = torch.arange(sum(self.lengths[0]), device=device)
        segment = torch.searchsorted(queries[1:], rows, right=True)
        first, end = keys[segment], keys[segment + 1]
        return first, end - (queries[segment + 1] - 1 - rows) if self.causal else end

    @cached_property
    def block_mask(self) -> Any:
        """The segments as FlexAttention's BlockMask. The keys that a block of queries attends to lie side by side, so
        it is a range of blocks of keys; nothing of the size Q × K is made."""
        from torch.nn.attention.flex_attention import BlockMask

        first, end = self.visible
        queries, keys = len(first), sum(self.lengths[1])

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key < end[query])

        rows = torch.arange(-(-queries // BLOCK) * BLOCK, device=first.device).clamp(max=queries - 1).view(-1, BLOCK)
        first_block = first[rows].amin(1) // BLOCK
        end_block = -(-end[rows].amax(1) // BLOCK)
        columns = torch.arange(-(-keys // BLOCK), device=first.device)
        # A block of queries has `count` blocks of keys, and lists them first; what follows them is not read.
        count = (end_block - first_block).clamp(min=0)
        blocks = (first_block[:, None] + columns).clamp(max=len(columns) - 1)
        count, blocks = count.int()[None, None], blocks.int()[None, None]
        return BlockMask.from_kv_blocks(count, blocks, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(queries, keys))


@dataclass(frozen=True)
class Kernel:
    """One way to compute variable-length attention."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]
    """query [Q, heads, D], key and value [rows, kv heads, D], segments, scale (None: D^-0.5) -> [Q, heads, D]."""
    obstacle: Callable[[torch.device, torch.dtype, int], str | None]
    """Why it cannot run on a device, in a dtype, with a head width; None where it can."""


@dataclass(frozen=True)
class SegmentAttention:
    """A kernel with the segments of one pack: made once, called in every layer."""

    kernel: Kernel
    segments: Segments

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """query [1, heads, Q, D], key and value [1, kv heads, rows, D] -> [1, Q, heads, D]."""
        # autocast knows SDPA but not the other kernels, and rotary embeddings give float32
        query, key, value = (x.to(compute_dtype(x)).squeeze(0).transpose(0, 1) for x in (query, key, value))
        return self.kernel.run(query, key, value, self.segments, scale).unsqueeze(0)


def choose_kernel(attention: Attention, device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """Return the first kernel of `ModelConfig.attention` that can run. Raises ValueError where none can, saying why."""
    reasons = obstacles(attention, device, dtype, head_width)
    if len(reasons) < len(KERNELS[attention]):
        return KERNELS[attention][len(reasons)]
    listed = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise ValueError(f"model.attention {attention!r} cannot run here: {listed}; set it to 'auto'")


def obstacles(attention: Attention, device: torch.device, dtype: torch.dtype, head_width: int) -> dict[str, str]:
    """Why the kernels before the one that `choose_kernel` takes cannot run, by name."""
    reasons = {}
    for kernel in KERNELS[attention]:
        obstacle = kernel.obstacle(device, dtype, head_width)
        if obstacle is None:
            break
        reasons[kernel.name] = obstacle
    return reasons


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which attention computes: autocast's where it is on, otherwise that of `x`."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


# -- the kernels, the preferred one first ------------------------------------------------------------------------------


def sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """Call torch's scaled_dot_product_attention once per segment: the reference, which runs everywhere.

    Keys are concatenated, not gathered by an index, whose backward pass is slow on the CPU.
    """
    query_lengths, key_lengths = segments.lengths
    # One split: the backward pass of a slice would fill a tensor of all rows for every segment.
    queries = query.transpose(0, 1).unsqueeze(0).split(query_lengths, 2)
    row_lengths = query_lengths if segments.parents else key_lengths
    keys, values = (list(x.transpose(0, 1).unsqueeze(0).split(row_lengths, 2)) for x in (key, value))
    if segments.parents:
        keys, values = (
            [x if p is None else torch.cat([rows[p], x], 2) for x, p in zip(rows, segments.parents, strict=True)]
            for rows in (keys, values)
        )
    pieces = [_segment(q, k, v, segments.causal, scale) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(pieces, 2).squeeze(0).transpose(0, 1)


def _segment(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    if not keys:
        return torch.zeros_like(query)  # softmax over no keys is NaN
    if query.is_cpu and query.element_size() == 2 and keys <= SHORT:
        return _by_products(query, key, value, causal, scale)
    mask = None
    if causal and queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    return scaled_dot_product_attention(query, key, value, mask, is_causal=causal and mask is None, **options)


def _by_products(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Return the same by whole matrices, with scores in float32 as in SDPA. In 16 bits torch's kernel for CPUs takes
    twice to three times as long for a short segment, most of it in the backward pass."""
    heads, keys = key.shape[1:3]
    bias = torch.zeros(query.shape[2], keys)
    if causal:
        bias = torch.full_like(bias, -torch.inf).triu(keys - query.shape[2] + 1)
    grouped = query[0].unflatten(0, (heads, -1)).flatten(1, 2).float()  # [kv heads, group * L, D]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    scores = torch.baddbmm(bias.repeat(query.shape[1] // heads, 1), grouped, key[0].float().mT, alpha=scale)
    weights = scores.softmax(-1).to(value.dtype)
    return torch.bmm(weights, value[0]).view(1, query.shape[1], query.shape[2], -1)


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn`, FlashAttention in torch (Dao 2023, arXiv 2307.08691).

    It calls `aten::_flash_attention_forward`, whose causal mask is aligned at the bottom right
    (`torch.nn.attention.bias.CausalBias` relies on the same).
    """
    from torch.nn.attention.varlen import varlen_attn

    key, value = segments.gather(key, value)
    offsets = segments.query_offsets, segments.key_offsets, segments.longest_query, segments.longest_key
    window = (-1, 0) if segments.causal else (-1, -1)
    out: Any = varlen_attn(query, key, value, *offsets, scale=scale, window_size=window, enable_gqa=True)
    return cast(Tensor, out)


def flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """Call FlexAttention (Dong et al., arXiv 2412.05496); compiled on a GPU, where the first call takes a minute."""
    from torch.nn.attention.flex_attention import flex_attention

    key, value = segments.gather(key, value)
    run: Any = _compiled_flex() if query.is_cuda else flex_attention
    out: Tensor = run(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
        block_mask=segments.block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Else rows of fewer than 128 tokens go to its kernel for decoding, which does not compile for some shapes.
        kernel_options={"BACKEND": "TRITON"},
    )
    return out.squeeze(0).transpose(0, 1)


def padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """Call SDPA once for all segments, padded to the longest: few launches, and nothing to compile."""
    query_rows, key_rows, visible = segments.padding
    key, value = segments.gather(key, value)
    heads = query.shape[1] // key.shape[1]

    def taken(x: Tensor, rows: Tensor) -> Tensor:
        # A row of zeros behind the others stands for what pads.
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)

    keys, values = (taken(x, key_rows).repeat_interleave(heads, 1) for x in (key, value))
    out = scaled_dot_product_attention(taken(query, query_rows), keys, values, visible, scale=scale)
    rows = out.new_zeros(len(query) + 1, *query.shape[1:])
    return rows.index_copy(0, query_rows.flatten(), out.transpose(1, 2).flatten(0, 1))[:-1]


def _padded_if_few(kernel: Kernel) -> Kernel:
    """Return a kernel that a GPU leaves to `padded` where there are few pairs: a small model is all launches there, and
    FlexAttention took 40 s to compile for one."""

    def run(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
        few = query.is_cuda and segments.padded_pairs <= FEW_PAIRS
        return (PADDED if few else kernel).run(query, key, value, segments, scale)

    return replace(kernel, run=run)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _varlen_obstacle(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA GPU, not {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"computes in bfloat16 or float16, not {name}: set model.autocast or model.dtype"
    if head_width % 8 or head_width > 256:
        return f"needs a head width that is a multiple of 8 up to 256, not {head_width}"
    return None


def _flex_obstacle(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    if device.type != "cuda":
        return f"has no backward pass on {device.type}"
    if head_width < 16:
        return f"needs a head width of at least 16, not {head_width}"
    return None if importlib.util.find_spec("triton") else "needs triton, which is not installed"


TORCH_VARLEN = Kernel("torch varlen", torch_varlen, _varlen_obstacle)
FLEX = Kernel("flex", flex, _flex_obstacle)
PADDED = Kernel("padded", padded, lambda device, dtype, head_width: None)
SDPA = Kernel("sdpa", sdpa, lambda device, dtype, head_width: None)
KERNELS: dict[Attention, tuple[Kernel, ...]] = {
    "auto": (TORCH_VARLEN, _padded_if_few(FLEX), _padded_if_few(SDPA)),
    "varlen": (TORCH_VARLEN,),
    "flex": (FLEX,),
    "sdpa": (SDPA,),
    "eager": (SDPA,),
}
"""Kernels of each `ModelConfig.attention`, the preferred one first. On a GPU "auto" pads short rows where there is no
FlashAttention for them, see `padded`. With "eager" decoder-only models run transformers'
own attention under a mask, so this is Whisper's only."""

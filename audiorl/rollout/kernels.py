"""Kernels of a decoding step: what lies between two products with weights is one launch, attention two.

Each is an operator `torch.ops.audiorl.…`: on a CPU made of torch's, which is what it means; on a GPU of Triton's, as
long as that is installed and `check` finds the same numbers. Lengths are read on the device, so a captured step
serves rows and prompts of any length, and reads no column that is not written.

Shapes: B rows, P prompts, G slots for the rows of a prompt, H decoder width, K heads of keys, h query heads of each,
D head width, W columns of a row, S columns of a prompt, whose tokens are the last ones.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from audiorl.algos.fused import gate_forward, halves_turned, norm_forward
from audiorl.algos.prompt_attention import PromptAttention

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = tl = None  # type: ignore[assignment, unused-ignore]
jit: Any = triton.jit if triton is not None else lambda function: function
logger = logging.getLogger(__name__)
SPLIT = 256
"""Columns of a prompt that one program reads."""
LAUNCHES = {"add_norm": 1, "rotary_write": 1, "attend": 2, "swiglu": 1}
"""How many kernels an operator starts on a GPU."""
LIMITS = {torch.float32: 0.01, torch.float16: 0.01, torch.bfloat16: 0.03}
"""How far Triton's numbers may be from torch's, which may multiply in TF32 and rounds bfloat16 more often."""
_library = torch.library.Library("audiorl", "DEF")
_library.define("add_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps, ScalarType dtype) -> Tensor")
_library.define(
    "rotary_write(Tensor(a!) query, Tensor key, Tensor value, Tensor turns, Tensor? query_norm, Tensor? key_norm, "
    "float eps, Tensor(b!) keys, Tensor(c!) values, Tensor written) -> ()"
)
_library.define(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor prompt_keys, Tensor prompt_values, Tensor lengths, "
    "Tensor slots, Tensor places, Tensor written, float scale) -> Tensor"
)
_library.define("swiglu(Tensor gate, Tensor up) -> Tensor")

# -- by torch ----------------------------------------------------------------------------------------------------------


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` [B, H] to x [B, H] in place; return the root mean square norm of the sum, in `dtype`."""
    if delta is not None:
        x.add_(delta)
    normed: Tensor = norm_forward.plain(x, weight, eps, dtype)[0]
    return normed


def rotary_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turns: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    written: Tensor,
) -> None:
    """Rotate query [B, K * h * D] in place; write key, rotated, and value [B, K * D] to keys and values [B, K, W, D].

    turns: [B, 2 * D], cosines and then sines, each of two halves that are equal. query_norm, key_norm: [D], weights of
    norms of every head before the rotation. written: [B] int64, the column of each row; a row that is full goes on at
    the last column.
    """

    def rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        heads = x.unflatten(1, (-1, keys.shape[3]))
        if norm is not None:
            heads = norm_forward.plain(heads, norm, eps, torch.promote_types(heads.dtype, norm.dtype))[0]
        return (heads * cos[:, None] + halves_turned(heads) * sin[:, None]).to(x.dtype)

    cos, sin = turns.chunk(2, 1)
    columns, rows = written.clamp(max=keys.shape[2] - 1), torch.arange(len(written), device=written.device)
    keys[rows, :, columns] = rotated(key, key_norm)
    values[rows, :, columns] = value.unflatten(1, (-1, keys.shape[3]))
    query.copy_(rotated(query, query_norm).flatten(1))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    places: Tensor,
    written: Tensor,
    scale: float,
) -> Tensor:
    """Return [B, K * h * D]: attention of query [B, K * h * D] to each row's prompt and its own columns to `written`.

    keys, values: [B, K, W, D]. prompt_keys, prompt_values: [P, K, S, D], lengths: [P] int64. slots: [P, G] int64, the
    row of each slot, -1 where it is empty. places: [B] int64, the slot of each row; -1: it has no prompt.
    """

    def hidden(mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=keys.dtype, device=mask.device).masked_fill(mask, -torch.inf)[
            :, None, None
        ]

    last = written.clamp(max=keys.shape[2] - 1)
    width = prompt_keys.shape[2]
    prompts = PromptAttention(
        [prompt_keys],
        [prompt_values],
        hidden(torch.arange(width, device=last.device) < width - lengths[:, None]),
        hidden(torch.arange(keys.shape[2], device=last.device) > last[:, None]),
        slots.flatten().clamp(min=0),
        places.clamp(min=0),
    )
    return prompts(0, query.unflatten(1, (-1, 1, keys.shape[3])), keys, values, scale)[:, 0].flatten(1)


# -- by Triton ---------------------------------------------------------------------------------------------------------


@jit
def _add_norm_kernel(
    x, delta, weight, out, eps, width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr, kind: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, block)
    inside = tl.arange(0, block) < width
    exact = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        exact += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        exact = exact.to(kind).to(tl.float32)  # what is kept is what is normed
        tl.store(x + at, exact.to(kind), mask=inside)
    normed = (exact * tl.rsqrt(tl.sum(exact * exact, 0) / width + eps)).to(kind).to(tl.float32)
    scaled = normed * tl.load(weight + tl.arange(0, block), mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@jit
def _rotated(x, norm, cos, sin, eps, width: tl.constexpr, half_block: tl.constexpr, norms: tl.constexpr):
    half: tl.constexpr = width // 2
    i = tl.arange(0, half_block)
    inside = i < half
    a = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + half + i, mask=inside, other=0.0).to(tl.float32)
    if norms:
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / width + eps)
        a *= scale * tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
        b *= scale * tl.load(norm + half + i, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + i, mask=inside, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@jit
def _rotary_write_kernel(
    query,
    key,
    value,
    query_row,
    key_row,
    value_row,
    turns,
    query_norm,
    key_norm,
    eps,
    keys,
    values,
    written,
    columns,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    width: tl.constexpr,
    half_block: tl.constexpr,
    norms: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = width // 2
    i = tl.arange(0, half_block)
    inside = i < half
    cos = turns + row * 2 * width
    sin = cos + width
    column = tl.minimum(tl.load(written + row), columns - 1)
    if head < query_heads:
        x = query + row * query_row + head * width
        a, b = _rotated(x, query_norm, cos, sin, eps, width, half_block, norms)
        tl.store(x + i, a.to(query.dtype.element_ty), mask=inside)
        tl.store(x + half + i, b.to(query.dtype.element_ty), mask=inside)
    elif head < query_heads + key_heads:
        k = head - query_heads
        x = key + row * key_row + k * width
        a, b = _rotated(x, key_norm, cos, sin, eps, width, half_block, norms)
        to = keys + ((row * key_heads + k) * columns + column) * width
        tl.store(to + i, a.to(keys.dtype.element_ty), mask=inside)
        tl.store(to + half + i, b.to(keys.dtype.element_ty), mask=inside)
    else:
        k = head - query_heads - key_heads
        x = value + row * value_row + k * width
        to = values + ((row * key_heads + k) * columns + column) * width
        tl.store(to + i, tl.load(x + i, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)
        tl.store(to + half + i, tl.load(x + half + i, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)


@jit
def _softmax_step(query, keys, values, n, end, d, inside, best, total, out, scale, width: tl.constexpr):
    """Go on with a softmax over the columns n that are below `end`: its maximum, its sum and what it weighs."""
    seen = n < end
    k = tl.load(keys + n[None, :] * width + d[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
    v = tl.load(values + n[:, None] * width + d[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
    # "ieee" is for float32 only: by default Triton would multiply it in TF32.
    scores = tl.where(seen[None, :], tl.dot(query, k, input_precision="ieee") * scale, float("-inf"))
    more = tl.maximum(best, tl.max(scores, 1))
    weights, decay = tl.exp(scores - more[:, None]), tl.exp(best - more)
    added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return more, total * decay + tl.sum(weights, 1), out * decay[:, None] + added


@jit
def _prompts_kernel(
    query,
    query_row,
    keys,
    values,
    lengths,
    slots,
    partial,
    partial_lse,
    scale,
    columns,
    splits,
    group,
    key_heads: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    split_size: tl.constexpr,
):
    """Attend with the queries of all rows of a prompt to `split_size` of its columns."""
    prompt, head_of_keys = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    split, m = tl.program_id(1), tl.program_id(2) * block_m + tl.arange(0, block_m)
    row = tl.load(slots + prompt * group + m // heads, mask=m < group * heads, other=-1)
    used, head = row >= 0, head_of_keys * heads + m % heads
    d = tl.arange(0, block_d)
    inside = d < width
    q_at = row[:, None] * query_row + (head * width)[:, None] + d[None, :]
    q = tl.load(query + q_at, mask=used[:, None] & inside[None, :], other=0.0)
    begin = columns - tl.load(lengths + prompt) + split * split_size
    end = tl.minimum(begin + split_size, columns)
    end = tl.where(tl.max(row, 0) >= 0, end, begin)  # nobody asks: nothing is read
    base = tl.program_id(0).to(tl.int64) * columns * width
    best = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    out = tl.zeros([block_m, block_d], tl.float32)
    for start in range(begin, end, block_n):
        n = start + tl.arange(0, block_n)
        best, total, out = _softmax_step(
            q, keys + base, values + base, n, end, d, inside, best, total, out, scale, width
        )
    kept = used & (total > 0)  # false where nothing was read
    at = (row * (key_heads * heads) + head) * splits + split
    tl.store(partial_lse + at, best + tl.log(total), mask=kept)
    tl.store(partial + at[:, None] * width + d[None, :], out / total[:, None], mask=kept[:, None] & inside[None, :])


@jit
def _rows_kernel(
    query,
    query_row,
    keys,
    values,
    lengths,
    places,
    written,
    partial,
    partial_lse,
    out_pointer,
    scale,
    columns,
    splits,
    group,
    key_heads: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    split_size: tl.constexpr,
):
    """Attend with the queries of a row to its own columns; put what its prompt gave to it."""
    row, head_of_keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, d = tl.arange(0, block_m), tl.arange(0, block_d)
    used, inside, head = m < heads, d < width, head_of_keys * heads + m
    q_at = row * query_row + (head * width)[:, None] + d[None, :]
    q = tl.load(query + q_at, mask=used[:, None] & inside[None, :], other=0.0)
    best = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    out = tl.zeros([block_m, block_d], tl.float32)
    end = tl.minimum(tl.load(written + row) + 1, columns)
    base = (row * key_heads + head_of_keys) * columns * width
    for start in range(0, end, block_n):
        n = start + tl.arange(0, block_n)
        best, total, out = _softmax_step(
            q, keys + base, values + base, n, end, d, inside, best, total, out, scale, width
        )
    place = tl.load(places + row)
    length = tl.load(lengths + tl.maximum(place, 0) // group)
    of_prompt = tl.where(place >= 0, (length + split_size - 1) // split_size, 0)
    for split in range(0, of_prompt):
        at = (row * (key_heads * heads) + head) * splits + split
        lse = tl.load(partial_lse + at, mask=used, other=0.0)
        part = tl.load(partial + at[:, None] * width + d[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        more = tl.maximum(best, lse)
        decay, weight = tl.exp(best - more), tl.exp(lse - more)
        best, total, out = more, total * decay + weight, out * decay[:, None] + part * weight[:, None]
    to = (row * (key_heads * heads) + head)[:, None] * width + d[None, :]
    out = out / total[:, None]
    tl.store(out_pointer + to, out.to(out_pointer.dtype.element_ty), mask=used[:, None] & inside[None, :])


@jit
def _swiglu_kernel(gate, up, out, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(gate.dtype.element_ty).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (x * y).to(out.dtype.element_ty), mask=inside)


def add_norm_triton(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    rows, width = x.shape
    assert x.is_contiguous() and (delta is None or delta.is_contiguous())
    kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    given = x if delta is None else delta
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](x, given, weight, out, eps, width, block, delta is not None, kind, num_warps=8)
    return out


def rotary_write_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turns: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    written: Tensor,
) -> None:
    _, key_heads, columns, width = keys.shape
    assert keys.is_contiguous() and values.is_contiguous() and turns.is_contiguous()
    query_heads, norms = query.shape[1] // width, query_norm is not None
    _rotary_write_kernel[(len(query), query_heads + 2 * key_heads)](
        query,
        key,
        value,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        turns,
        query_norm if norms else turns,
        key_norm if norms else turns,
        eps,
        keys,
        values,
        written,
        columns,
        query_heads,
        key_heads,
        width,
        triton.next_power_of_2(width // 2),
        norms,
        num_warps=1,
    )


def attend_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    places: Tensor,
    written: Tensor,
    scale: float,
) -> Tensor:
    rows, key_heads, columns, width = keys.shape
    prompts, group = slots.shape
    of_prompts, heads = prompt_keys.shape[2], query.shape[1] // width // key_heads
    assert all(x.is_contiguous() for x in (keys, values, prompt_keys, prompt_values, slots))
    splits = triton.cdiv(of_prompts, SPLIT)
    partial = torch.empty(rows, key_heads * heads, splits, width, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(rows, key_heads * heads, splits, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, key_heads * heads * width, dtype=keys.dtype, device=query.device)
    block_d = max(16, triton.next_power_of_2(width))
    block_n = 64 if block_d * keys.element_size() <= 256 else 32
    # `tl.dot` wants 16 rows at least.
    of_group, of_row = (max(16, triton.next_power_of_2(n)) for n in (min(group * heads, 64), heads))
    limits = {"num_warps": 4, "num_stages": 2}
    _prompts_kernel[(prompts * key_heads, splits, triton.cdiv(group * heads, of_group))](
        query,
        query.stride(0),
        prompt_keys,
        prompt_values,
        lengths,
        slots,
        partial,
        partial_lse,
        scale,
        of_prompts,
        splits,
        group,
        key_heads,
        heads,
        width,
        of_group,
        block_n,
        block_d,
        SPLIT,
        **limits,
    )
    _rows_kernel[(rows, key_heads)](
        query,
        query.stride(0),
        keys,
        values,
        lengths,
        places,
        written,
        partial,
        partial_lse,
        out,
        scale,
        columns,
        splits,
        group,
        key_heads,
        heads,
        width,
        of_row,
        block_n,
        block_d,
        SPLIT,
        **limits,
    )
    return out


def swiglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    assert gate.is_contiguous() and up.is_contiguous()
    out = torch.empty_like(gate)
    _swiglu_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), 1024, num_warps=4)
    return out


# -- choosing ----------------------------------------------------------------------------------------------------------

BY_TORCH = {"add_norm": add_norm, "rotary_write": rotary_write, "attend": attend, "swiglu": gate_forward.plain}
BY_TRITON = {
    "add_norm": add_norm_triton,
    "rotary_write": rotary_write_triton,
    "attend": attend_triton,
    "swiglu": swiglu_triton,
}
_on_gpu: dict[str, Any] = dict(BY_TORCH)


def _dispatched(name: str) -> Any:
    return lambda *args: _on_gpu[name](*args)


for _name, _function in BY_TORCH.items():
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _dispatched(_name), "CUDA")


def differences(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> dict[str, float]:
    """Return how far Triton's kernels are from torch's operators on random numbers, by name of the operator.

    heads: query heads of a head of keys. The most that differs, relative to the largest number.
    """
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made).to(device, dtype)

    def numbers(*values: Any) -> Tensor:
        return torch.tensor(values, device=device)

    rows, keys_of, columns, of_prompts = 5, 2, 70, SPLIT + 70
    angle = torch.rand(rows, width // 2, generator=made).repeat(1, 2).to(device)
    qkv = random(rows, (heads + 2) * keys_of * width)
    caches = [random(rows, keys_of, columns, width) for _ in range(2)]
    prompts = [random(2, keys_of, of_prompts, width) for _ in range(2)]
    written = numbers(0, 3, 64, columns - 1, columns + 5)
    slots, places = numbers([1, 4, 0], [3, -1, -1]), numbers(2, 0, -1, 3, 1)

    def calls(functions: dict[str, Any]) -> dict[str, list[Tensor]]:
        x, own, kept = random(rows, 48), qkv.clone(), [c.clone() for c in caches]
        query, key, value = own.split([heads * keys_of * width, keys_of * width, keys_of * width], 1)
        normed = functions["add_norm"](x, random(rows, 48), random(48), 1e-6, dtype)
        norms = random(width), random(width)
        first = functions["add_norm"](x, None, random(48), 1e-6, dtype)
        turns = torch.cat([angle.cos(), angle.sin()], 1).to(dtype)
        functions["rotary_write"](query, key, value, turns, *norms, 1e-6, *kept, written)
        plain = query.clone()
        functions["rotary_write"](plain, key, value, turns, None, None, 1e-6, *[c.clone() for c in kept], written)
        lengths = numbers(of_prompts, 40)
        out = functions["attend"](query, *kept, *prompts, lengths, slots, places, written, width**-0.5)
        out = out[places >= 0]
        return {
            "add_norm": [x, normed, first],
            "rotary_write": [query, plain, *kept],
            "attend": [out],
            "swiglu": [functions["swiglu"](*random(2, rows, 48))],
        }

    found = []
    for functions in (BY_TORCH, BY_TRITON):
        made.manual_seed(1)
        found.append(calls(functions))
    return {
        name: max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found[1][name], strict=True))
        for name, expected in found[0].items()
    }


@lru_cache
def check(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> None:
    """Use Triton's kernels on this GPU where they give the numbers of torch's operators, else say that they do not."""
    try:
        if triton is None:
            raise ImportError("Triton is not installed")
        far = differences(device, dtype, heads, width)
        wrong = {name: x for name, x in far.items() if not x <= LIMITS[dtype]}
        if wrong:
            raise ValueError(f"Triton's numbers differ: {wrong}")
        _on_gpu.update(BY_TRITON)
    except Exception as error:  # whatever a compiler or driver raises, decoding goes on
        _on_gpu.update(BY_TORCH)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("decoding goes on with torch's operators, more slowly: %s", reason)

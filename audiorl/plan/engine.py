"""What a generation engine holds, and what a node keeps in CPU memory."""

from __future__ import annotations

from audiorl.plan.activations import kv_bytes_per_token
from audiorl.plan.layout import BYTES, GIB, Layout
from audiorl.plan.parts import Cache, Part, count_text, part
from audiorl.plan.sizes import Size
from audiorl.plan.trainer import optimizer_bytes, precision_of


def engine_parts(size: Size, layout: Layout) -> tuple[list[Part], Cache | None]:
    shape, a = size.shape, layout.assume
    if layout.engine == "hf":
        each = kv_bytes_per_token(shape, 2 if layout.autocast else BYTES[layout.dtype])
        how = f"{layout.max_batch_tokens} tokens x {each} bytes"
        return [part("key-value cache", how, layout.max_batch_tokens * each, "generate")], None
    tp, number = layout.tensor_parallel, 2 if layout.autocast else BYTES[layout.dtype]
    whole = sum(size.parts.get(name, 0) for name in ("audio tower", "projector", "vision tower"))
    weights = number * (whole + (size.total - size.adapters - whole) / tp)
    work = a.engine_workspace_gib * GIB
    budget = layout.gpu_fraction * layout.gpu_gib * GIB
    each = kv_bytes_per_token(shape, number, tp)
    room = max(budget - weights - work, 0.0)
    cache = _cache(each, int(room // each), layout)
    sync = max(a.sync_bucket_mib * 2**20, size.largest * number)
    asleep = layout.sleep and layout.placement == "colocated"
    rest = "" if asleep else " score backward step sync"
    split = f"{count_text(size.total - size.adapters)} x {number} bytes" + (f", the decoder / {tp}" if tp > 1 else "")
    parts = [
        part("engine's weights", split, weights, "generate sync" if asleep else "generate" + rest),
        part("key-value cache", f"what {layout.gpu_fraction:g} of the GPU leaves", room, "generate" + rest),
        part("engine's workspace", "assumed", work, "generate" + rest),
        part("weight sync", "a bucket or the largest tensor", sync, "sync"),
    ]
    if asleep:
        parts.append(part("engine asleep", "assumed", a.engine_asleep_gib * GIB, "score backward step"))
    return parts, cache


def _cache(each: int, tokens: int, layout: Layout) -> Cache:
    """Every GPU of an engine holds its share of each token, so an engine has room for as many as one of them."""
    sequence = layout.prompt_tokens + layout.response_tokens
    group = layout.prompt_tokens + layout.group_size * layout.response_tokens
    whole, rest = divmod(tokens, group)
    shared = whole * layout.group_size + max(rest - layout.prompt_tokens, 0) // layout.response_tokens
    return Cache(each, tokens, tokens // sequence, shared)


def host_bytes(size: Size, layout: Layout) -> float:
    p = precision_of(layout)
    ranks = min(layout.gpus, layout.trainers)
    needed = 0.0
    if layout.offload_optimizer:
        states, _ = optimizer_bytes(layout, p, size.trained, size.adapters)
        needed += ranks * (states + 4 * (size.trained + size.adapters) / layout.trainers)
    if layout.engine == "vllm" and layout.placement == "colocated" and layout.sleep:
        needed += (2 if layout.autocast else BYTES[layout.dtype]) * size.total * ranks
    return needed

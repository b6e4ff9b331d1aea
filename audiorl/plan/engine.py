"""What a generation engine holds, and what a node keeps in CPU memory."""

from __future__ import annotations

from audiorl.plan.activations import kv_bytes_per_token
from audiorl.plan.layout import BYTES, GIB, Layout, critics_layout
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
    whole = sum(size.parts.get(name, 0) for name in ("audio tower", "projector"))
    weights = number * (whole + (_served(size) - whole) / tp)
    work = a.engine_workspace_gib * GIB
    budget = layout.gpu_fraction * layout.gpu_gib * GIB
    each = kv_bytes_per_token(shape, number, tp)
    adapter = 2.0 * number * size.adapters if layout.sends_adapter else 0.0
    room = max(budget - weights - adapter - work, 0.0)
    cache = _cache(each, int(room // each), layout)
    bucket = a.sync_bucket_mib * 2**20
    sync = bucket if layout.sends_adapter else max(bucket, size.largest * number)
    asleep = layout.sleep and layout.placement == "colocated"
    rest = "" if asleep else " score backward step sync"
    split = f"{count_text(_served(size))} x {number} bytes" + (f", the decoder / {tp}" if tp > 1 else "")
    parts = [
        part("engine's weights", split, weights, "generate sync" if asleep else "generate" + rest),
        part("key-value cache", f"what {layout.gpu_fraction:g} of the GPU leaves", room, "generate" + rest),
        part("engine's workspace", "assumed", work, "generate" + rest),
        part("weight sync", "a bucket" if layout.sends_adapter else "a bucket or the largest tensor", sync, "sync"),
    ]
    if adapter:
        how = f"2 x {count_text(size.adapters)} x {number} bytes: as they came, and where they are used"
        parts.insert(1, part("engine's adapter", how, adapter, "generate sync" if asleep else "generate" + rest))
    if asleep:
        parts.append(part("engine asleep", "assumed", a.engine_asleep_gib * GIB, "score backward step"))
    return parts, cache


def _served(size: Size) -> int:
    """Weights of a vLLM engine without an adapter."""
    return size.total - size.adapters


def _cache(each: int, tokens: int, layout: Layout) -> Cache:
    """Every GPU of an engine holds its share of each token, so an engine has room for as many as one of them."""
    sequence = layout.prompt_tokens + layout.response_tokens
    group = layout.prompt_tokens + layout.group_size * layout.response_tokens
    whole, rest = divmod(tokens, group)
    shared = whole * layout.group_size + max(rest - layout.prompt_tokens, 0) // layout.response_tokens
    return Cache(each, tokens, tokens // sequence, shared)


def host_bytes(size: Size, layout: Layout) -> float:
    ranks = min(layout.gpus, layout.trainers)
    needed = 0.0
    if layout.offload_optimizer:
        needed += _offloaded(layout, size.trained, size.adapters, layout.gpus)
        if layout.critic in ("own", "separate"):
            of_critic = critics_layout(layout) if layout.critic == "separate" else layout
            needed += _offloaded(of_critic, size.trained - size.heads, size.adapters, layout.gpus)
    if layout.engine == "vllm" and layout.placement == "colocated" and layout.sleep:
        adapters = 2 * size.adapters if layout.sends_adapter else 0
        needed += (2 if layout.autocast else BYTES[layout.dtype]) * (_served(size) + adapters) * ranks
    return needed


def _offloaded(layout: Layout, trained: int, adapters: int, gpus: int) -> float:
    """The optimizer's states and the gradients of the ranks that may lie on a node of `gpus`."""
    states, _ = optimizer_bytes(layout, precision_of(layout), trained, adapters)
    return min(gpus, layout.trainers) * (states + 4 * (trained + adapters) / layout.trainers)

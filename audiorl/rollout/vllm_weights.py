"""The weights that vLLM is given of a policy: merged or an adapter next to them, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from audiorl.models import AudioPolicy
from audiorl.models.lora import merged_weights
from audiorl.models.weights import Weights, check_weight, named
from audiorl.rollout.weight_transfer import BUCKET, buckets

LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The decoder's linear layers that vLLM runs with an adapter here."""
Lora = Literal["merged", "adapter"]
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank; an adapter takes the memory of the next one."""
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
"""Linears that vLLM keeps in one: their weights must come together."""


def lora_layers(policy: AudioPolicy) -> list[str]:
    """Return the names of the decoder's layers that have an adapter, by their last part."""
    names = (name.partition(".lora_")[0] for name in policy.parameters_by_name() if ".lora_" in name)
    return sorted({name.rpartition(".")[2] for name in names})


def adapter_obstacle(policy: AudioPolicy, dtype: str) -> str | None:
    """Return why vLLM cannot run a policy's adapter next to its weights, or None. dtype: `VLLMConfig.dtype`.

    `policy` may be a model without weights, as its adapter's folder gives on the device "meta".
    """
    assert policy.config.lora.rank
    if others := [layer for layer in lora_layers(policy) if layer not in LORA_LAYERS]:
        return f"it has no adapters for the layers {', '.join(others)}, only for {', '.join(LORA_LAYERS)}"
    if policy.config.lora.rank > LORA_RANKS[-1]:
        return f"rank {policy.config.lora.rank} is above its largest, {LORA_RANKS[-1]}"
    if not torch.cuda.is_available() and getattr(policy.backbone.decoder(policy.model).config, "num_experts", False):
        return "on a CPU it runs no adapter in a model with experts"
    if torch.cuda.is_available() and served_dtype(policy, dtype) == "float32":
        return "on GPUs its kernels for adapters compute in 16 bit, and this model is in float32"
    return None


def served_weights(policy: AudioPolicy, lora: Lora = "merged") -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights by checkpoint name, for an engine with the same `VLLMConfig.lora`.

    adapter: the adapter's matrices and what else is trained. merged: all weights of the decoder, merged one at a time.
    """
    if policy.adapter is None:
        yield from policy.weights().items()
        return
    if lora == "adapter":
        for name, p in policy.parameters_by_name().items():
            if ".lora_" in name or p.requires_grad:
                yield name, p.detach()
        return
    decoder = {id(p) for p in policy.backbone.decoder(policy.model).parameters()}
    yield from merged_weights(policy.model, policy.backbone.weight_name, lambda p: p.requires_grad or id(p) in decoder)


def served_dtype(policy: AudioPolicy, dtype: str) -> str:
    """Return the dtype of vLLM's weights; its own `auto` would turn float32 into bfloat16."""
    if dtype != "auto":
        return dtype
    return str(policy.model.config.dtype or torch.float32).removeprefix("torch.")


def load_checked(weights: Weights, parameters: Mapping[str, Tensor], call: Callable[..., object]) -> None:
    """Load weights a bucket at a time: `call(method, *arguments)` calls the methods `audiorl_…` of vLLM's workers.

    Raises ValueError for a weight that is not in `parameters` or has another shape, and for missing ones as
    `check_together` does.
    """
    names: set[str] = set()

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named(weights):
            check_weight(name, tensor, parameters, "weights for vLLM")
            names.add(name)
            yield name, tensor.detach()

    call("audiorl_begin")
    try:
        for bucket in buckets(checked(), BUCKET):
            call("audiorl_load", bucket)
        check_together(names, parameters)
        call("audiorl_replace_adapter")
    finally:
        call("audiorl_end")


def check_together(names: Iterable[str], all_names: Iterable[str]) -> None:
    """Raise ValueError where `names` holds a part of a module's weights, of those of several that vLLM fuses, or of an
    adapter's matrices."""

    def group(name: str) -> str:
        if ".lora_" in name:
            return "adapter"
        parent, _, last = name.rpartition(".")[0].rpartition(".")
        return f"{parent}.{FUSED.get(last, last)}"

    sent = set(names)
    groups = {group(name) for name in sent}
    for name in all_names:
        if name not in sent and group(name) in groups:
            raise ValueError(f"weights for vLLM: {name!r} is missing, but others come that it is kept together with")

"""Weights that vLLM keeps in one tensor, and that must be sent together."""

from __future__ import annotations

from collections.abc import Iterable

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Linears that vLLM keeps in one: their weights must come together."""


def check_together(names: Iterable[str], all_names: Iterable[str]) -> None:
    """Raise ValueError where `names` holds a part of a module's weights, of those of several that vLLM fuses, or of an
    adapter's matrices."""
    sent = set(names)
    groups = {_group(name) for name in sent}
    for name in all_names:
        if name not in sent and _group(name) in groups:
            raise ValueError(f"weights for vLLM: {name!r} is missing, but others come that it is kept together with")


def _group(name: str) -> str:
    if ".lora_" in name:
        return "adapter"
    module = name.rpartition(".")[0]
    parent, _, last = module.rpartition(".")
    return f"{parent}.{FUSED.get(last, last)}"

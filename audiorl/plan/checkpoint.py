"""The files of a run's checkpoints, their sizes, and the rank that writes each, counted on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from audiorl.models import AudioPolicy
from audiorl.models.lora import NON_LORA_WEIGHTS
from audiorl.plan.layout import BYTES, Layout
from audiorl.run.checkpoint import state_file
from audiorl.run.pieces import even_range, row_range

SHARD_BYTES = 50 * 10**9
"""The largest file of a model's folder that transformers writes."""


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint. `bytes`: of its tensors; its header and the small files of the model's folder are not
    counted."""

    name: str
    rank: int
    """The trainer that writes it, of files of `trainer-critic` the critic; it holds a copy in CPU memory meanwhile."""
    bytes: int


def checkpoint_files(policy: AudioPolicy, layout: Layout) -> list[SavedFile]:
    """The files of each checkpoint of a policy, which may be on the device meta, with an AdamW of float32 or 16 bit."""
    named = policy.parameters_by_name()
    trained = {name: p for name, p in named.items() if p.requires_grad}
    wide = BYTES[layout.dtype]
    if policy.adapter is not None:
        adapters = sum(p.numel() for name, p in trained.items() if ".lora_" in name)
        others = sum(p.numel() for name, p in trained.items() if ".lora_" not in name)
        files = [SavedFile("adapter_model.safetensors", 0, (wide if layout.zero else 4) * adapters)]
        files += [SavedFile(NON_LORA_WEIGHTS, 0, wide * others)] if others else []
    else:
        copied = sum(tensor.bytes for tensor in policy.source.copied.values())
        files = _model_files(wide * sum(p.numel() for p in named.values()) + copied)
    inside = {id(p) for layer in policy.backbone.decoder(policy.model).layers for p in layer.parameters()}
    ranks = layout.trainers

    def critic_bytes(rank: int, ranks: int) -> int:
        """Of its trunk and optimizer; the head on top is small."""
        unread = {id(policy.backbone.head(policy.model).weight)}
        trunk = {name: p for name, p in trained.items() if id(p) not in unread}
        weights = wide * _share({n: p.numel() for n, p in trunk.items()}, rank, ranks)
        return weights + _optimizer_bytes(trunk, inside, layout, rank, ranks)

    for rank in range(ranks):
        state = _optimizer_bytes(trained, inside, layout, rank, ranks)
        whole = {name: p.numel() for name, p in trained.items()}
        if layout.ema:
            state += 4 * _share(whole, rank, ranks)
        if layout.critic == "own":
            state += critic_bytes(rank, ranks)
        files.append(SavedFile(state_file(rank, ranks), rank, state))
    if layout.critic == "separate":
        critics = layout.critic_gpus
        files += [
            SavedFile(state_file(k, critics, "trainer-critic"), k, critic_bytes(k, critics)) for k in range(critics)
        ]
    return files


def _model_files(total: int) -> list[SavedFile]:
    count = max(-(-total // SHARD_BYTES), 1)
    if count == 1:
        return [SavedFile("model.safetensors", 0, total)]
    return [
        SavedFile(f"model-{k + 1:05d}-of-{count:05d}.safetensors", 0, min(total - k * SHARD_BYTES, SHARD_BYTES))
        for k in range(count)
    ]


def _optimizer_bytes(trained: Mapping[str, Tensor], inside: set[int], layout: Layout, rank: int, ranks: int) -> int:
    """Two moments of each number, and a float32 copy of those of 16 bit where there is one."""
    flat, total = sum(p.numel() for p in trained.values()), 0
    for name, p in trained.items():
        low = BYTES[layout.dtype] < 4 and (layout.zero > 0 or ".lora_" not in name)
        copied = low and (layout.master_weights or layout.zero > 0)
        each = 12 if copied else 2 * (2 if low else 4)
        if layout.fsdp:
            start, stop = row_range(p.shape, rank, ranks) if id(p) in inside else even_range(p.numel(), rank, ranks)
        elif layout.zero == 3:
            start, stop = even_range(p.numel(), rank, ranks)
        elif layout.zero:  # one flat buffer of all trained weights
            start, stop = 0, p.numel()
        else:
            start, stop = p.numel() * rank // ranks, p.numel() * (rank + 1) // ranks
        total += each * (stop - start)
    if layout.zero in (1, 2):
        first, last = even_range(flat, rank, ranks)
        return total // flat * (last - first) if flat else 0
    return total


def _share(numels: Mapping[str, int], rank: int, ranks: int) -> int:
    """Numbers that a rank writes of tensors that every rank holds."""
    return sum(n * (rank + 1) // ranks - n * rank // ranks for n in numels.values())

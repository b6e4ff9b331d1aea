"""The optimizer of a run: plain AdamW, DeepSpeed ZeRO or FSDP2; and backward passes that suit each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from audiorl.algos.varlen import Spans
from audiorl.config import OptimConfig
from audiorl.config.distributed import current
from audiorl.distributed.local import World
from audiorl.models import AudioPolicy
from audiorl.models.attention import emulates_bfloat16
from audiorl.models.layers import use_working_copies
from audiorl.models.value import ValueModel
from audiorl.plan.memory import ATTENTION, ROOM, PackedRow, Precision, layers_again
from audiorl.plan.models import count
from audiorl.train.optim.adamw import Optimizer

_log = logging.getLogger(__name__)
BF16_WIDTH = 512
"""From this width of the decoder on, a CPU with AMX updates and decodes faster in bfloat16 (`bench/precision.py`)."""


def slow_precision(policy: AudioPolicy, capabilities: Mapping[str, object]) -> str:
    """Say what to change where such a CPU would compute this policy faster in the other precision; else nothing."""
    head = policy.backbone.head(policy.model).weight
    if head.device.type != "cpu":
        return ""
    in_float32 = head.dtype == torch.float32 and not policy.config.autocast
    if in_float32 and capabilities.get("amx_bf16") and head.shape[1] >= BF16_WIDTH:
        return "training computes in float32; this CPU has AMX, so that --model.autocast (bfloat16) is faster"
    if not in_float32 and head.dtype != torch.float16 and emulates_bfloat16(capabilities):
        return (
            "training computes in bfloat16, for which this CPU has no instructions: it may take tens of times as long "
            "as in float32; leave --model.autocast out and set --model.dtype float32"
        )
    return ""


def checkpoint_what_does_not_fit(
    policy: AudioPolicy, optimizer: Optimizer, free: Callable[[torch.device], float] | None = None
) -> None:
    """With `gradient_checkpointing` of "auto", let each pass keep as many layers as the free memory holds.

    `free` returns the free bytes of a device. Of what the planner counts nine tenths are used: memory is lost between
    allocations. A trained audio encoder keeps what the planner only estimates, so that there all layers are computed
    again, as they are next to a critic's graph.
    """
    config = policy.config
    if config.gradient_checkpointing != "auto" or config.audio == "full":
        return
    shape, held = count(policy).shape, policy.backbone.head(policy.model).weight.element_size()
    precision, attention = Precision(held, 2 if config.autocast else held, 4), ATTENTION[config.attention]
    measure = free or _free_memory

    def again(spans: Spans, predicted: int) -> int:
        seen = [(end - start, end - start + above_end - above) for start, end, above, above_end in spans if above_end]
        pairs = sum(queries * keys for queries, keys in seen)
        row = PackedRow(spans[-1][1], predicted, sum(keys for _, keys in seen), pairs)
        room = ROOM * measure(policy.device) - optimizer.pending_bytes()
        return layers_again(shape, row, precision, attention, room)

    policy.layers_again = again


def _free_memory(device: torch.device) -> float:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def optimizer_for(model: AudioPolicy | ValueModel, config: OptimConfig, total_steps: int, world: World) -> Optimizer:
    """Make what trains `model` in this process's runtime, after all copies of the model that are wanted."""
    runtime = current()
    if world.rank == 0 and isinstance(model, AudioPolicy):
        advice = slow_precision(model, torch.cpu.get_capabilities())
        if advice:
            _log.warning(advice)
    if runtime.sharded:  # copies of whole weights would undo it, and shards change behind autograd's back
        use_working_copies((model.trunk if isinstance(model, ValueModel) else model).model, on=False)
    if runtime.fsdp:
        from audiorl.train.optim.fsdp import FsdpOptimizer

        return FsdpOptimizer(model, config, total_steps, world)
    if not runtime.zero:
        optimizer = Optimizer(model.trainable(), config, total_steps, world)
        if isinstance(model, AudioPolicy) and model.device.type == "cuda":
            checkpoint_what_does_not_fit(model, optimizer)
        return optimizer
    from audiorl.train.optim.zero import ZeroOptimizer

    return ZeroOptimizer(model, config, total_steps, world, runtime.zero, runtime.offload)


def backward(loss: Tensor, *optimizers: Optimizer) -> None:
    """Add a micro-batch's gradients; `optimizers` are all that train a part of what `loss` depends on."""
    (loss * optimizers[0].loss_scale).backward()
    for optimizer in optimizers:
        optimizer.reduce()


def idle_passes(micro_batches: int, world: World, *optimizers: Optimizer) -> int:
    """Return how many passes without a loss this rank must run after its micro-batches; called before the first."""
    if not any(optimizer.every_pass for optimizer in optimizers):
        return 0
    return max(world.gather(micro_batches)) - micro_batches

"""The optimizer of a run: plain AdamW, DeepSpeed ZeRO or FSDP2; and backward passes that suit each."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from audiorl.config import OptimConfig
from audiorl.config.distributed import current
from audiorl.distributed.local import World
from audiorl.models import AudioPolicy
from audiorl.models.attention import emulates_bfloat16
from audiorl.models.value import ValueModel
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


def optimizer_for(model: AudioPolicy | ValueModel, config: OptimConfig, total_steps: int, world: World) -> Optimizer:
    """Make what trains `model` in this process's runtime, after all copies of the model that are wanted."""
    runtime = current()
    if world.rank == 0 and isinstance(model, AudioPolicy):
        advice = slow_precision(model, torch.cpu.get_capabilities())
        if advice:
            _log.warning(advice)
    if runtime.fsdp:
        from audiorl.train.optim.fsdp import FsdpOptimizer

        return FsdpOptimizer(model, config, total_steps, world)
    if not runtime.zero:
        return Optimizer(model.trainable(), config, total_steps, world)
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

"""The optimizer of a run: plain AdamW, or DeepSpeed ZeRO; and backward passes that suit either."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from audiorl.config import OptimConfig
from audiorl.models import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.runtime.config import current
from audiorl.runtime.world import World
from audiorl.train.adamw import Optimizer

if TYPE_CHECKING:
    from audiorl.train.zero import ZeroOptimizer


def optimizer_for(
    model: AudioPolicy | ValueModel, config: OptimConfig, total_steps: int, world: World
) -> Optimizer | ZeroOptimizer:
    """What trains `model` in this process's runtime. Made after all copies of the model that are wanted."""
    runtime = current()
    if not runtime.zero:
        return Optimizer(model.trainable(), config, total_steps, world)
    from audiorl.train.zero import ZeroOptimizer

    return ZeroOptimizer(model, config, total_steps, world, runtime.zero, runtime.offload)


def backward(loss: Tensor, *optimizers: Optimizer | ZeroOptimizer) -> None:
    """Add a micro-batch's gradients; `optimizers` are all that train a part of what `loss` depends on."""
    (loss * optimizers[0].loss_scale).backward()
    for optimizer in optimizers:
        optimizer.reduce()


def idle_passes(micro_batches: int, world: World, *optimizers: Optimizer | ZeroOptimizer) -> int:
    """How many passes without a loss this rank must run after its micro-batches. Asked before the first of them."""
    if not any(optimizer.every_pass for optimizer in optimizers):
        return 0
    return max(world.gather(micro_batches)) - micro_batches

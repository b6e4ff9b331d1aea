"""The optimizer of a run: plain AdamW, DeepSpeed ZeRO or FSDP2; and backward passes that suit each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from audiorl.algos.varlen import Spans
from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.config.checks import TOKENS, pass_tokens
from audiorl.config.distributed import current
from audiorl.distributed.local import World, free_bytes
from audiorl.models import AudioPolicy, FlowPolicy, TrainedPolicy
from audiorl.models.attention import emulates_bfloat16
from audiorl.models.layers import use_working_copies
from audiorl.models.value import ValueModel
from audiorl.train.optim.adamw import Optimizer

_log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C", bound=Any)  # A config with `micro_batch_tokens`
FEWEST = 512
"""Tokens of a pass, below which none is halved."""
BF16_WIDTH = 512
"""From this width of the decoder on, a CPU with AMX updates and decodes faster in bfloat16 (`bench/precision.py`)."""


def choose_precision(policy: AudioPolicy, capabilities: Mapping[str, object]) -> str:
    """Say what to change where such a CPU would compute this policy faster in the other precision; else nothing.

    On a GPU, let float32 products run in TF32 unless the program has chosen a precision, and say so.
    """
    head = policy.backbone.head(policy.model).weight
    in_float32 = head.dtype == torch.float32 and not policy.config.autocast
    if head.device.type == "cuda" and in_float32 and torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision("high")
        return (
            "float32 products run in TF32 on this GPU, with 10 bits of mantissa; --model.autocast (bfloat16) is faster,"
            " and NVIDIA_TF32_OVERRIDE=0 in the environment keeps them exact"
        )
    if head.device.type != "cpu":
        return ""
    if in_float32 and capabilities.get("amx_bf16") and head.shape[1] >= BF16_WIDTH:
        return "training computes in float32; this CPU has AMX, so that --model.autocast (bfloat16) is faster"
    if not in_float32 and head.dtype != torch.float16 and emulates_bfloat16(capabilities):
        return (
            "training computes in bfloat16, for which this CPU has no instructions: it may take tens of times as long "
            "as in float32; leave --model.autocast out and set --model.dtype float32"
        )
    return ""


def checkpoint_what_does_not_fit(
    policy: AudioPolicy, optimizer: Optimizer, free: Callable[[torch.device], float] = free_bytes
) -> None:
    """With `gradient_checkpointing` of "auto", let each pass keep as many layers as the free memory holds.

    `free` returns the free bytes of a device. Of what the planner counts nine tenths are used: memory is lost between
    allocations. A trained audio encoder keeps what the planner only estimates, so that there all layers are computed
    again, as they are next to a critic's graph.
    """
    config = policy.config
    if config.gradient_checkpointing != "auto" or config.audio == "full":
        return
    from audiorl.plan.memory import ATTENTION, ROOM, PackedRow, Precision, layers_again
    from audiorl.plan.models import count

    shape, held = count(policy).shape, policy.backbone.head(policy.model).weight.element_size()
    precision, attention = Precision(held, 2 if config.autocast else held, 4), ATTENTION[config.attention]

    def again(spans: Spans, predicted: int) -> int:
        seen = [(end - start, end - start + above_end - above) for start, end, above, above_end in spans if above_end]
        pairs = sum(queries * keys for queries, keys in seen)
        row = PackedRow(spans[-1][1], predicted, sum(keys for _, keys in seen), pairs)
        room = ROOM * free(policy.device) - optimizer.pending_bytes()
        return layers_again(shape, row, precision, attention, room)

    policy.layers_again = again


def optimizer_for(model: TrainedPolicy | ValueModel, config: OptimConfig, total_steps: int, world: World) -> Optimizer:
    """Make what trains `model` in this process's runtime, after all copies of the model that are wanted."""
    runtime = current()
    if isinstance(model, AudioPolicy):
        advice = choose_precision(model, torch.cpu.get_capabilities())
        if advice and world.rank == 0:
            _log.warning(advice)
    if isinstance(model, FlowPolicy):
        if runtime.zero or runtime.fsdp:
            raise ValueError("runtime.zero and runtime.fsdp: every process holds a whole flow; leave them out")
        return Optimizer(model.trainable(), config, total_steps, world)
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


def with_pass_tokens(config: C, policy: TrainedPolicy, optim: OptimConfig, max_tokens: int = 512) -> C:
    """Return the config with `micro_batch_tokens` as given, and where it is None what the policy's GPU holds.

    max_tokens: of an answer. On a CPU None stays.
    """
    if config.micro_batch_tokens is not None or policy.device.type != "cuda":
        return config
    if isinstance(policy, FlowPolicy):
        return replace(config, micro_batch_tokens=TOKENS)
    from audiorl.plan.memory import GIB, PlanOptions, largest_pass  # which import every family of models
    from audiorl.plan.models import count

    rl = config if isinstance(config, RLConfig) else RLConfig(kl_beta=0.0)
    total = torch.cuda.get_device_properties(policy.device).total_memory / GIB
    options = PlanOptions(
        runtime=current(), model=policy.config, rl=rl, optim=optim,
        sampling=SamplingConfig(max_new_tokens=max_tokens), gpu_gib=total,
    )  # fmt: skip
    try:
        tokens = largest_pass(count(policy), options)
    except ValueError as error:
        _log.warning("micro_batch_tokens: %d, as on a CPU; no plan of the memory: %s", TOKENS, error)
        return replace(config, micro_batch_tokens=TOKENS)
    _log.info("micro_batch_tokens: %d by the plan for a GPU of %.0f GiB", tokens, total)
    return replace(config, micro_batch_tokens=tokens)


class PassWorker(Protocol):
    """What runs passes of `pass_tokens(config)` tokens. `given`: the config before `with_pass_tokens`."""

    config: Any
    given: Any
    world: World


def within_memory(worker: PassWorker, run: Callable[[], T]) -> T:
    """Return what `run` gives. Where the GPU's memory does not hold it, run it again with half as many tokens a pass.

    The user's own number stays, as do few tokens, and those of several ranks, which must run equally many passes. `run`
    must change nothing before it has all its memory.
    """
    while True:
        try:
            return run()
        except torch.OutOfMemoryError:
            tokens = pass_tokens(worker.config)
            if worker.given.micro_batch_tokens is not None or worker.world.size > 1 or tokens < 2 * FEWEST:
                raise
        torch.cuda.empty_cache()  # after the block above: the error holds the tensors of the pass
        _log.warning("micro_batch_tokens: %d did not fit into the GPU's memory, %d from now on", tokens, tokens // 2)
        worker.config = replace(worker.config, micro_batch_tokens=tokens // 2)


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

"""DeepSpeed ZeRO (Rajbhandari et al., arXiv 1910.02054) behind the interface of `train.optim.Optimizer`.

DeepSpeed expects every rank to run the same modules in the same order; of rollouts one rank's micro-batch has audio,
another's has none. So gradients are reduced in a fixed order, not as they are computed: a decoder layer's when its
backward pass is over, all others after the whole pass. From stage 2 on that is after every micro-batch, and all ranks
run equally many (`every_pass`). At stage 3 weights are partitioned only during an update, when the decoder's layers are
gathered one by one; embeddings, heads and the audio encoder stay gathered, because passes also use them outside of
their own forward. Between updates every rank holds all weights: it generates, evaluates and saves independently.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from audiorl.config import OptimConfig
from audiorl.distributed.local import World
from audiorl.distributed.torchrun import backend
from audiorl.errors import install
from audiorl.models.policy import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import StatePiece, read_range
from audiorl.train.batches import check_weights
from audiorl.train.optim.adamw import MASTER, Optimizer, ShardedModules, adamw, check_shape, learning_rate

BUCKET = 5 * 10**8  # Maximum number of elements reduced or gathered at once; a smaller model is one bucket
MOMENTS = ("exp_avg", "exp_avg_sq")
_HOLDER = "audiorl"
_LINEAR = nn.functional.linear
"""torch's own. At stage 3 DeepSpeed replaces it, for all modules, by one that saves no weight for the backward pass."""


class ZeroOptimizer(Optimizer):
    """AdamW with its state (1), the gradients (2) and the weights (3) partitioned over the ranks of `world`.

    Copy the model before, where copies are needed: at stage 3 its modules cannot be copied. `close` restores the model.
    Weights without a gradient on any rank get one of zeros, where `Optimizer` would not update them.
    """

    def __init__(
        self,
        model: AudioPolicy | ValueModel,
        config: OptimConfig,
        total_steps: int,
        world: World,
        stage: int,
        offload: bool = False,
    ):
        deepspeed = _deepspeed()
        if isinstance(model, ValueModel) and not model.shared and stage == 3:
            _copy_frozen_weights(model.trunk.model)
        modules = ShardedModules.of(model)
        self._parameters = self._updated = dict(modules.trained)
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._config, self._total_steps, self._world, self._stage = config, total_steps, world, stage
        self.updates = 0
        self.every_pass = stage >= 2
        self.loss_scale = float(world.size)  # DeepSpeed divides gradients by it
        # DeepSpeed adds attributes, which `close` removes.
        self._modules_before = [(m, dict(m.__dict__)) for m in modules.module.modules()]
        self._weights_before = [(p, set(p.__dict__)) for p in modules.module.parameters()]
        if stage == 3:
            for layer in modules.layers:
                deepspeed.utils.set_z3_leaf_module(layer, True)  # gathered whole, even where a pass uses a part of it
        self._bfloat16 = any(p.dtype == torch.bfloat16 for p in modules.module.parameters())
        size = sum(p.numel() for p in modules.module.parameters())
        self._engine, *_ = deepspeed.initialize(
            model=modules.module,
            # DeepSpeedCPUAdam would be compiled at the first start; torch's fused form needs no compiler.
            optimizer=adamw(self._parameters, config, fused=offload),
            config=_config(stage, offload, self._bfloat16, config.max_grad_norm, min(size + -size % 64, BUCKET)),
        )
        self._zero = self._engine.optimizer
        # DeepSpeed's hooks reduce gradients as they are computed, and recognise a pass by a call of the whole module.
        calls = (self._engine.module_forward_pre_hook, self._engine.module_forward_post_hook)
        for hook in (*calls, *self._zero._grad_acc_hooks, *getattr(self._zero, "_leaf_module_hooks", ())):
            hook.remove()
        self._reduced: set[int] = set()
        self._hooks = []
        # The first layer's inputs may need no gradient, and its hook then would come too early.
        for layer in modules.layers[1:] if self.every_pass else ():
            trained = [p for p in layer.parameters() if id(p) in self._names]
            self._hooks.append(layer.register_full_backward_hook(lambda *_, trained=trained: self._reduce(trained)))
        self._all = list(dict.fromkeys(modules.module.parameters()))
        self._non_layer = list(dict.fromkeys(modules.non_layer))
        self._gather(self._all)

    # -- an update -------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Begin an update."""
        self._zero.zero_grad(set_to_none=True)
        self._reduced.clear()
        self._zero.set_gradient_accumulation_boundary(False)
        if self._stage == 3:
            # Otherwise a weight that the first micro-batch does not use would keep the last update's gradient.
            self._zero.grad_partitions_flat_buffer.zero_()
            self._zero.micro_step_id = 1
            non_layer_ids = {id(p) for p in self._non_layer}
            self._release([p for p in self._all if id(p) not in non_layer_ids])

    def reduce(self) -> None:
        """Reduce gradients after the backward pass of a micro-batch, on all ranks."""
        if self.every_pass:
            self._reduce_rest(everything=False)

    def gather_gradients(self) -> None:
        """Reduce, after the last pass, the gradients since `reduce`, such as those of an encoder that ran once."""
        if self.every_pass:
            self._reduce_rest(everything=False)
            self._zero.finalize_gradient_accumulation_boundary()
        else:
            self._zero.set_gradient_accumulation_boundary(True)
            self._reduce_rest(everything=True)

    def clip(self) -> Tensor:
        """Return 0: DeepSpeed clips in its step."""
        return torch.zeros(())

    def step(self, norm: float | None = None) -> dict[str, float]:
        """Update once from the accumulated gradients. Returns grad_norm (before clipping) and lr.

        Raises FloatingPointError, on all ranks and before a weight changes, for gradients that are not finite.
        """
        lr = learning_rate(self.updates, self._total_steps, self._config)
        self._zero.set_lr(lr)
        self._zero.step()
        self._zero.zero_grad(set_to_none=True)
        self._gather(self._all)
        if self._zero.overflow:
            raise FloatingPointError("the norm of the gradient is not finite; this update changed no weight")
        check_weights(self._parameters, lr)
        self.updates += 1
        return {"grad_norm": float(self._zero._global_grad_norm), "lr": lr}

    def _reduce_rest(self, everything: bool) -> None:
        """Reduce what some rank has a gradient for, or `everything`, and what this pass has not reduced yet."""
        weights = list(self._parameters.values())
        present = torch.tensor([p.grad is not None or id(p) in self._reduced for p in weights], dtype=torch.int32)
        ranks_with_gradient = self._world.sum(present.to(weights[0].device)).tolist()
        self._reduce([p for p, n in zip(weights, ranks_with_gradient, strict=True) if n or everything])
        with torch.no_grad():
            if self._stage < 3:
                self._zero.setup_buckets()
            self._zero.overlapping_partition_gradients_reduce_epilogue()
            if self._stage == 3:
                self._zero.backward_epilogue()
        self._reduced.clear()

    @torch.no_grad()
    def _reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Hand gradients to DeepSpeed, in this order on all ranks."""
        for p in parameters:
            if id(p) in self._reduced:
                continue
            self._reduced.add(id(p))
            if p.grad is None:  # also of a partitioned weight, whose tensor is empty: torch compares the sizes
                shape, data = self._shapes[self._names[id(p)]], p.data
                p.data = data.new_zeros(1).expand(shape)
                p.grad = torch.zeros(shape, dtype=p.dtype, device=p.device)
                p.data = data
            if self._stage == 3:
                self._zero.reduce_ready_partitions_and_remove_grads(p)
            else:
                self._zero.setup_buckets()
                self._zero.reduce_ready_partitions_and_remove_grads(p, 0)

    # -- gathered weights ---------------------------------------------------------------------------------------------

    def _gather(self, parameters: Sequence[Any]) -> None:
        """Gather weights until they are released."""
        if self._stage < 3:
            return
        parts = [p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"]
        if parts:
            parts[0].all_gather(parts)
        for p in parameters:
            p.ds_active_sub_modules.add(_HOLDER)

    def _release(self, parameters: Sequence[Any], changed: bool = False) -> None:
        """Keep only this rank's partition. `changed`: the gathered weights were written; partition them again."""
        for p in parameters:
            p.ds_active_sub_modules.discard(_HOLDER)
        if parameters:
            parameters[0].partition(parameters, has_been_updated=changed)

    def close(self) -> None:
        """Restore the model: whole weights, no hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._stage == 3:
            setattr(nn.functional, "linear", _LINEAR)  # noqa: B010
            for p in self._all:
                p.data = p.data.clone()
        self._engine.destroy()
        # When the engine is freed it destroys its optimizer once more, and the weights may be another engine's by then.
        self._engine.optimizer = None
        for module, attributes in self._modules_before:
            for name in set(module.__dict__) - set(attributes):
                del module.__dict__[name]
            module.__dict__["_parameters"] = attributes["_parameters"]
        for parameter, names in self._weights_before:
            for name in set(parameter.__dict__) - names:
                del parameter.__dict__[name]
        del self._engine, self._zero

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor | StatePiece]:
        """Return `Optimizer.state` of this rank's partition; of bfloat16 weights also `master.NAME` in float32."""
        out: dict[str, Tensor | StatePiece] = {"updates": torch.tensor(self.updates)}
        steps = [slot["step"] for _, slot in self._slots() if slot]
        # A weight that no gradient ever reached has moments of zero, where `Optimizer` has none.
        weights = list(self._parameters.items())
        moving = [bool(steps) and any(bool(x.any()) for _, x in self._own(p, "exp_avg_sq")) for _, p in weights]
        device = weights[0][1].device
        on_ranks = self._world.sum(torch.tensor(moving, dtype=torch.int32, device=device)).tolist()
        for (name, p), count in zip(weights, on_ranks, strict=True):
            shape = tuple(self._shapes[name])
            for key in (*(MOMENTS if count else ()), *([MASTER] if self._bfloat16 else ())):
                for start, numbers in self._own(p, None if key == MASTER else key):
                    out[f"{key}.{name}"] = StatePiece(numbers.detach(), start, shape)
            if count:
                out[f"step.{name}"] = torch.as_tensor(steps[0])
        return out

    def load(self, state: Mapping[str, Tensor], where: str) -> None:
        """Take the model's weights as they are now, and `state` of any kind of sharding and number of ranks.

        All ranks call it.
        """
        self.updates = int(state["updates"])
        if self._stage == 3:
            self._release(self._all, changed=True)
            self._gather(self._all)
        self._zero.refresh_fp32_params()
        for name, shape in self._shapes.items():
            check_shape(state, name, shape, where)
        steps = [float(state[key]) for key in state if key.startswith("step.")]
        if steps:
            for flat, slot in self._slots():
                slot |= {key: torch.zeros_like(flat) for key in MOMENTS} | {"step": torch.tensor(max(steps))}
            if self._stage < 3:
                self._zero._lazy_init_hp_params_optimizer_state()
        for name, p in self._parameters.items():
            for key in (*MOMENTS, MASTER):
                if f"{key}.{name}" in state and (self._bfloat16 or key != MASTER):
                    for start, numbers in self._own(p, None if key == MASTER else key):
                        numbers.copy_(read_range(state, f"{key}.{name}", start, start + numbers.numel()))

    def _own(self, p: Any, key: str | None) -> Iterator[tuple[int, Tensor]]:
        """This rank's float32 numbers of a weight (None) or of its moment `key`, in place, and where they begin."""
        if self._stage == 3:
            size = math.ceil(p.ds_numel / self._world.size)  # the last partition is padded
            start = size * self._world.rank
            count = min(size, p.ds_numel - start)
            if count > 0:
                partition, _ = self._zero._get_fp32_opt_state_partition(p, False, key)
                yield start, partition.view(-1)[:count]
        elif p._hp_mapping is not None:  # otherwise its numbers are on other ranks
            yield p._hp_mapping.lp_fragment_address.start, p._hp_mapping.get_hp_fragment(key)

    def _slots(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """This rank's flat parts of the float32 weights, and AdamW's state of each."""
        zero = self._zero
        for flat in zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups:
            yield flat, zero.optimizer.state[flat]


def _copy_frozen_weights(module: nn.Module) -> None:
    """Replace frozen weights by copies: another model that shares them may be partitioned as well."""
    copies: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and not p.requires_grad:
                copies.setdefault(id(p), nn.Parameter(p.detach().clone(), requires_grad=False))
                part._parameters[name] = copies[id(p)]


def _config(stage: int, offload: bool, low: bool, max_grad_norm: float, bucket: int) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": low, "check_grad_overflow": True},
    }


_group: Any = None


def _deepspeed() -> Any:
    """Return the package, initialised in torch's process group; without one, in a new group of this process alone."""
    global _group
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device() if cuda else 0))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ValueError(f"runtime.zero needs DeepSpeed: {install('scale')}") from error
    if not cuda:  # otherwise it compiles a kernel for gloo at first use, with a C++ compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    # DeepSpeed keeps the first process group that it was initialised with, even after that group was destroyed.
    if _group is not None and _group is not dist.group.WORLD:
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._release_process_group_references()
    _group = dist.group.WORLD
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    return deepspeed

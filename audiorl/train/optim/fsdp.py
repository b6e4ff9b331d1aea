"""FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al., arXiv 2304.11277) behind the interface of `Optimizer`.

In an update FSDP2 gathers a decoder layer's weights for its passes and reduces its gradients after every micro-batch.
Embeddings, heads and the audio encoder stay whole, because passes also use them outside of their own forward; their
gradients and AdamW state are divided, each weight into one range of its numbers for every rank. Between updates every
rank holds all weights, without FSDP2's hooks: ranks generate, evaluate and save independently. A weight without a
gradient on some ranks (no audio, no frames) gets zeros there; one that no rank had a gradient for is not updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from audiorl.config import OptimConfig
from audiorl.distributed.local import World, gradient_buckets
from audiorl.distributed.torchrun import backend
from audiorl.models.policy import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import StatePiece, even_range, read_range, row_range
from audiorl.train.batches import check_weights
from audiorl.train.optim.adamw import MASTER, Optimizer, ShardedModules, check_shape


class FsdpOptimizer(Optimizer):
    """AdamW on this rank's shard of every weight.

    Copy the model before, where copies are needed: its layers cannot be copied until `close` restores them.
    """

    every_pass = True

    def __init__(self, model: AudioPolicy | ValueModel, config: OptimConfig, total_steps: int, world: World):
        if not dist.is_initialized():
            dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
        modules = ShardedModules.of(model)
        self._model, self._size = model, world.size
        self._shapes = {name: p.shape for name, p in modules.trained.items()}
        inside = {id(p) for layer in modules.layers for p in layer.parameters()}
        self._whole = {name: p for name, p in modules.trained.items() if id(p) not in inside}
        """Trained weights outside of the layers, by name."""
        self._layers = _Layers(modules)
        ranges = {name: even_range(p.numel(), world.rank, world.size) for name, p in self._whole.items()}
        # A range of a weight's numbers, in the weight's own memory.
        shards = {n: nn.Parameter(p.detach().view(-1)[slice(*ranges[n])]) for n, p in self._whole.items()}
        self._sharded: dict[str, Any] = {}
        """Trained weights of the layers as FSDP2 shards them, by name."""
        self._layers.shard()
        for name, p in model.trainable().items():
            if name in self._shapes and name not in self._whole:
                self._sharded[name] = p
                local: Tensor = p.to_local()  # type: ignore[attr-defined]
                shards[name] = nn.Parameter(local)
                ranges[name] = row_range(p.shape, world.rank, world.size)
        self._starts = {name: start for name, (start, _) in ranges.items()}
        super().__init__({name: shards[name] for name in self._shapes}, config, total_steps, world)
        self._reached: set[str] = set()
        self._layers.unshard()
        for name, p in self._model.trainable().items():
            if name in self._sharded:
                p.register_post_accumulate_grad_hook(lambda _, name=name: self._reached.add(name))

    # -- an update -------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Begin an update: from here on the layers' weights are sharded."""
        self._free_gradients()
        self._layers.reshard()

    def _free_gradients(self) -> None:
        super().zero_grad()
        for p in (*self._whole.values(), *self._sharded.values()):
            p.grad = None
        self._reached.clear()

    def gather_gradients(self) -> None:
        """Make every shard's gradient the sum of all ranks'; that of a weight which no rank has one for stays None."""
        names = list(self._shapes)
        reached = [n in self._reached or (n in self._whole and self._whole[n].grad is not None) for n in names]
        device = next(iter(self._parameters.values())).device
        counts = self._world.sum(torch.tensor(reached, dtype=torch.int32, device=device)).tolist()
        present = [name for name, n in zip(names, counts, strict=True) if n]
        self._reduce([name for name in present if name in self._whole])
        for name in present:
            if name in self._sharded and self._sharded[name].grad is not None:
                self._parameters[name].grad = self._sharded[name].grad.to_local()
        for p in (*self._whole.values(), *self._sharded.values()):
            p.grad = None
        for name in self._masters:
            self._to_master(name)

    def _reduce(self, names: Sequence[str]) -> None:
        for bucket in gradient_buckets(names, self._whole):
            weights = [self._whole[name] for name in bucket]
            # Gradients of 16 bit are summed in float32.
            wide = torch.float32 if weights[0].dtype in (torch.bfloat16, torch.float16) else weights[0].dtype
            flat = [(torch.zeros_like(p) if p.grad is None else p.grad).to(wide).reshape(-1) for p in weights]
            by_rank = [nn.functional.pad(g, (0, -len(g) % self._size)).view(self._size, -1) for g in flat]
            columns = torch.cat(by_rank, 1)
            total = columns.new_empty(columns.shape[1])
            dist.reduce_scatter_single(total, columns.view(-1))
            for name, own in zip(bucket, total.split([-(-p.numel() // self._size) for p in weights]), strict=True):
                shard = self._parameters[name]
                shard.grad = own[: shard.numel()].to(shard.dtype)

    def clip(self) -> Tensor:
        shards = list(self._updated.values())
        squares = [p.grad.square().sum(dtype=torch.float64) for p in shards if p.grad is not None]
        own = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=shards[0].device)
        norm = self._world.sum(own).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(shards, self._config.max_grad_norm, norm)
        return norm

    def step(self, norm: float | None = None) -> dict[str, float]:
        """Update, after which every rank holds all weights. Raises FloatingPointError on all ranks."""
        try:
            metrics = super().step(norm)
        finally:
            self._free_gradients()
            self._gather()
        check_weights({n: p for n, p in self._model.trainable().items() if n in self._shapes}, metrics["lr"])
        return metrics

    @torch.no_grad()
    def _gather(self) -> None:
        """Give every rank all weights."""
        for bucket in gradient_buckets(list(self._whole), self._whole):
            weights = [self._whole[name] for name in bucket]
            sizes = [-(-p.numel() // self._size) for p in weights]
            shards = [self._parameters[name].detach() for name in bucket]
            padded = [nn.functional.pad(x, (0, size - x.numel())) for x, size in zip(shards, sizes, strict=True)]
            own = torch.cat(padded)
            columns = own.new_empty(self._size * len(own))
            dist.all_gather_single(columns, own)
            for p, part in zip(weights, columns.view(self._size, -1).split(sizes, 1), strict=True):
                p.copy_(part.reshape(-1)[: p.numel()].view_as(p))
        self._layers.unshard()

    def close(self) -> None:
        """Restore the model: whole weights, without FSDP2."""
        self._layers.restore()

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor | StatePiece]:
        """Return `Optimizer.state` of this rank's shards: moments and float32 copies are pieces."""
        out = super().state()
        for key, tensor in out.items():
            name = key.partition(".")[2]
            if name in self._shapes and not key.startswith("step.") and isinstance(tensor, Tensor):
                out[key] = StatePiece(tensor.reshape(-1), self._starts[name], tuple(self._shapes[name]))
        return out

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], where: str) -> None:
        """Take the model's weights as they are now, and `state` of any kind of sharding and number of ranks."""
        self._layers.take_weights()
        own = {}
        for key in state:
            name = key.partition(".")[2]
            if name in self._shapes and not key.startswith("step."):
                check_shape(state, name, self._shapes[name], where)
                shard = self._parameters[name]
                numbers = read_range(state, key, self._starts[name], self._starts[name] + shard.numel())
                own[key] = numbers.view_as(shard)
            elif key.partition(".")[0] != MASTER:
                own[key] = state[key]
        super().load(own, where)


class _Layers:
    """The decoder's layers under FSDP2: sharded during updates, whole and without its hooks between them."""

    def __init__(self, modules: ShardedModules):
        self._modules: list[Any] = [] if modules.decoder is None else [*modules.layers, modules.decoder]
        self._managed = [(m, set(m.__dict__)) for root in self._modules[-1:] for m in root.modules()]
        self._hooks: list[Any] = []

    def shard(self) -> None:
        if not self._modules:
            return
        *layers, decoder = self._modules
        device = next(decoder.parameters()).device.type
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        inside = {id(p) for layer in layers for p in layer.parameters()}
        for layer in layers:
            trained = {p.dtype for p in layer.parameters() if p.requires_grad}
            wide = torch.float32 if trained & {torch.bfloat16, torch.float16} else None
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=wide))
            layer.set_gradient_divide_factor(1.0)  # losses are sums over ranks
            layer.set_force_sum_reduction_for_comms(True)
        others = {p for p in decoder.parameters() if id(p) not in inside and not isinstance(p, DTensor)}
        fully_shard(decoder, mesh=mesh, ignored_params=others)  # the root: then layers gather ahead of each other
        decoder.set_reduce_scatter_unused_params(True)
        decoder._get_fsdp_state()._lazy_init()
        for module in self._modules:
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            for group in state._fsdp_param_groups:
                # These would shard the weights again when somebody saves the model.
                hooks = (
                    group._module_to_pre_save_state_dict_hook_handle,
                    group._module_to_pre_load_state_dict_hook_handle,
                )
                for hook in (*hooks[0].values(), *hooks[1].values()):
                    hook.remove()

    def reshard(self) -> None:
        """Free all but this rank's shard, and let passes gather layer by layer."""
        if self._hooks:
            return
        for module in self._modules:
            state = module._get_fsdp_state()
            self._hooks.append(module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(state._post_forward))
            module.reshard()

    def unshard(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self._modules:
            module.unshard()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Make the shards what the whole weights are now."""
        for module in self._modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for p in group.fsdp_params:
                    whole = p.unsharded_param
                    start, stop = row_range(whole.shape, dist.get_rank(), dist.get_world_size())
                    p.sharded_param.to_local().view(-1).copy_(whole.view(-1)[start:stop])

    def restore(self) -> None:
        self.unshard()
        for module in self._modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for p in group.fsdp_params:
                    whole = p.unsharded_param
                    p._setattr_on_modules(nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad))
            module.__class__ = type(module).__mro__[module._orig_cls_mro_index]
        for module, attributes in self._managed:
            for name in set(module.__dict__) - attributes:
                del module.__dict__[name]
        for module in self._modules:
            _module_state_mapping.pop(module, None)
        self._modules = []

"""AdamW with its learning-rate schedule and its state by parameter name; the modules that sharded forms of it gather.

`train.optim.zero` and `train.optim.fsdp` shard it over ranks; `train.optim.steps` chooses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from audiorl.config import OptimConfig
from audiorl.distributed.local import World
from audiorl.models.policy import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import StatePiece, read_shape
from audiorl.train.batches import check_weights, gradient_error


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the rate of update `step` (from 0): linear warm-up over `warmup_steps`, at most half of all updates, then
    the schedule down to 0."""
    warmup = min(config.warmup_steps, total_steps // 2)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    left = (total_steps - step) / max(total_steps - warmup, 1)
    left = min(max(left, 0.0), 1.0)
    return config.lr * (left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


_log = logging.getLogger(__name__)
MASTER = "master"  # the key of float32 weights in a state, next to AdamW's own


def adamw(parameters: Mapping[str, nn.Parameter], config: OptimConfig, fused: bool = False) -> torch.optim.AdamW:
    """Make torch's AdamW. `fused`: one kernel a weight on the CPU, and one for all weights on a GPU."""
    if not parameters:
        raise ValueError("nothing to train: every weight is frozen; set model.audio or model.lora")
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,  # None: torch chooses; False would exclude its form for many tensors
    )


@torch.no_grad()
def lost_updates(parameters: Sequence[nn.Parameter], size: float) -> float:
    """Return the fraction of 16-bit weights, among these, that do not change when `size` is added to them.

    AdamW's first updates are of the size of the learning rate. A large weight is judged by 2²⁰ of its numbers.
    """
    same = total = 0
    for p in parameters:
        if p.dtype in (torch.bfloat16, torch.float16) and p.device.type != "meta":
            some = p.detach().flatten()[: 2**20]
            same += int((some + size == some).sum())
            total += some.numel()
    return same / max(total, 1)


def check_shape(state: Mapping[str, Tensor], name: str, shape: torch.Size, where: str) -> None:
    """Raise ValueError when the state of a weight is of another shape."""
    if f"exp_avg.{name}" in state and read_shape(state, f"exp_avg.{name}") != tuple(shape):
        raise ValueError(f"{where}: optimizer state of {name!r} has another shape; another architecture")


class Optimizer:
    """AdamW over named parameters. `step` clips, refuses gradients that are not finite, and frees them afterwards.

    It updates a float32 copy of 16-bit weights (`OptimConfig.master_weights`) and rounds that to the weights; the
    copies' gradients add up in float32 over the passes of an update. Load other weights into the model before the
    optimizer is made, or with `load`.

    Losses are sums over the ranks of `world`, so their gradients are added up, by `gather_gradients` before a step.
    """

    every_pass = False  # whether all ranks must run equally many micro-batches in an update
    loss_scale = 1.0  # what losses are multiplied with

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, total_steps: int, world: World | None = None
    ):
        self._parameters = dict(parameters)
        self._config, self._total_steps, self._world = config, total_steps, world or World()
        self.updates = 0
        self._masters = {
            name: nn.Parameter(p.detach().float())
            for name, p in self._parameters.items()
            if config.keeps_masters and p.dtype in (torch.bfloat16, torch.float16)
        }
        for name in self._masters:
            p: Any = self._parameters[name]
            _let_go(p)  # of an earlier phase's optimizer
            p.takes_gradient = p.register_post_accumulate_grad_hook(lambda _, name=name: self._to_master(name))
        lost = lost_updates([p for n, p in self._parameters.items() if n not in self._masters], config.lr)
        if lost > 0.01:
            _log.warning(
                f"{100 * lost:.0f} % of the trained 16-bit weights stay as they are under an update of the learning "
                f"rate {config.lr:g}: it is smaller than their spacing; set --optim.master-weights True"
            )
        self._updated = {**self._parameters, **self._masters}
        fused = all(p.device.type in ("cpu", "cuda") for p in self._updated.values())
        self._adamw = adamw(self._updated, config, fused)

    def _to_master(self, name: str) -> None:
        """Add a 16-bit gradient to that of the float32 copy, and free it."""
        p, master = self._parameters[name], self._masters[name]
        if p.grad is not None:
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

    def zero_grad(self) -> None:
        """Free all gradients."""
        for p in (*self._parameters.values(), *self._masters.values()):
            p.grad = None

    def pending_bytes(self) -> int:
        """Return the bytes of gradients and moments that are still to be made in this update."""
        weights = self._updated.values()
        moments = 0 if self._adamw.state else 2 * sum(p.nbytes for p in weights)
        return moments + sum(p.nbytes for p in weights if p.grad is None)

    def reduce(self) -> None:
        """Do what every backward pass needs after it; gradients here wait for `gather_gradients`."""

    def close(self) -> None:
        """End after the last update."""
        for name in self._masters:
            _let_go(self._parameters[name])

    def gather_gradients(self) -> None:
        """Make every gradient the sum of all ranks'."""
        for name in self._masters:
            self._to_master(name)
        self._world.sum_gradients(self._updated)

    def clip(self) -> Tensor:
        """Scale the gradients down to `max_grad_norm`. Returns their total norm before, without waiting for it."""
        return torch.nn.utils.clip_grad_norm_(list(self._updated.values()), self._config.max_grad_norm)

    def check(self, norm: float) -> None:
        """Raise FloatingPointError, naming a weight, for a norm that `clip` gave and that is not finite."""
        if not math.isfinite(norm):
            raise gradient_error(self._updated)

    def step(self, norm: float | None = None) -> dict[str, float]:
        """Update once from the accumulated gradients. Returns grad_norm (before clipping) and lr.

        norm: what `clip` gave, where it was called already.
        """
        if norm is None:
            norm = float(self.clip())
        self.check(norm)
        lr = learning_rate(self.updates, self._total_steps, self._config)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)
        check_weights(self._parameters, lr)
        self.zero_grad()  # nothing needs the gradients any more: free them before the next rollouts are generated
        self.updates += 1
        return {"grad_norm": norm, "lr": lr}

    def state(self) -> dict[str, Tensor | StatePiece]:
        """Return the moments as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, float32 copies of 16-bit weights as
        `master.NAME`, and the number of updates."""
        out: dict[str, Tensor | StatePiece] = {"updates": torch.tensor(self.updates)}
        for name, p in self._updated.items():
            for key, value in self._adamw.state.get(p, {}).items():
                out[f"{key}.{name}"] = value
        return out | {f"{MASTER}.{name}": master.detach() for name, master in self._masters.items()}

    def load(self, state: Mapping[str, Tensor], where: str) -> None:
        """Take over a `state` that was read from the checkpoint `where`. Raises ValueError for another shape."""
        self.updates = int(state["updates"])
        with torch.no_grad():
            for name, master in self._masters.items():  # ZeRO in float32 writes none
                master.copy_(state.get(f"{MASTER}.{name}", self._parameters[name]))
        fused = self._adamw.defaults["fused"]  # then steps are counted where the weights are
        for name, p in self._updated.items():
            own = {key: state[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in state}
            check_shape(state, name, p.shape, where)
            if own:
                self._adamw.state[p] = {
                    k: v.to(p.device if fused else "cpu", copy=True) if k == "step" else v.to(p.device, p.dtype)
                    for k, v in own.items()
                }


def _let_go(p: nn.Parameter) -> None:
    """Let a weight keep its gradients again, which an optimizer took."""
    hook = p.__dict__.pop("takes_gradient", None)
    if hook is not None:
        hook.remove()


class EMA:
    """average ← decay · average + (1 - decay) · weight after each update, in float32; begins as the weights are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self._parameters = dict(parameters)
        self._decay = decay
        self._average = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self._parameters.items():
            self._average[name].lerp_(p.float(), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        return dict(self._average)

    def load(self, state: Mapping[str, Tensor], where: str) -> None:
        if {n: read_shape(state, n) for n in state} != {n: tuple(t.shape) for n, t in self._average.items()}:
            raise ValueError(f"{where}: its moving average is of another architecture")
        self._average = {name: state[name].to(t.device).clone() for name, t in self._average.items()}


@dataclass(frozen=True)
class ShardedModules:
    """The parts of a model that the ranks of a sharded optimizer gather and reduce separately."""

    module: nn.Module
    trained: Mapping[str, nn.Parameter]  # Trained weights by name
    layers: Sequence[nn.Module]  # The decoder's layers
    non_layer: Sequence[nn.Parameter]  # The other weights that a pass uses. An encoder of images is not among them.
    decoder: nn.Module | None  # What holds the layers; None where there are none

    @classmethod
    def of(cls, model: AudioPolicy | ValueModel) -> ShardedModules:
        head = () if isinstance(model, AudioPolicy) else tuple(model.head.parameters())
        if isinstance(model, ValueModel) and model.shared:
            return cls(model.head, model.trainable(), (), head, None)
        policy = model if isinstance(model, AudioPolicy) else model.trunk
        whole = policy.model if isinstance(model, AudioPolicy) else nn.ModuleList([policy.model, model.head])
        backbone, decoder = policy.backbone, policy.backbone.decoder(policy.model)
        parts = [decoder, backbone.head(policy.model)]
        if policy.speech is not None:
            parts.append(policy.code_head)
        if backbone.audio_token is not None:
            parts += [backbone.audio_encoder(policy.model), *backbone.projector(policy.model)]
        inside = {id(p) for layer in decoder.layers for p in layer.parameters()}
        non_layer = {id(p): p for part in parts for p in part.parameters() if id(p) not in inside}
        return cls(whole, model.trainable(), list(decoder.layers), (*non_layer.values(), *head), decoder)

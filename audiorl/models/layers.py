"""Parts of a decoder's layers that run faster in training than transformers' own, with the same weights and names.

A module becomes one of these by its `__class__`: parameters, saving, adapters and copies stay as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from audiorl.algos.fused import fuses, rms_norm, rotate, rotate_forward, swiglu
from audiorl.algos.varlen import compute_dtype


def replace_parts(decoder: nn.Module, autocast: bool) -> None:
    """Replace norms, gated feed-forward blocks and the rotation of positions; under autocast float32 linears as well.

    What is not known stays as it is: LayerNorms, experts, other activations, and classes that are named alike and
    compute something else (norms by 1 + weight, rotations of neighbours instead of halves).
    """
    module: Any
    for name, module in decoder.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and len(list(module.parameters())) == 1:
            weight, eps = module.weight, module.variance_epsilon
            if _computes(module, len(weight), partial(rms_norm, weight=weight, eps=eps)):
                module.__class__ = FusedNorm
                # Only linears read these, and would cast them one by one. Those of queries and keys are rotated.
                module.feeds_linears = autocast and name.endswith("layernorm")
        elif not isinstance(module, FusedMLP) and all(
            hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")
        ):
            silu = isinstance(module.act_fn, nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"
            if silu and _computes(module, module.gate_proj.in_features, partial(FusedMLP.forward, module)):
                module.__class__ = FusedMLP
        elif kind.endswith("Attention") and hasattr(module, "q_proj"):
            _replace_rotation(sys.modules[type(module).__module__])
    if autocast:
        use_working_copies(decoder)


@torch.no_grad()
def _computes(module: nn.Module, width: int, function: Callable[[Tensor], Tensor]) -> bool:
    """Tell if modules of this class compute `function`: tried once, on a row of `width` numbers."""
    weight, kind = next(module.parameters()), type(module)
    if kind not in _tried:
        if weight.is_meta:
            return True  # without weights nothing is computed
        x = torch.linspace(-1, 2, width, device=weight.device, dtype=weight.dtype)[None]
        expected = function(x)
        _tried[kind] = bool((module(x) - expected).abs().max() <= 0.02 * expected.abs().max())
    return _tried[kind]


_tried: dict[type, bool] = {}


class FusedNorm(nn.Module):
    """Root mean square norm with transformers' attributes."""

    weight: nn.Parameter
    variance_epsilon: float
    feeds_linears: bool

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        low = self.feeds_linears and torch.is_autocast_enabled(x.device.type)
        return rms_norm(x, self.weight, self.variance_epsilon, compute_dtype(x) if low else None)


class FusedMLP(nn.Module):
    """SwiGLU block with transformers' attributes."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


def _replace_rotation(module: Any) -> None:
    """Make the attentions of a module of transformers call `rotate`, which their own function becomes a case of."""
    original = getattr(module, "apply_rotary_pos_emb", None)
    names = ["q", "k", "cos", "sin", "unsqueeze_dim"]
    if original is None or original.__module__ == __name__ or list(inspect.signature(original).parameters) != names:
        return

    with torch.device("cpu"):  # whatever device models are being made on
        angles = torch.linspace(0, 1, 12).view(1, 3, 4).repeat(1, 1, 2)
        q, k, cos, sin = *(torch.linspace(a, 1 - a, 24).view(1, 1, 3, 8) for a in (-1, 2)), angles.cos(), angles.sin()
        expected = rotate_forward.plain(q, k, cos[:, None], sin[:, None], torch.float32)
        if not torch.allclose(original(q, k, cos, sin)[0], expected[0]):
            return

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if not fuses() or cos.requires_grad or cos.shape[-1] != q.shape[-1]:
            rotated: tuple[Tensor, Tensor] = original(q, k, cos, sin, unsqueeze_dim)
            return rotated
        return rotate(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), compute_dtype(q))

    module.apply_rotary_pos_emb = apply_rotary_pos_emb


# -- weights in the type of the products -------------------------------------------------------------------------------


class CastLinear(nn.Linear):
    """A float32 linear that keeps its weight in autocast's type, too, from one update to the next.

    Autocast alone casts a weight in every pass and once more where a layer is computed again, and a frozen one in every
    call.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        low = working_copy(self)
        if low is None:
            return super().forward(x)
        if self.weight.requires_grad and torch.is_grad_enabled():
            low = _InPlaceOf.apply(self.weight, low)
        return linear(x, low, self.bias)


class _InPlaceOf(torch.autograd.Function):
    """The copy, whose gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None  # autograd casts it to the weight's type


def use_working_copies(module: nn.Module, on: bool = True) -> None:
    """Let linears keep copies, or none: where ranks divide weights, whole copies of them would undo it."""
    part: Any
    for part in module.modules():
        if type(part) is nn.Linear and on:
            part.__class__ = CastLinear
        elif type(part) is CastLinear and not on:
            part.__class__ = nn.Linear  # type: ignore[assignment]
            part.weight.__dict__.pop("low", None)


@torch.no_grad()
def working_copy(module: nn.Module) -> Tensor | None:
    """Return the weight of a `CastLinear` in autocast's type, renewed when the weight has changed; else None.

    Its memory stays where it is: a captured graph that reads it sees the new numbers.
    """
    if type(module) is not CastLinear:
        return None
    weight, kind = module.weight, module.weight.device.type
    if weight.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        return None
    version, low = weight.__dict__.get("low", (None, None))
    if low is None or low.device != weight.device or low.dtype != torch.get_autocast_dtype(kind):
        low = weight.detach().to(torch.get_autocast_dtype(kind))
    elif version != weight._version:
        low.copy_(weight)
    weight.__dict__["low"] = (weight._version, low)
    return low


def refresh_copies(module: nn.Module) -> None:
    """Bring all working copies up to date, also where a weight was written behind autograd's back."""
    for p in module.parameters():
        if p.requires_grad and "low" in p.__dict__:
            with torch.no_grad():
                p.__dict__["low"][1].copy_(p)
            p.__dict__["low"] = (p._version, p.__dict__["low"][1])

"""Norm, gated activation and rotation of positions: one kernel forward and one or two backward on a GPU.

Each is an autograd function that saves its inputs and nothing between. What it computes is a function of tensors in
torch's operators, which `torch.compile` turns into kernels once for all layers; a CPU runs the operators themselves.

Shapes: T tokens, H decoder width, I feed-forward width, D head width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

_log = logging.getLogger(__name__)
SMALLEST = 2**22
"""Numbers of the first argument from which a GPU is worth the seconds of compiling; below, launches are few enough."""
_packed: ContextVar[bool] = ContextVar("packed", default=False)


@contextmanager
def packed_pass() -> Iterator[None]:
    """Fuse in a pass without gradients, too: its log-probs are compared with those of a pass that has them."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def fuses() -> bool:
    """Tell if layers call the functions below: in passes over packed rows, and where such a row is computed again.

    Decoding keeps the plain operators: a step that is captured as a CUDA graph must not compile.
    """
    return torch.is_grad_enabled() or _packed.get()


class Fused:
    """A function of tensors, compiled on a GPU. Where compiling fails it runs as it is, and says so once."""

    devices: tuple[str, ...] = ("cuda",)
    works = True

    def __init__(self, function: Callable[..., Any]):
        self.plain = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        x: Tensor = arguments[0]
        if not Fused.works or x.device.type not in self.devices or x.numel() < SMALLEST:
            return self.plain(*arguments)
        try:
            if self._compiled is None:
                # Rows have many lengths; the sizes of a model are few, so that a fixed one would gain nothing.
                self._compiled = torch.compile(self.plain, dynamic=True, fullgraph=True)
            with torch.autocast(x.device.type, enabled=False):  # otherwise compiled again for each state of autocast
                return self._compiled(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler's many parts raise: without a C compiler, triton, a cache
            Fused.works = False
            reason = next(iter(str(error).strip().splitlines()), "")[:200]
            _log.warning(
                f"norms, activations and log-probs run as several kernels each: torch.compile failed with "
                f"{type(error).__name__}: {reason}"
            )
            return self.plain(*arguments)


# -- norm --------------------------------------------------------------------------------------------------------------


@Fused
def norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normed x [..., H] in `dtype`, and 1 / the root mean square [..., 1] in float32."""
    exact = x.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (exact * scale).to(x.dtype)).to(dtype), scale


@Fused
def norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    gradient, normed = gradient.float(), x.float() * scale
    product = gradient * weight
    d_x = scale * (product - normed * (product * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, scale = norm_forward(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, scale)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        d_x, d_weight = norm_backward(gradient, *ctx.saved_tensors)
        return d_x, d_weight if ctx.needs_input_grad[1] else None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Norm x [..., H] (Zhang and Sennrich, arXiv 1910.07467) as transformers does: in float32, rounded to the type of x
    before it is multiplied with the weight. `dtype`: that of the result (None: what this product has)."""
    dtype = dtype or torch.promote_types(x.dtype, weight.dtype)
    result: Tensor = _RMSNorm.apply(x, weight, eps, dtype) if fuses() else norm_forward.plain(x, weight, eps, dtype)[0]
    return result


# -- gated activation --------------------------------------------------------------------------------------------------


@Fused
def gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


@Fused
def gate_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(gradient * up, gate), gradient * silu(gate)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate_forward(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gate_backward(gradient, *ctx.saved_tensors)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., I] (Shazeer, arXiv 2002.05202)."""
    result: Tensor = _SwiGLU.apply(gate, up) if fuses() else silu(gate) * up
    return result


# -- rotation of positions ---------------------------------------------------------------------------------------------


def halves_turned(x: Tensor) -> Tensor:
    """[..., (a, b)] -> [..., (-b, a)]."""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@Fused
def rotate_forward(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rotated_query, rotated_key = ((x * cos + halves_turned(x) * sin).to(dtype) for x in (query, key))
    return rotated_query, rotated_key


@Fused
def rotate_backward(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn gradients back."""
    d_query, d_key = ((x * cos - halves_turned(x * sin)).to(dtype) for x in (query, key))
    return d_query, d_key


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = query.dtype
        return rotate_forward(query, key, cos, sin, dtype)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *rotate_backward(query, key, *ctx.saved_tensors, ctx.dtype), None, None, None


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotate query [1, heads, T, D] and key [1, kv heads, T, D] by their positions (Su et al., arXiv 2104.09864).

    cos and sin: [1, 1, T, D], without gradients. `dtype`: that of the result.
    """
    result: tuple[Tensor, Tensor] = _Rotate.apply(query, key, cos, sin, dtype)
    return result

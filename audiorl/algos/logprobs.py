"""Log-probs and entropies of sampled tokens from hidden states, without the full logits' copies.

Shapes: N predicted tokens, H hidden size, V vocabulary, Q codebooks whose heads are one linear of Q·V rows.

The logits are walked through in tiles of some rows and columns that stay in the cache. The forward pass carries the
softmax's maximum, sum and mean logit from tile to tile (Milakov and Gimelshein 2018, arXiv 1805.02867); the backward
pass turns each tile into its gradient and multiplies it away at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from audiorl.algos.fused import Fused

IGNORE = -100
_ROWS = {"cpu": 1024}
"""Rows of a tile by device. Elsewhere than on a CPU, whose cache they stay in, it is most often all rows: the gradient
of the weight then is one product for each tile, and nothing is added up."""
_ROWS_ELSEWHERE = 16_384
_LOWEST = -1e5  # e to this is 0 in every dtype, and unlike -inf it may be multiplied by 0


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    keep: int = 2 << 30,
    low: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy under softmax(hidden @ weight.T / temperature), differentiable in both.

    hidden [N, H], weight [V, H], targets [N] int64; -100 gives log-prob and entropy 0 and no gradient. Returns two
    tensors [N], float32 (float64 for float64 inputs). Under autocast the product has autocast's dtype, the softmax
    float32. Give targets on the CPU: they are checked there, without waiting for the device.

    `chunk` is the number of logits worked on at once, by default 2²⁰ on the CPU and 2²⁶ elsewhere. `keep` bounds the
    bytes of logits that wait for the backward pass; those beyond are computed again there, at the cost of one more
    product. Without gradients none are kept. Results do not depend on either. `low` is the weight in the product's
    dtype, where there is such a copy; otherwise each tile of the weight is cast. `softcap` c bounds the logits before
    the temperature, to c·tanh(logit / c) (Gemma 2, arXiv 2408.00118, section 2).
    """
    options = temperature, chunk, keep, low, softcap
    logprobs, entropy = fused_codebook_logprobs(hidden, weight, targets[:, None], 1, *options)
    return logprobs[:, 0], entropy[:, 0]


def fused_codebook_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    codebooks: int,
    temperature: float = 1.0,
    chunk: int | None = None,
    keep: int = 2 << 30,
    low: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_logprobs` of a head with a softmax for each codebook, whose rows lie one codebook after the other.

    hidden [N, H], weight [Q·V, H], targets [N, Q]. Returns two tensors [N, Q].
    """
    rows = weight.shape[0]
    assert temperature > 0 and rows % codebooks == 0 and targets.shape == (len(hidden), codebooks)
    wrong = (targets != IGNORE) & ((targets < 0) | (targets >= rows // codebooks))
    if bool(wrong.any()):
        raise ValueError(f"target {int(targets[wrong][0])} is outside of the vocabulary of {rows // codebooks}")
    targets = targets.to(hidden.device, non_blocking=True)
    if chunk is None:
        chunk = 1 << (20 if hidden.device.type == "cpu" else 26)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        keep = 0
    result: tuple[Tensor, Tensor] = _LogProbs.apply(hidden, weight, low, targets, temperature, chunk, keep, softcap)
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        keep: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        product = _product_dtype(hidden)
        exact = torch.promote_types(product, torch.float32)
        h = hidden.to(product)
        low = weight if low is None or low.dtype != product else low
        # The largest (capped) logit and the target's; with z = (logit - largest) / temperature also Σ e^z and Σ z·e^z.
        peak = torch.full(targets.shape, torch.finfo(exact).min, dtype=exact, device=hidden.device)
        total, moment, chosen = (torch.zeros_like(peak) for _ in range(3))
        saved_logits: dict[tuple[int, int], Tensor] = {}
        with torch.autocast(hidden.device.type, enabled=False):
            for q, first, columns in _columns(weight, targets, chunk):
                w = low[columns].to(product)
                for rows in _rows(targets, chunk):
                    at = rows, q
                    logits = h[rows] @ w.t()
                    sums = peak[at], total[at], moment[at], chosen[at]
                    peak[at], total[at], moment[at], chosen[at] = add_tile(
                        logits, targets[at] - first, *sums, temperature, softcap
                    )
                    keep -= logits.nbytes
                    if keep >= 0:
                        saved_logits[columns.start, rows.start] = logits
        counted = targets != IGNORE
        log_total = total.log()
        entropy = torch.where(counted, log_total - moment / total, 0.0)
        ctx.save_for_backward(hidden, weight, low, targets, peak, total, entropy)
        # Not saved tensors: the backward pass consumes them, and a second one computes them again.
        ctx.saved_logits, ctx.product, ctx.temperature, ctx.chunk = saved_logits, product, temperature, chunk
        ctx.softcap = softcap
        ctx.set_materialize_grads(False)
        return torch.where(counted, (chosen - peak) / temperature - log_total, 0.0), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, low, targets, peak, total, entropy = ctx.saved_tensors
        saved_logits, product, temperature = ctx.saved_logits, ctx.product, ctx.temperature
        h = hidden.to(product)
        counted = targets != IGNORE
        zero = torch.zeros_like(peak)
        of_logprob, of_entropy = (zero if g is None else torch.where(counted, g, 0.0) / temperature for g in grads)
        # d/dlogit = [target]·of_logprob + e^z·(level + slope·z), with the temperature inside the factors
        slope = None if grads[1] is None else -of_entropy / total
        level = -(of_logprob + of_entropy * (entropy - total.log())) / total
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(h, dtype=peak.dtype) if need_hidden else None
        unset = torch.empty_like if len(h) else torch.zeros_like  # without rows nothing below writes to it
        d_weight = unset(weight) if need_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for q, first, columns in _columns(weight, targets, ctx.chunk):
                w = low[columns].to(product)
                for rows in _rows(targets, ctx.chunk):
                    at = rows, q
                    logits = saved_logits.pop((columns.start, rows.start), None)
                    if logits is None:
                        logits = h[rows] @ w.t()
                    tile = targets[at] - first, peak[at], level[at], None if slope is None else slope[at]
                    g = tile_gradient(logits, *tile, of_logprob[at], temperature, ctx.softcap)
                    del logits
                    if d_hidden is not None:
                        _add_product(d_hidden[rows], g, w)
                    if d_weight is not None:
                        whole = rows.start == 0 and rows.stop == len(h)
                        if rows.start == 0:
                            exact = d_weight.dtype == peak.dtype or whole
                            share = d_weight[columns] if exact else torch.empty_like(w, dtype=peak.dtype)
                        _add_product(share, g.t(), h[rows], first=rows.start == 0)
                        if rows.stop == len(h) and not exact:
                            d_weight[columns] = share
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, *(None,) * 6


@Fused
def add_tile(
    logits: Tensor,
    local: Tensor,
    peak: Tensor,
    total: Tensor,
    moment: Tensor,
    chosen: Tensor,
    temperature: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest logit, Σ e^z, Σ z·e^z and the target's logit with those of a tile added to them.

    logits [rows, columns]; `local` [rows] is the target's column, which may lie outside of the tile.
    """
    logits = capped(logits, softcap)
    highest = torch.maximum(peak, logits.amax(1).to(peak.dtype))
    z = _below(logits, highest, temperature)
    e = z.exp()
    shift = _below(peak[:, None], highest, temperature)[:, 0]
    shrink = shift.exp()
    total, moment = shrink * total + e.sum(1), shrink * (moment + shift * total) + e.mul_(z).sum(1)
    local, inside = _locate(local, logits.shape[1])
    chosen = torch.where(inside, logits.gather(1, local[:, None])[:, 0].to(peak.dtype), chosen)
    return highest, total, moment, chosen


@Fused
def tile_gradient(
    logits: Tensor,
    local: Tensor,
    peak: Tensor,
    level: Tensor,
    slope: Tensor | None,
    of_logprob: Tensor,
    temperature: float,
    softcap: float | None = None,
) -> Tensor:
    """Return the gradient of a tile of logits as they are before the cap, in their dtype."""
    dtype, logits = logits.dtype, capped(logits, softcap)
    z = _below(logits, peak, temperature)
    e = z.exp()
    g = e.mul_(level[:, None]) if slope is None else z.mul_(slope[:, None]).add_(level[:, None]).mul_(e)
    if torch.compiler.is_compiling():  # one kernel: a scatter would be another one, over a stored tile
        target = torch.arange(logits.shape[1], device=logits.device) == local[:, None]
        return _before_cap(g + torch.where(target, of_logprob[:, None], 0.0), logits, softcap).to(dtype)
    local, inside = _locate(local, logits.shape[1])
    g = g.scatter_add_(1, local[:, None], torch.where(inside, of_logprob, 0.0)[:, None])
    return _before_cap(g, logits, softcap).to(dtype)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits bounded to c·tanh(logit / c), in float32 at least; as they are without a cap."""
    if softcap is None:
        return logits
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap).tanh_().mul_(softcap)


def _before_cap(gradient: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient of the logits from that of the capped ones: d(c·tanh(x / c))/dx = 1 - (capped / c)²."""
    return gradient if softcap is None else gradient * (1 - (logits / softcap) ** 2)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _most_rows(targets: Tensor, chunk: int) -> int:
    return min(_ROWS.get(targets.device.type, _ROWS_ELSEWHERE), chunk)


def _rows(targets: Tensor, chunk: int) -> Iterator[slice]:
    step = _most_rows(targets, chunk)
    for start in range(0, len(targets), step):
        yield slice(start, min(start + step, len(targets)))


def _columns(weight: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[int, int, slice]]:
    """(codebook, first code, rows of the weight), so that no tile of `_rows` and these has more than `chunk` logits."""
    rows, codebooks = max(len(targets), 1), targets.shape[1]
    size = weight.shape[0] // codebooks
    step = max(chunk // min(rows, _most_rows(targets, chunk)), 1)
    for q in range(codebooks):
        for first in range(0, size, step):
            yield q, first, slice(q * size + first, q * size + min(first + step, size))


def _below(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """(logits - peak) / temperature, a new tensor of peak's dtype."""
    z = logits - peak[:, None]
    return (z if temperature == 1 else z.div_(temperature)).clamp_(min=_LOWEST)


def _locate(local: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in a tile, and whether it is there at all."""
    inside = (local >= 0) & (local < width)
    return torch.where(inside, local, 0), inside


def _add_product(into: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """into += a @ b; the `first` overwrites. `into` may have more precision than the factors."""
    if into.dtype == a.dtype:
        into.addmm_(a, b, beta=0 if first else 1)
    elif _adds_wide(into.device, a.dtype):
        if first:
            torch.mm(a, b, out_dtype=into.dtype, out=into)
        else:
            torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    elif first:
        into.copy_(a @ b)
    else:
        into.add_(a @ b)


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell if a product in 16 bits can be added to float32 in place, as a GPU's library of products does it."""
    if device.type != "cuda":
        return False
    try:
        a, into = torch.eye(64, dtype=dtype, device=device), torch.ones(64, 64, device=device)
        torch.addmm(into, a, a, out_dtype=torch.float32, out=into)
        torch.mm(a, a, out_dtype=torch.float32, out=(other := torch.empty_like(into)))
    except (RuntimeError, TypeError):
        return False
    return bool(torch.equal(into, 1 + other)) and bool(torch.equal(other, a.float()))

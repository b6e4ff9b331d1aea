"""Divergences between a student's and a teacher's next-token distributions, from hidden states and both heads.

Shapes: N tokens, H hidden size (the teacher's may differ), V vocabulary, K chosen tokens of each row.

S is the student, T the teacher, both softmaxes at the same temperature. The kinds:

  reverse   KL(S ‖ T) = Σ S (log S - log T), as in MiniLLM (Gu et al. 2024, arXiv 2306.08543)
  forward   KL(T ‖ S) = Σ T (log T - log S)
  jsd       β KL(T ‖ M) + (1 - β) KL(S ‖ M) with M = βT + (1 - β)S, the generalised Jensen-Shannon divergence of GKD
            (Agarwal et al. 2024, arXiv 2306.13649, section 2). Divided by β it goes to `forward` as β goes to 0,
            divided by 1 - β to `reverse` as β goes to 1

Like `algos.logprobs` this walks through the logits in tiles; no [N, V] tensor is ever made. The backward pass computes
each tile again. The teacher gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from audiorl.algos.logprobs import _LOWEST, _add_product, _before_cap, _columns, _locate, _product_dtype, _rows, capped

Kind = Literal["reverse", "forward", "jsd"]


def divergence(student: Tensor, teacher: Tensor, kind: Kind, beta: float = 0.5) -> Tensor:
    """Return the divergence [N] of log-probs [N, K] over K outcomes that are all there are. Differentiable in both."""
    if kind == "reverse":
        return (student.exp() * (student - teacher)).sum(-1)
    if kind == "forward":
        return (teacher.exp() * (teacher - student)).sum(-1)
    mixture = _mixture(student, teacher, beta)
    of_teacher, of_student = (p.exp() * (p - mixture) for p in (teacher, student))
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


def fused_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    kind: Kind = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """Return the divergence [N] over the whole vocabulary, differentiable in `hidden` and `weight`.

    hidden [N, H], weight [V, H] of the student; teacher_hidden [N, H'], teacher_weight [V, H']. The logits have the
    hidden states' dtype (autocast's under autocast), everything after them float32 (float64 for float64 inputs).
    `chunk` is the number of logits worked on at once, by default 2²⁰ on the CPU and 2²⁶ elsewhere; results do not
    depend on it. Costs two products with each head in the forward pass, and one more with each in the backward pass.
    """
    assert len(hidden) == len(teacher_hidden) and len(weight) == len(teacher_weight), "student and teacher differ"
    student = hidden, weight
    teacher = teacher_hidden.detach(), teacher_weight.detach()
    caps = softcap, teacher_softcap
    with torch.no_grad():
        no_ids = torch.zeros(len(hidden), 0, dtype=torch.long, device=hidden.device)
        models = zip((student, teacher), caps, strict=True)
        totals = [bucket_logits(*model, no_ids, temperature, chunk, cap) for model, cap in models]
    result: Tensor = _Divergence.apply(*student, *teacher, *totals, kind, beta, temperature, chunk, caps)
    return result


def bucket_logits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Logits [N, K + 1] of the tokens `ids` [N, K] and, last, of all other tokens as one: log Σ exp(logit).

    Their softmax is the distribution in which the tail is a single outcome; a divergence of two such distributions is a
    lower bound of that over the vocabulary (data processing inequality), and equal to it where K is V. The ids of a row
    must differ. Without ids the one column is the normaliser. Differentiable in `hidden` and `weight`; dtypes and
    `chunk` as in `fused_divergence`.
    """
    assert temperature > 0 and ids.shape[:1] == hidden.shape[:1]
    result: Tensor = _Buckets.apply(hidden, weight, ids, temperature, chunk, softcap)
    return result


@torch.no_grad()
def top_ids(hidden: Tensor, weight: Tensor, k: int, chunk: int | None = None) -> Tensor:
    """[N, k] int64: the most probable tokens of each row, most probable first."""
    head = _Head.of(hidden, weight, 1.0)  # a cap would not change their order
    best = torch.full((len(hidden), k), -math.inf, dtype=head.exact, device=hidden.device)
    ids = torch.zeros_like(best, dtype=torch.long)
    for columns, rows in _grid(hidden, weight, chunk):
        logits = head.logits(rows, columns).clamp_(min=torch.finfo(head.exact).min)
        tile_ids = torch.arange(columns.start, columns.stop, device=ids.device).expand(len(logits), -1)
        best[rows], chosen = torch.cat([best[rows], logits], 1).topk(k, dim=1)
        ids[rows] = torch.cat([ids[rows], tile_ids], 1).gather(1, chosen)
    return ids


class _Divergence(torch.autograd.Function):
    """With f = dD/dS, the gradient of a row's divergence D with respect to logit j is S_j (f_j - Σ_i S_i f_i) / τ."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        total: Tensor,
        teacher_total: Tensor,
        kind: Kind,
        beta: float,
        temperature: float,
        chunk: int | None,
        softcaps: tuple[float | None, float | None],
    ) -> Tensor:
        student = _Head.of(hidden, weight, temperature, softcap=softcaps[0])
        teacher = _Head.of(teacher_hidden, teacher_weight, temperature, softcap=softcaps[1])
        value = total.new_zeros(len(hidden))
        mean_f = torch.zeros_like(value)
        for columns, rows in _grid(hidden, weight, chunk):
            s = student.logprobs(rows, columns, total)
            t = teacher.logprobs(rows, columns, teacher_total).to(s.dtype)
            value[rows] += divergence(s, t, kind, beta)
            if kind == "jsd":
                mean_f[rows] += (s.exp() * (s - _mixture(s, t, beta))).sum(1)
        mean_f = value if kind == "reverse" else mean_f
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, total, teacher_total, mean_f)
        ctx.products = student.product, teacher.product
        ctx.kind, ctx.beta, ctx.temperature, ctx.chunk, ctx.softcaps = kind, beta, temperature, chunk, softcaps
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, total, teacher_total, mean_f = ctx.saved_tensors
        student = _Head.of(hidden, weight, ctx.temperature, ctx.products[0], ctx.softcaps[0])
        teacher = _Head.of(teacher_hidden, teacher_weight, ctx.temperature, ctx.products[1], ctx.softcaps[1])
        factor = (grad / ctx.temperature * (1 - ctx.beta if ctx.kind == "jsd" else 1))[:, None]

        def of_logits(rows: slice, columns: slice) -> Tensor:
            s = student.logprobs(rows, columns, total)
            t = teacher.logprobs(rows, columns, teacher_total).to(s.dtype)
            if ctx.kind == "forward":
                return (s.exp_() - t.exp_()).mul_(factor[rows])
            f = s - (t if ctx.kind == "reverse" else _mixture(s, t, ctx.beta))
            return f.sub_(mean_f[rows, None]).mul_(s.exp_()).mul_(factor[rows])

        return *_gradients(student, hidden.dtype, ctx.needs_input_grad, ctx.chunk, of_logits), *(None,) * 9


class _Buckets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        chunk: int | None,
        softcap: float | None,
    ) -> Tensor:
        head = _Head.of(hidden, weight, temperature, softcap=softcap)
        chosen = torch.zeros(ids.shape, dtype=head.exact, device=hidden.device)
        tail = torch.full((len(hidden),), torch.finfo(head.exact).min / 4, dtype=head.exact, device=hidden.device)
        for columns, rows in _grid(hidden, weight, chunk):
            logits = head.logits(rows, columns)
            local, inside = _locate(ids[rows] - columns.start, logits.shape[1])
            chosen[rows] = torch.where(inside, logits.gather(1, local), chosen[rows])
            _without(logits, local, inside, torch.finfo(head.exact).min / 4)
            tail[rows] = torch.logaddexp(tail[rows], logits.logsumexp(1))
        ctx.save_for_backward(hidden, weight, ids, tail)
        ctx.product, ctx.temperature, ctx.chunk, ctx.softcap = head.product, temperature, chunk, softcap
        return torch.cat([chosen, tail[:, None]], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, tail = ctx.saved_tensors
        head = _Head.of(hidden, weight, ctx.temperature, ctx.product, ctx.softcap)
        of_chosen, of_tail = grad[:, :-1] / ctx.temperature, grad[:, -1:] / ctx.temperature

        def of_logits(rows: slice, columns: slice) -> Tensor:
            share = head.logprobs(rows, columns, tail[:, None])
            local, inside = _locate(ids[rows] - columns.start, share.shape[1])
            _without(share, local, inside, _LOWEST)
            g = share.exp_().mul_(of_tail[rows])
            return g.scatter_add_(1, local, torch.where(inside, of_chosen[rows], 0.0))

        return *_gradients(head, hidden.dtype, ctx.needs_input_grad, ctx.chunk, of_logits), *(None,) * 4


@dataclass(frozen=True)
class _Head:
    """Hidden states [N, H] in the product's dtype, a head's weight [V, H], and what its tiles of logits are."""

    hidden: Tensor
    weight: Tensor
    temperature: float
    product: torch.dtype
    exact: torch.dtype
    softcap: float | None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        temperature: float,
        product: torch.dtype | None = None,
        softcap: float | None = None,
    ) -> _Head:
        product = product or _product_dtype(hidden)
        exact = torch.promote_types(product, torch.float32)
        return cls(hidden.to(product), weight, temperature, product, exact, softcap)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = self.hidden[rows] @ self.weight[columns].to(self.product).t()
        return capped(logits.to(self.exact), self.softcap).div_(self.temperature)

    def before_cap(self, gradient: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return the gradient of a tile's logits before the cap from that of the capped ones."""
        if self.softcap is None:
            return gradient
        return _before_cap(gradient, self.logits(rows, columns) * self.temperature, self.softcap)

    def logprobs(self, rows: slice, columns: slice, total: Tensor) -> Tensor:
        """Return a tile of logits less `total` [N, 1], their normaliser."""
        return self.logits(rows, columns).sub_(total[rows]).clamp_(min=_LOWEST)


def _gradients(
    head: _Head,
    dtype: torch.dtype,
    needed: Sequence[bool],
    chunk: int | None,
    of_logits: Callable[[slice, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states, in `dtype`, and of the weight, from those of each tile of logits."""
    h, weight = head.hidden, head.weight
    d_hidden = torch.zeros_like(h, dtype=head.exact) if needed[0] else None
    d_weight = torch.zeros_like(weight) if needed[1] else None
    for columns, rows in _grid(h, weight, chunk):
        g = head.before_cap(of_logits(rows, columns), rows, columns).to(head.product)
        with torch.autocast(h.device.type, enabled=False):
            if d_hidden is not None:
                _add_product(d_hidden[rows], g, weight[columns].to(head.product))
            if d_weight is not None:
                if rows.start == 0:  # the sum over rows has full precision, whatever the weight's
                    share = torch.zeros_like(weight[columns], dtype=head.exact)
                _add_product(share, g.t(), h[rows])
                if rows.stop == len(h):
                    d_weight[columns] = share
    return None if d_hidden is None else d_hidden.to(dtype), d_weight


def _grid(hidden: Tensor, weight: Tensor, chunk: int | None) -> Iterator[tuple[slice, slice]]:
    """(columns, rows) of tiles of at most `chunk` logits."""
    chunk = chunk or 1 << (20 if hidden.device.type == "cpu" else 26)
    for _, _, columns in _columns(weight, hidden[:, :1], chunk):
        for rows in _rows(hidden, chunk):
            yield columns, rows


def _without(tile: Tensor, local: Tensor, inside: Tensor, low: float) -> None:
    """Set the entries that `_locate` gave to `low`, in place."""
    if not local.shape[1]:
        return
    marks = torch.zeros(len(tile), tile.shape[1] + 1, dtype=torch.bool, device=tile.device)
    marks.scatter_(1, torch.where(inside, local, tile.shape[1]), True)
    tile.masked_fill_(marks[:, :-1], low)


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the log-probs of βT + (1 - β)S."""
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))

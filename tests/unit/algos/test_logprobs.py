"""Fused log-probs against the full softmax in float64, and what they may hold in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from audiorl.algos.logprobs import fused_codebook_logprobs, fused_logprobs
from tests.support.allocated import Allocated


def inputs(n: int = 10, h: int = 8, v: int = 20, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(k, h, generator=generator, dtype=torch.float64).to(dtype) for k in (n, v))
    return hidden, weight, torch.randint(0, v, (n,), generator=generator)


def full(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().T
    logits = logits if cap is None else cap * (logits / cap).tanh()
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def gradients(function: Any, hidden: Tensor, weight: Tensor, *rest: Any, by: str = "both") -> list[Tensor]:
    """Both outputs, then the gradients of hidden and weight; every row with another factor."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    lp, entropy = function(h, w, *rest)
    factors = torch.linspace(-1, 2, lp.numel(), dtype=lp.dtype).view(lp.shape)
    loss = {"logprob": factors * lp, "entropy": factors.flip(0) * entropy}
    sum(part.sum() for name, part in loss.items() if by in (name, "both")).backward()  # type: ignore[union-attr]
    return [lp.detach(), entropy.detach(), h.grad, w.grad]  # type: ignore[list-item]


def test_two_codes_by_hand() -> None:
    # logits ln 9 and 0 at temperature 2: e^z = 3, 1, so p = 3/4, 1/4
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[math.log(9)], [0.0]])
    lp, entropy = fused_logprobs(hidden.requires_grad_(), weight, torch.tensor([1]), 2.0)
    assert lp.item() == pytest.approx(math.log(1 / 4))
    assert entropy.item() == pytest.approx(-(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4)))
    lp.backward()
    assert hidden.grad is not None and hidden.grad.item() == pytest.approx(-3 / 4 * math.log(9) / 2)


@pytest.mark.parametrize("by", ["logprob", "entropy", "both"])
@pytest.mark.parametrize("keep", [0, 100, 1 << 30], ids=["recompute", "some", "keep"])
@pytest.mark.parametrize("chunk", [1, 7, 10, 33, 10_000])
def test_equals_the_full_softmax(chunk: int, keep: int, by: str) -> None:
    hidden, weight, targets = inputs()
    ours = gradients(fused_logprobs, hidden, weight, targets, 0.7, chunk, keep, by=by)
    torch.testing.assert_close(ours, gradients(full, hidden, weight, targets, 0.7, by=by), atol=1e-13, rtol=1e-12)
    ours = gradients(fused_logprobs, hidden, weight, targets, 0.7, chunk, keep, None, 2.0, by=by)
    torch.testing.assert_close(ours, gradients(full, hidden, weight, targets, 0.7, 2.0, by=by), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_gradcheck(cap: float | None) -> None:
    hidden, weight, targets = inputs(4, 3, 5)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: fused_logprobs(h, w, targets, 1.3, 4, 30, softcap=cap), leaves)


@pytest.mark.parametrize("trained", [0, 1], ids=["hidden", "weight"])
def test_one_side_frozen(trained: int) -> None:
    hidden, weight, targets = inputs()
    expected = gradients(full, hidden, weight, targets, 1.0)
    leaves = [hidden, weight]
    leaves[trained].requires_grad_()
    lp, entropy = fused_logprobs(*leaves, targets, chunk=33)
    factors = torch.linspace(-1, 2, 10, dtype=torch.float64)
    (factors * lp + factors.flip(0) * entropy).sum().backward()
    assert leaves[1 - trained].grad is None
    torch.testing.assert_close(leaves[trained].grad, expected[2 + trained], atol=1e-13, rtol=1e-12)


def test_an_empty_batch_backpropagates() -> None:
    hidden, weight, targets = inputs(0)
    lp, entropy, d_hidden, d_weight = gradients(fused_logprobs, hidden, weight, targets)
    assert lp.shape == entropy.shape == (0,) and d_hidden.shape == (0, 8)
    assert torch.equal(d_weight, torch.zeros(20, 8, dtype=torch.float64))


def test_a_second_backward_is_the_first() -> None:
    hidden, weight, targets = inputs()
    lp, _ = fused_logprobs(hidden.requires_grad_(), weight, targets, chunk=33)
    first, second = (torch.autograd.grad(lp.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_precision(how: str, cap: float | None) -> None:
    """Against float64 from the same rounded inputs; more rows than a tile has, so that tiles add up."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    hidden, weight, targets = inputs(1500, 16, 50, dtype)
    expected = gradients(full, hidden, weight, targets, 0.7, cap)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        ours = gradients(fused_logprobs, hidden, weight, targets, 0.7, 1024 * 7, 2 << 30, None, cap)
    assert [t.dtype for t in ours] == [torch.float32, torch.float32, dtype, dtype]
    tolerance = 1e-5 if how == "float32" else 0.02
    for mine, exact in zip(ours, expected, strict=True):
        assert (mine.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("chunk", [1, 10_000])
@pytest.mark.parametrize("low", [-1e4, -math.inf])
def test_impossible_codes_have_no_part(chunk: int, low: float) -> None:
    """Logits [1e4, 1e4, low]: two codes of probability 1/2, entropy ln 2; the gradient of both moves along code 2 no
    way at all."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    top = 1e4
    weight = torch.tensor([[low], [top], [top]] if low == -1e4 else [[top], [top], [low]], requires_grad=True)
    lp, entropy = fused_logprobs(hidden, weight, torch.tensor([1]), chunk=chunk)
    assert lp.item() == pytest.approx(-math.log(2)) and entropy.item() == pytest.approx(math.log(2))
    (lp + entropy).sum().backward()
    assert weight.grad is not None
    impossible = 0 if low == -1e4 else 2
    assert weight.grad[impossible].item() == 0 and weight.grad[1].item() == pytest.approx(1 / 2)
    if low == -1e4:  # 0 · inf is not a number in any product with the weight
        assert hidden.grad is not None and hidden.grad.item() == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("chunk", [5, 10_000])
def test_overflowing_logits_stay_finite(chunk: int) -> None:
    """-1e30 · 1e30 is -inf in float32."""
    hidden = torch.tensor([[1e30, 1.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 1.0], [-1e30, 1.0], [0.0, 1.0]], requires_grad=True)
    lp, entropy = fused_logprobs(hidden, weight, torch.tensor([2]), chunk=chunk)
    (lp + entropy).sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    for grad in (hidden.grad, weight.grad):
        assert grad is not None and bool(grad.isfinite().all())


@pytest.mark.parametrize("chunk", [1, 7, 23, 10_000])
def test_codebooks_are_separate_softmaxes(chunk: int) -> None:
    hidden, weight, _ = inputs(6, 8, 3 * 5)
    targets = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(1))
    targets[0, 0] = targets[2] = targets[5, 2] = -100

    def separately(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        parts = [full(h, part, targets[:, q].clamp(min=0), 0.7) for q, part in enumerate(w.split(5))]
        counted = targets != -100
        lp, entropy = (torch.stack(p, 1) for p in zip(*parts, strict=True))
        return torch.where(counted, lp, 0.0), torch.where(counted, entropy, 0.0)

    ours = gradients(fused_codebook_logprobs, hidden, weight, targets, 3, 0.7, chunk)
    torch.testing.assert_close(ours, gradients(separately, hidden, weight), atol=1e-13, rtol=1e-12)
    assert ours[2][2].abs().max() == 0  # a row without any target


def test_a_target_outside_of_the_vocabulary_is_named() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="target 20 is outside of the vocabulary of 20"):
        fused_logprobs(hidden, weight, targets.index_fill(0, torch.tensor([3]), 20))


N, H, V, CHUNK = 64, 4, 4096, 64 * 128
FULL, TILE, GRADS = 4 * N * V, 4 * CHUNK, 4 * (N * H + V * H)


def memory(function: Any, train: bool) -> Allocated:
    hidden, weight, targets = inputs(N, H, V, torch.float32)
    hidden, weight = hidden.requires_grad_(train), weight.requires_grad_(train)
    with Allocated() as allocated:
        lp, entropy = function(hidden, weight, targets)
        if train:
            (lp + entropy).sum().backward()
        allocated.left = allocated.live  # the outputs and their graph are still there
    return allocated


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = (hidden @ weight.T).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def test_memory() -> None:
    """Small tensors [N] are a few percent of a tile; a tile's own copies are at most four."""
    few = 5 * TILE
    reference = memory(plain, train=True).peak
    assert reference > 4 * FULL, "the ruler sees the full softmax's copies"

    scored = memory(lambda *a: fused_logprobs(*a, chunk=CHUNK), train=False)
    assert scored.largest <= TILE and scored.peak <= few

    kept = memory(lambda *a: fused_logprobs(*a, chunk=CHUNK), train=True)
    assert FULL < kept.peak <= FULL + GRADS + few
    assert kept.peak <= 0.5 * reference
    assert kept.left <= GRADS + few

    recomputed = memory(lambda *a: fused_logprobs(*a, chunk=CHUNK, keep=0), train=True)
    assert recomputed.peak <= GRADS + few

    some = memory(lambda *a: fused_logprobs(*a, chunk=CHUNK, keep=FULL // 4), train=True)
    assert some.peak <= FULL // 4 + GRADS + few

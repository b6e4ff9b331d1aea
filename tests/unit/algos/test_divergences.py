"""Divergences from tiles against sums over an enumerable vocabulary in float64, and what they may hold in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from audiorl.algos.distill import bucket_logits, divergence, fused_divergence, top_ids
from tests.support.allocated import Allocated

KINDS = pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
N, H, V = 10, 8, 20


def models(n: int = N, h: int = H, v: int = V, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Student's hidden states and head, and the teacher's of another width."""
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(k, w, generator=rng, dtype=torch.float64).to(dtype) for k, w in ((n, h), (v, h), (n, 5), (v, 5))
    ]


def exact(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """From probabilities [N, V], as the definitions have it."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(-1)

    if kind == "reverse":
        return kl(student, teacher)
    if kind == "forward":
        return kl(teacher, student)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def full(
    h: Tensor, w: Tensor, th: Tensor, tw: Tensor, kind: str, beta: float, temperature: float, cap: float | None = None
) -> Tensor:
    """`cap`: of the student's logits; the teacher's is half of it."""
    logits = h @ w.T, th @ tw.T
    if cap is not None:
        logits = cap * (logits[0] / cap).tanh(), cap / 2 * (logits[1] / cap * 2).tanh()
    student, teacher = ((x / temperature).softmax(-1) for x in logits)
    return exact(student, teacher, kind, beta)


def differentiated(function: Callable[..., Tensor], inputs: list[Tensor], *rest: object) -> list[Tensor]:
    """The divergence and the gradients of the student's two tensors; every row with another factor."""
    h, w = (x.clone().requires_grad_() for x in inputs[:2])
    value = function(h, w, *inputs[2:], *rest)
    (torch.linspace(-1, 2, len(value), dtype=value.dtype) * value).sum().backward()
    return [value.detach(), h.grad, w.grad]  # type: ignore[list-item]


def test_two_tokens_by_hand() -> None:
    """S = (3/4, 1/4), T = (1/4, 3/4), M = (1/2, 1/2)."""
    student = torch.tensor([[math.log(9)], [0.0]]), torch.tensor([[1.0]])
    s, t = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.25, 0.75]]).log()
    kl = 0.5 * math.log(3)  # 3/4 ln 3 - 1/4 ln 3
    to_mixture = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(s, t, "reverse").item() == pytest.approx(kl)
    assert divergence(s, t, "forward").item() == pytest.approx(kl)
    assert divergence(s, t, "jsd").item() == pytest.approx(to_mixture)
    weight, hidden = student
    tiled = fused_divergence(hidden.requires_grad_(), weight, hidden, weight.flip(0), "reverse", temperature=2.0)
    assert tiled.item() == pytest.approx(kl)
    tiled.backward()
    # dD/dlogit_1 = S_1 (ln 3 - D) / 2 = 3/16 ln 3, and only that logit moves with the hidden state
    assert hidden.grad is not None and hidden.grad.item() == pytest.approx(3 / 16 * math.log(3) * math.log(9))


@KINDS
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("chunk", [1, 7, 33, 10_000])
def test_values_and_gradients_equal_the_exact_ones(kind: str, beta: float, chunk: int) -> None:
    ours = differentiated(fused_divergence, models(), kind, beta, 0.7, chunk)
    theirs = differentiated(full, models(), kind, beta, 0.7)
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-11)
    ours = differentiated(fused_divergence, models(), kind, beta, 0.7, chunk, 4.0, 2.0)
    theirs = differentiated(full, models(), kind, beta, 0.7, 4.0)
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-11)


@KINDS
def test_gradcheck(kind: str) -> None:
    h, w, th, tw = models(4, 3, 5)
    leaves = h.requires_grad_(), w.requires_grad_()
    function = lambda h, w: fused_divergence(h, w, th, tw, kind, 0.3, 1.3, 4)  # type: ignore[arg-type]  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves)
    buckets = torch.tensor([[4, 0], [1, 2], [3, 1], [0, 1]])
    assert torch.autograd.gradcheck(lambda h, w: bucket_logits(h, w, buckets, 1.3, 4, 0.9), leaves)


@KINDS
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: str) -> None:
    """The same tensors, and the same logits from another head and other hidden states."""
    mixing = torch.linalg.qr(torch.randn(H, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        h, w, *_ = models(dtype=dtype)
        for teacher in ([h, w], [h @ mixing.to(dtype), w @ mixing.to(dtype)]):
            value, *gradients = differentiated(fused_divergence, [h, w, *teacher], kind)
            rounding = tolerance * (1 if teacher[0] is h else 10)
            assert value.abs().max() <= rounding and all(g.abs().max() <= rounding for g in gradients)


@pytest.mark.parametrize("trained", [0, 1], ids=["hidden", "weight"])
def test_one_side_of_the_student_frozen(trained: int) -> None:
    inputs = models()
    expected = differentiated(full, models(), "jsd", 0.3, 1.0)[1 + trained]
    inputs[trained].requires_grad_()
    value = fused_divergence(*inputs, "jsd", 0.3, chunk=33)
    (torch.linspace(-1, 2, N, dtype=torch.float64) * value).sum().backward()
    assert inputs[1 - trained].grad is None
    torch.testing.assert_close(inputs[trained].grad, expected, atol=1e-13, rtol=1e-11)


@KINDS
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_precision(kind: str, how: str) -> None:
    """Against float64 from the same rounded inputs; more rows than a tile has, so that tiles add up."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    inputs = models(1500, 16, 50, dtype)
    expected = differentiated(full, [x.double() for x in inputs], kind, 0.3, 0.7)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        ours = differentiated(fused_divergence, inputs, kind, 0.3, 0.7, 1024 * 7)
    assert [x.dtype for x in ours] == [torch.float32, dtype, dtype]
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.double() - theirs).norm() <= (1e-5 if how == "float32" else 0.03) * theirs.norm()


def test_an_empty_batch_backpropagates() -> None:
    value, d_hidden, d_weight = differentiated(fused_divergence, models(0))
    assert value.shape == (0,) and d_hidden.shape == (0, H) and not d_weight.any()


def test_impossible_tokens_have_no_part() -> None:
    """A token of logit -inf in both heads; the other two have (3/4, 1/4) and (1/4, 3/4)."""
    weight = torch.tensor([[math.log(3)], [-math.inf], [0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0], [-math.inf], [math.log(3)]])
    hidden = torch.tensor([[1.0]])
    for chunk in (1, 10):
        value = fused_divergence(hidden, weight, hidden, teacher, "reverse", chunk=chunk)
        (gradient,) = torch.autograd.grad(value.sum(), weight)
        assert value.item() == pytest.approx(0.5 * math.log(3)) and gradient[1].item() == 0


# -- the top tokens and the tail as one outcome --------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 33, 10_000])
def test_the_top_tokens_are_those_of_the_softmax(chunk: int) -> None:
    h, w, *_ = models()
    assert torch.equal(top_ids(h, w, 4, chunk), (h @ w.T).topk(4, dim=1).indices)
    assert torch.equal(top_ids(h, w, V, chunk).sort(1).values, torch.arange(V).expand(N, V))


@pytest.mark.parametrize("chunk", [1, 7, 33, 10_000])
def test_buckets_equal_sums_of_probabilities(chunk: int) -> None:
    h, w, *_ = models()
    ids = top_ids(h, w, 3)

    def by_sums(h: Tensor, w: Tensor) -> Tensor:
        p = (h @ w.T / 0.7).softmax(-1)
        chosen = p.gather(1, ids)
        return torch.cat([chosen, 1 - chosen.sum(1, keepdim=True)], 1).log().square().sum(1)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return bucket_logits(h, w, ids, 0.7, chunk).log_softmax(-1).square().sum(1)

    expected = differentiated(by_sums, [h, w])
    torch.testing.assert_close(differentiated(ours, [h, w]), expected, atol=1e-11, rtol=1e-9)


def top_k(h: Tensor, w: Tensor, th: Tensor, tw: Tensor, kind: str, k: int) -> Tensor:
    ids = top_ids(th, tw, k)
    student, teacher = (bucket_logits(a, b, ids).log_softmax(-1) for a, b in ((h, w), (th, tw)))
    return divergence(student, teacher.detach(), kind, 0.3)  # type: ignore[arg-type]


@KINDS
def test_all_tokens_are_the_whole_vocabulary_and_fewer_a_lower_bound(kind: str) -> None:
    whole = differentiated(fused_divergence, models(), kind, 0.3)
    torch.testing.assert_close(differentiated(top_k, models(), kind, V), whole, atol=1e-12, rtol=1e-10)
    bounds = [top_k(*models(), kind, k) for k in (1, 4, V - 1)]
    for smaller, larger in zip(bounds, [*bounds[1:], whole[0]], strict=True):
        assert bool((smaller <= larger + 1e-12).all()) and bool((smaller >= 0).all())


# -- bad input, memory ---------------------------------------------------------------------------------------------


ROWS, WIDTH, CODES, CHUNK = 64, 4, 4096, 64 * 128
FULL, TILE, GRADS = 4 * ROWS * CODES, 4 * CHUNK, 4 * (ROWS * WIDTH + CODES * WIDTH)


def memory(function: Callable[..., Tensor], *rest: object) -> Allocated:
    inputs = models(ROWS, WIDTH, CODES, torch.float32)
    student = [x.requires_grad_() for x in inputs[:2]]
    with Allocated() as allocated:
        function(*student, *inputs[2:], *rest).sum().backward()
    return allocated


@KINDS
def test_memory(kind: str) -> None:
    """Small tensors [N] are a few percent of a tile; a tile's copies are at most ten."""
    assert memory(full, kind, 0.5, 1.0).peak > 6 * FULL, "the ruler sees the full softmaxes"
    tiled = memory(fused_divergence, kind, 0.5, 1.0, CHUNK)
    assert tiled.largest <= max(TILE, GRADS) and tiled.peak <= GRADS + 10 * TILE
    assert tiled.peak <= 0.2 * memory(full, kind, 0.5, 1.0).peak

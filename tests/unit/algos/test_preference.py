"""Preference losses by hand, forward and gradient."""

from __future__ import annotations

import math
from math import exp, log

import pytest
import torch
from torch import Tensor

from audiorl.algos.preference import (
    anchored,
    cdpo,
    cpo,
    dpo,
    ipo,
    kto,
    kto_baseline,
    ld_dpo,
    length_expert,
    length_logit,
    orpo,
    pairwise,
    process_reward,
    r_dpo,
    sampo,
    simpo,
)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigma(x: float) -> float:
    return 1 / (1 + exp(-x))


# h = (-10 + 12) - (-20 + 17) = 5
CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = t(-10), t(-20), t(-12), t(-17)
PAIR = (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)


def test_dpo() -> None:
    chosen = CHOSEN.clone().requires_grad_(True)
    loss = dpo(chosen, *PAIR[1:], beta=0.2)
    assert loss.item() == pytest.approx(-log(sigma(1.0)))
    loss.sum().backward()
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-0.2 * sigma(-1.0))


def test_dpo_without_preference_is_log_two_and_never_overflows() -> None:
    assert dpo(CHOSEN, REJECTED, CHOSEN, REJECTED).item() == pytest.approx(log(2))
    assert dpo(t(-1e4), t(0), t(0), t(-1e4), beta=1.0).item() == pytest.approx(2e4)


def test_cdpo() -> None:
    expected = -0.9 * log(sigma(1.0)) - 0.1 * log(sigma(-1.0))
    assert cdpo(*PAIR, beta=0.2, label_smoothing=0.1).item() == pytest.approx(expected)
    assert torch.equal(cdpo(*PAIR, label_smoothing=0.0), dpo(*PAIR))
    with pytest.raises(ValueError, match="label_smoothing"):
        cdpo(*PAIR, label_smoothing=0.5)


def test_ipo() -> None:
    assert ipo(*PAIR, beta=0.25).item() == pytest.approx((5 - 2) ** 2)


def test_r_dpo_gives_a_longer_chosen_answer_the_smaller_gradient() -> None:
    assert r_dpo(*PAIR, t(30), t(10), beta=0.2, alpha=0.01).item() == pytest.approx(-log(sigma(1.0 + 0.2)))
    gradients = []
    for length in (10, 30):
        chosen = CHOSEN.clone().requires_grad_(True)
        r_dpo(chosen, *PAIR[1:], t(length), t(10)).sum().backward()
        assert chosen.grad is not None
        gradients.append(abs(chosen.grad.item()))
    assert gradients[1] < gradients[0]


LONG, SHORT = t(-1, -2, -3, -4), t(-5, -6)
REF_LONG, REF_SHORT = t(-1.5, -2.5, -3.5, -4.5), t(-4, -5)  # ratios 0.5 each, -1 each


def test_sampo_compares_equally_many_tokens() -> None:
    loss = sampo([LONG], [SHORT], [REF_LONG], [REF_SHORT], beta=0.1)
    assert loss.item() == pytest.approx(-log(sigma(0.1 * (2 * 0.5 + 2))))
    uneven = [t(1, 10, 100, 1000)]  # which tokens are drawn shows in the sum
    zero = [torch.zeros(4, dtype=torch.float64)]
    seen = set()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        h = sampo(uneven, [t(0, 0)], zero, [t(0, 0)], beta=1e-6, generator=generator)
        total = round(-log(exp(h.item()) - 1) / 1e-6)
        digits = f"{total:04d}"
        assert digits.count("1") == 2 and digits.count("0") == 2, total
        seen.add(total)
    assert len(seen) == 6


def test_ld_dpo() -> None:
    loss = ld_dpo([LONG], [SHORT], [REF_LONG], [REF_SHORT], beta=0.1, alpha=0.5)
    assert loss.item() == pytest.approx(-log(sigma(0.1 * (1.0 + 0.5 * 1.0 + 2.0))))
    whole = dpo(LONG.sum()[None], SHORT.sum()[None], REF_LONG.sum()[None], REF_SHORT.sum()[None])
    torch.testing.assert_close(ld_dpo([LONG], [SHORT], [REF_LONG], [REF_SHORT], alpha=1.0), whole)
    with pytest.raises(ValueError, match=r"pair 0.*different length"):
        ld_dpo([LONG], [SHORT], [SHORT], [REF_SHORT])
    with pytest.raises(ValueError, match=r"pair 0.*no tokens"):
        sampo([LONG], [t()], [REF_LONG], [t()])


def test_simpo() -> None:
    # 2·(-10/5) - 2·(-20/8) - 0.5 = 0.5
    assert simpo(CHOSEN, REJECTED, t(5), t(8), beta=2.0, gamma=0.5).item() == pytest.approx(-log(sigma(0.5)))


def test_cpo() -> None:
    assert cpo(CHOSEN, REJECTED, beta=0.1, alpha=0.3).item() == pytest.approx(-log(sigma(1.0)) + 3.0)


def test_orpo() -> None:
    good, bad = log(0.5), log(0.2)  # mean log-probs; odds 1 and 1/4
    loss = orpo(t(4 * good), t(3 * bad), t(4), t(3), lam=0.1)
    assert loss.item() == pytest.approx(log(2) - 0.1 * log(sigma(log(1.0) - log(0.25))), rel=1e-5)
    certain = t(-1e-9).requires_grad_(True)  # 1 - e^m would be 0 in float32
    loss = orpo(certain, t(-50), t(1), t(1))
    loss.sum().backward()
    assert math.isfinite(loss.item()) and certain.grad is not None and math.isfinite(certain.grad.item())


def test_kto() -> None:
    z = kto_baseline(t(-3, -4), t(-3.5, -4.1))
    assert z.item() == pytest.approx(0.3)
    losses = kto(t(-8, -8), t(-10, -10), torch.tensor([True, False]), z, beta=0.5, undesirable_weight=2.0)
    torch.testing.assert_close(losses, t(1 - sigma(0.5 * 1.7), 2 * (1 - sigma(-0.5 * 1.7))))
    assert kto_baseline(t(-9, -9), t(-1, -1)).item() == 0
    with pytest.raises(ValueError, match="at least two"):
        kto_baseline(t(-1), t(-1))


def test_pairwise() -> None:
    assert pairwise(t(2), t(0.5), margin=1.0).item() == pytest.approx(-log(sigma(0.5)))
    assert pairwise(t(2), t(0.5), log_exp=True).item() == pytest.approx(log(1 + exp(-1.5)))
    # as published: c times the mean of both squared scores, (2² + 0.5²) / 2 = 2.125
    assert pairwise(t(2), t(0.5), regulariser=0.01).item() == pytest.approx(-log(sigma(1.5)) + 0.01 * 2.125)
    with pytest.raises(ValueError, match="no margin"):
        pairwise(t(2), t(1), margin=1.0, log_exp=True)


def test_process_reward() -> None:
    logits = torch.tensor([[log(3.0), 0.0, 5.0], [0.0, 0.0, -9.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    hard = torch.tensor([0, 1, -100])
    assert process_reward(logits, hard, (0, 1)).tolist() == pytest.approx([log(4 / 3), log(2), 0.0], rel=1e-5)
    whole = process_reward(logits, hard)
    assert whole[0].item() == pytest.approx(-log(3 / (3 + 1 + exp(5))), rel=1e-5) and whole[2] == 0
    soft = torch.tensor([0.25, 1.0, -100.0], dtype=torch.float64)
    expected = [-(0.25 * log(0.75) + 0.75 * log(0.25)), log(2), 0.0]
    assert process_reward(logits, soft, (0, 1)).tolist() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="none of the label_ids"):
        process_reward(logits, torch.tensor([2, 1, -100]), (0, 1))
    with pytest.raises(ValueError, match="two label_ids"):
        process_reward(logits, soft)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        process_reward(logits, soft + 0.5, (0, 1))


def test_the_anchor_by_hand() -> None:
    """Log-ratios 2 and -1, β 0.5, δ 0.25: -log σ(0.75), -log σ(-0.75). It pulls most where the answer lost most."""
    chosen = t(-3, -5).requires_grad_()
    loss = anchored(chosen, t(-5, -4), beta=0.5, anchor=0.25)
    assert loss.tolist() == pytest.approx([log(1 + exp(-0.75)), log(1 + exp(0.75))])
    loss.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.5 / (1 + exp(0.75)), -0.5 / (1 + exp(-0.75))])


@pytest.mark.parametrize("longer", [4, 8, 10])
def test_the_length_expert_is_the_most_probable_slope(longer: int) -> None:
    """`longer` of 10 chosen answers are 3 tokens longer, the rest 3 shorter: all at tanh(±1), the gradient 0."""
    slope, scale = length_expert(torch.tensor([3] * longer + [-3] * (10 - longer)))
    assert scale == pytest.approx(3)
    x = math.tanh(1)
    p = 1 / (1 + exp(-slope * x))
    assert slope / 10 == pytest.approx(x * (longer * (1 - p) - (10 - longer) * p))
    assert (slope > 0) is (longer > 5) and abs(slope) < 10
    assert length_logit(t(6, -3), slope, scale).tolist() == pytest.approx([slope * math.tanh(2), -slope * x])


def test_the_length_expert_of_equal_lengths_knows_nothing() -> None:
    assert length_expert(torch.tensor([0, 0])) == (0.0, 1.0)

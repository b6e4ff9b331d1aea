"""Preference losses by hand, forward and gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from audiorl.algos.preference import (
    PAIR_LOSSES,
    PairLogprobs,
    anchored,
    bradley_terry,
    cdpo,
    cpo,
    dpo,
    dpo_norm,
    ipo,
    kto,
    kto_baseline,
    ld_dpo,
    length_expert,
    length_logit,
    orpo,
    process_reward,
    r_dpo,
    sampo,
    simpo,
)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigma(x: float) -> float:
    return 1 / (1 + exp(-x))


def one(tokens: Tensor, length: int = 1) -> Tensor:
    """An answer of `length` equal tokens whose log-probs sum to `tokens`."""
    return tokens.expand(length) / length


def pair(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, **options: Any) -> PairLogprobs:
    return PairLogprobs([chosen], [rejected], [ref_chosen], [ref_rejected], **options)


# h = (-10 + 12) - (-20 + 17) = 5
CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = t(-10), t(-20), t(-12), t(-17)
PAIR = pair(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)


def test_dpo() -> None:
    chosen = CHOSEN.clone().requires_grad_(True)
    loss = dpo(replace(PAIR, chosen=[chosen]), beta=0.2)[0]
    assert loss.item() == pytest.approx(-log(sigma(1.0)))
    loss.sum().backward()
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-0.2 * sigma(-1.0))
    assert dpo(pair(CHOSEN, REJECTED, CHOSEN, REJECTED))[0].item() == pytest.approx(log(2))
    assert dpo(pair(t(-1e4), t(0), t(0), t(-1e4)), beta=1.0)[0].item() == pytest.approx(2e4), "never overflows"


def test_dpo_norm() -> None:
    """Of 2 and 4 tokens: (-10 + 12) / 2 - (-20 + 17) / 4 = 1.75."""
    pairs = pair(one(CHOSEN, 2), one(REJECTED, 4), one(REF_CHOSEN, 2), one(REF_REJECTED, 4))
    assert dpo_norm(pairs, beta=0.4)[0].item() == pytest.approx(-log(sigma(0.7)))


def test_cdpo() -> None:
    expected = -0.9 * log(sigma(1.0)) - 0.1 * log(sigma(-1.0))
    assert cdpo(PAIR, beta=0.2, label_smoothing=0.1)[0].item() == pytest.approx(expected)
    assert torch.equal(cdpo(PAIR, label_smoothing=0.0)[0], dpo(PAIR)[0])


def test_ipo() -> None:
    assert ipo(PAIR, beta=0.25)[0].item() == pytest.approx((5 - 2) ** 2)


def test_r_dpo_gives_a_longer_chosen_answer_the_smaller_gradient() -> None:
    gradients = {}
    for length in (10, 30):
        chosen = CHOSEN.clone().requires_grad_(True)
        answers = (one(chosen, length), one(REJECTED, 10), one(REF_CHOSEN, length), one(REF_REJECTED, 10))
        loss = r_dpo(pair(*answers), beta=0.2, alpha=0.01)[0]
        loss.sum().backward()
        assert chosen.grad is not None
        gradients[length] = abs(chosen.grad.item())
    assert loss.item() == pytest.approx(-log(sigma(1.0 + 0.2)))
    assert gradients[30] < gradients[10]


LONG, SHORT = t(-1, -2, -3, -4), t(-5, -6)
REF_LONG, REF_SHORT = t(-1.5, -2.5, -3.5, -4.5), t(-4, -5)  # ratios 0.5 each, -1 each
UNEVEN = pair(LONG, SHORT, REF_LONG, REF_SHORT)


def test_sampo_compares_equally_many_tokens() -> None:
    assert sampo(replace(UNEVEN, seeds=[0]), beta=0.1)[0].item() == pytest.approx(-log(sigma(0.1 * (2 * 0.5 + 2))))
    digits_of_sum = pair(t(1, 10, 100, 1000), t(0, 0), t(0, 0, 0, 0), t(0, 0))  # which tokens are drawn shows
    seen = set()
    for seed in range(40):
        h = sampo(replace(digits_of_sum, seeds=[seed]), beta=1e-6)[0]
        total = round(-log(exp(h.item()) - 1) / 1e-6)
        digits = f"{total:04d}"
        assert digits.count("1") == 2 and digits.count("0") == 2, total
        seen.add(total)
    assert len(seen) == 6


def test_ld_dpo() -> None:
    assert ld_dpo(UNEVEN, beta=0.1, alpha=0.5)[0].item() == pytest.approx(-log(sigma(0.1 * (1.0 + 0.5 * 1.0 + 2.0))))
    torch.testing.assert_close(ld_dpo(UNEVEN, alpha=1.0)[0], dpo(UNEVEN)[0])


def test_simpo() -> None:
    # 2·(-10/5) - 2·(-20/8) - 0.5 = 0.5
    pairs = PairLogprobs([one(CHOSEN, 5)], [one(REJECTED, 8)])
    assert simpo(pairs, beta=2.0, gamma=0.5)[0].item() == pytest.approx(-log(sigma(0.5)))


def test_cpo() -> None:
    assert cpo(PairLogprobs([CHOSEN], [REJECTED]), beta=0.1, alpha=0.3)[0].item() == pytest.approx(
        -log(sigma(1.0)) + 3.0
    )


def test_orpo() -> None:
    good, bad = log(0.5), log(0.2)  # mean log-probs; odds 1 and 1/4
    loss = orpo(PairLogprobs([t(*[good] * 4)], [t(*[bad] * 3)]), lam=0.1)[0]
    assert loss.item() == pytest.approx(log(2) - 0.1 * log(sigma(log(1.0) - log(0.25))), rel=1e-5)
    certain = t(-1e-9).requires_grad_(True)  # 1 - e^m would be 0 in float32
    loss = orpo(PairLogprobs([certain], [t(-50)]))[0]
    loss.sum().backward()
    assert math.isfinite(loss.item()) and certain.grad is not None and math.isfinite(certain.grad.item())


def test_every_loss_gives_the_margin_that_it_raises() -> None:
    """Of `UNEVEN`, whose log-ratios are 0.5 four times and -1 twice, and of its plain log-probs."""
    margins = {"dpo-norm": 0.5 + 1.0, "sampo": 2 * 0.5 + 2.0, "ld-dpo": 1.0 + 0.5 * 1.0 + 2.0}
    margins |= {"simpo": -10 / 4 + 11 / 2, "cpo": -10 + 11}
    odds = [m - log(1 - exp(m)) for m in (-10 / 4, -11 / 2)]
    margins["orpo"] = odds[0] - odds[1]
    for name, loss in PAIR_LOSSES.items():
        _, margin = loss(replace(UNEVEN, seeds=[0]))
        assert margin.item() == pytest.approx(margins.get(name, 2.0 + 2.0), rel=1e-6), name


def test_kto() -> None:
    z = kto_baseline(t(-3, -4), t(-3.5, -4.1))
    assert z.item() == pytest.approx(0.3)
    losses = kto(t(-8, -8), t(-10, -10), torch.tensor([True, False]), z, beta=0.5, undesirable_weight=2.0)
    torch.testing.assert_close(losses, t(1 - sigma(0.5 * 1.7), 2 * (1 - sigma(-0.5 * 1.7))))
    assert kto_baseline(t(-9, -9), t(-1, -1)).item() == 0


def test_bradley_terry() -> None:
    assert bradley_terry(t(2), t(0.5), margin=1.0).item() == pytest.approx(-log(sigma(0.5)))
    # as published: c times the mean of both squared scores, (2² + 0.5²) / 2 = 2.125
    assert bradley_terry(t(2), t(0.5), regulariser=0.01).item() == pytest.approx(-log(sigma(1.5)) + 0.01 * 2.125)


def test_process_reward() -> None:
    logits = torch.tensor([[log(3.0), 0.0, 5.0], [0.0, 0.0, -9.0]], dtype=torch.float64)
    assert process_reward(logits, t(1, 0), (0, 1)).tolist() == pytest.approx([log(4 / 3), log(2)], rel=1e-5)
    expected = [-(0.25 * log(0.75) + 0.75 * log(0.25)), log(2)]
    assert process_reward(logits, t(0.25, 1), (0, 1)).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_anchor_by_hand() -> None:
    """Log-ratios 2 and -1, β 0.5: -log σ(1), -log σ(-0.5). It pulls most where the answer lost most."""
    chosen = t(-3, -5).requires_grad_()
    loss = anchored(chosen, t(-5, -4), beta=0.5)
    assert loss.tolist() == pytest.approx([log(1 + exp(-1)), log(1 + exp(0.5))])
    loss.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.5 / (1 + exp(1)), -0.5 / (1 + exp(-0.5))])


@pytest.mark.parametrize("longer", [4, 8, 10])
def test_the_length_expert_is_the_most_probable_slope(longer: int) -> None:
    """`longer` of 10 chosen answers are 3 tokens longer, the rest 3 shorter: all at tanh(±1), the gradient 0."""
    slope, scale = length_expert(torch.tensor([3] * longer + [-3] * (10 - longer)))
    assert scale == pytest.approx(3)
    x = math.tanh(1)
    p = 1 / (1 + exp(-slope * x))
    assert slope / 10 == pytest.approx(x * (longer * (1 - p) - (10 - longer) * p))
    assert (slope > 0) is (longer > 5) and abs(slope) < 10
    assert length_expert(torch.tensor([0, 0])) == (0.0, 1.0), "equal lengths say nothing"
    assert length_logit(t(6, -3), slope, scale).tolist() == pytest.approx([slope * math.tanh(2), -slope * x])

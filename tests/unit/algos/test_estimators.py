"""Advantages, KL controllers and the value loss, by hand and against loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from audiorl.algos.advantages import (
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reinforce_returns,
    rloo,
    whiten,
)
from audiorl.algos.experimental import (
    dppo_loss,
    gdpo,
    gmpo_loss,
    maxrl,
    remax,
    sapo_loss,
)
from audiorl.algos.losses import KLController, LossInputs, cispo_loss, gspo_loss, ppo_clip_loss, tis_weights, value_loss
from audiorl.config import KLConfig


def gae_by_loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Backwards over the sampled tokens, one at a time."""
    out = torch.zeros_like(values)
    for b in range(len(values)):
        next_value = next_advantage = 0.0
        for t in reversed(range(values.shape[1])):
            if not mask[b, t]:
                continue
            delta = rewards[b, t] + gamma * next_value - values[b, t]
            next_advantage = float(delta + gamma * lam * next_advantage)
            next_value = float(values[b, t])
            out[b, t] = next_advantage
    return out


def test_gae_by_hand() -> None:
    """Three sampled tokens, γ = 0.5, λ = 0.5; an observed token between the first two must not show."""
    rewards = torch.tensor([[1.0, 0.0, 2.0, 4.0]])
    values = torch.tensor([[0.5, 9.0, 1.0, 2.0]])
    mask = torch.tensor([[True, False, True, True]])
    # δ: 1 + .5·1 - .5 = 1;  2 + .5·2 - 1 = 2;  4 - 2 = 2.  A: 1 + .25·2.5, 2 + .25·2, 2
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[1.625, 0.0, 2.5, 2.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.125, 0.0, 3.5, 4.0]]))


@settings(max_examples=40, deadline=None)
@given(
    length=st.sampled_from([1, 2, 63, 64, 65, 130, 300]),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
    density=st.sampled_from([1.0, 0.6, 0.1]),
    seed=st.integers(0, 1000),
)
def test_gae_equals_the_loop(length: int, gamma: float, lam: float, density: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(3, length, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, length, generator=g) < density
    mask[2] = False
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, gae_by_loop(rewards, values, mask, gamma, lam))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))
    assert not advantages[2].any()


def test_gae_over_blocks_of_blocks() -> None:
    """More than 64 blocks of 64: the recursion runs twice. Without discount it is the sum of what follows, less V."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5000, generator=g), torch.randn(2, 5000, generator=g)
    mask = torch.rand(2, 5000, generator=g) < 0.8
    advantages, _ = gae(rewards, values, mask, 1.0, 1.0)
    follows = torch.where(mask, rewards, 0.0).double().flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages, torch.where(mask, follows - values, 0.0).float(), atol=2e-4, rtol=1e-4)


def test_reinforce_returns_by_hand() -> None:
    rewards = torch.tensor([[1.0, 5.0, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    torch.testing.assert_close(reinforce_returns(rewards, mask, 0.5), torch.tensor([[3.0, 0.0, 4.0, 4.0]]))
    torch.testing.assert_close(reinforce_returns(rewards, mask), torch.tensor([[7.0, 0.0, 6.0, 4.0]]))


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([1.0, 7.0, 2.0, 6.0, 3.0])
    groups = ["a", "b", "a", "a", "c"]
    # a: 1 - (2+6)/2, 2 - (1+6)/2, 6 - (1+2)/2; b and c are alone
    torch.testing.assert_close(rloo(rewards, groups), torch.tensor([-3.0, 0.0, -1.5, 4.5, 0.0]))
    with pytest.raises(ValueError, match=r"rewards of shape \[5\] but 4 group ids"):
        rloo(rewards, groups[:4])


def test_mean_relative_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    advantages = maxrl(rewards, ["a", "a", "a", "a", "b", "b"])
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"a reward of -0\.5 is below 0"):
        maxrl(torch.tensor([1.0, -0.5]), ["a", "a"])


def test_mean_relative_gradient_is_that_of_the_right_answers_alone() -> None:
    """Σ A·logprob / G is the mean log-prob of the right answers less that of all, whose expected gradient is 0."""
    g = torch.Generator().manual_seed(0)
    logprobs, rewards = torch.randn(8, generator=g), torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
    advantages = maxrl(rewards, ["a"] * 8)
    expected = logprobs[rewards == 1].mean() - logprobs.mean()
    torch.testing.assert_close((advantages * logprobs).sum() / 8, expected)


def test_decoupled_relative_by_hand() -> None:
    """Two groups; the second reward, a hundred times as large, moves the policy only as much as its weight says."""
    rewards = torch.tensor([[1.0, 100.0], [0.0, 100.0], [1.0, 0.0], [0.0, 100.0]])
    s = math.sqrt(0.5)  # the unbiased standard deviation of (0, 1)
    sums = [0.5 / s, -0.5 / s, 0.5 / s - 0.5 * 50 / (100 * s), -0.5 / s + 0.5 * 50 / (100 * s)]
    mean, std = sum(sums) / 4, math.sqrt(sum((x - sum(sums) / 4) ** 2 for x in sums) / 3)
    advantages = gdpo(rewards, [1.0, 0.5], ["a", "a", "b", "b"], eps=1e-7)
    assert advantages.tolist() == pytest.approx([(x - mean) / std for x in sums], abs=1e-6)
    with pytest.raises(ValueError, match="but 1 weights"):
        gdpo(rewards, [1.0], ["a", "a", "b", "b"])


def test_remax_by_hand() -> None:
    torch.testing.assert_close(remax(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])), torch.tensor([-1.0, 1.0]))
    with pytest.raises(ValueError, match=r"remax: shapes differ: rewards \[2\], greedy_rewards \[1\]"):
        remax(torch.zeros(2), torch.zeros(1))


def test_whiten_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    # mean 2, unbiased variance 1
    torch.testing.assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    for same in (whiten(torch.full((2, 3), 4.0), mask), whiten(x, torch.zeros_like(mask))):
        assert torch.equal(same, torch.zeros(2, 3))


def test_whitening_over_ranks_is_that_of_the_whole_batch() -> None:
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(6, 9, generator=g), torch.rand(6, 9, generator=g) < 0.7
    whole = whiten(x, mask)
    halves, masks = x.split(3), mask.split(3)

    def other_rank(rank: int):  # type: ignore[no-untyped-def]
        """What an all-reduce would add from the other rank, in the order of the two calls."""
        kept = halves[rank][masks[rank]].double()
        mean = x[mask].double().mean()
        sums = [torch.stack([masks[rank].sum().double(), kept.sum()]), ((kept - mean) ** 2).sum()]
        return lambda t: t + sums.pop(0)

    for rank in (0, 1):
        part = whiten(halves[rank], masks[rank], other_rank(1 - rank))
        torch.testing.assert_close(part, whole.split(3)[rank])


def test_reinforce_plus_plus() -> None:
    """Token rewards -β·k1 and a score on the last token: returns 0.9, 1.0 and -0.9, -1.0 before whitening."""
    rewards = torch.tensor([[-0.1, 1.0, 0.0], [0.1, 0.0, -1.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    flat = torch.tensor([0.9, 1.0, -0.9, -1.0], dtype=torch.float64)
    expected = (flat / flat.std()).float()
    got = reinforce_plus_plus(rewards, mask)
    torch.testing.assert_close(got[mask], expected)
    assert not got[~mask].any()
    scores, groups = torch.tensor([3.0, 1.0, 5.0, 5.0]), ["a", "a", "b", "b"]
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, False]])
    # centred 1, -1, 0, 0; over tokens 1, 1, -1, 0, 0, 0: mean 1/6
    tokens = torch.tensor([1.0, 1.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = ((tokens - tokens.mean()) / tokens.std()).float()
    torch.testing.assert_close(reinforce_plus_plus_baseline(scores, groups, mask)[mask], expected)


def test_kl_controllers_by_hand() -> None:
    assert KLController(0.1).update(9.0) == KLController(0.1)
    state = KLController(0.2, KLConfig(control="log-space", target=0.1, gain=0.5))
    assert state.update(0.11).beta == pytest.approx(0.2 * (1 + 0.5 * 0.1))
    assert state.update(10.0).beta == pytest.approx(0.2 * 1.1)  # the error is clipped to 0.2
    assert state.update(0.0).beta == pytest.approx(0.2 * 0.9)
    assert state.beta == 0.2
    horizon = KLController(0.2, KLConfig(control="horizon", target=0.1, horizon=1000))
    assert horizon.update(0.2, samples=500).beta == pytest.approx(0.2 * (1 + 0.2 * 0.5))
    with pytest.raises(ValueError, match="observed KL is nan"):
        state.update(float("nan"))
    state = KLController(1.0, KLConfig(control="log-space"))  # of a policy whose KL falls with β
    for _ in range(300):
        state = state.update(0.02 / state.beta)
    assert 0.02 / state.beta == pytest.approx(0.05, rel=0.05), "it settles where the KL is its target"


def test_value_loss_by_hand() -> None:
    """Inside the clip; outside, where the clipped error is larger; outside, where the plain one is."""
    values = torch.tensor([1.1, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    returns = torch.tensor([2.0, 2.5, 0.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    loss, sums = value_loss(values, old, returns, weights)
    # 0.9², max(0.5², 1.3²), max(3², 1.2²)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.81 + 0.25 * 1.69 + 0.25 * 9))
    assert sums["value_clip_frac"].item() == pytest.approx(0.25)
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.5 * -0.9, 0.0, 0.25 * 3], dtype=torch.float64))
    plain, _ = value_loss(values, old, returns, weights, clip=None)
    assert plain.item() == pytest.approx(0.5 * (0.5 * 0.81 + 0.25 * 0.25 + 0.25 * 9))


def test_gspo_by_hand() -> None:
    """Two sequences of two tokens and one: ratios e^0.1 (clipped at 1.05, A > 0) and e^-0.02 (inside)."""
    lp = torch.tensor([0.3, -0.1, -0.02], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    weights = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1])
    old = torch.zeros(3, dtype=torch.float64)
    loss, sums = gspo_loss(LossInputs(lp, old, advantages, weights, sequence), 0.05, 0.05)
    inside = torch.tensor(-0.02, dtype=torch.float64).exp().item()
    assert loss.item() == pytest.approx(-(0.5 * 1.05 * 2 - 0.5 * inside))
    assert sums["clip_frac"].item() == pytest.approx(0.5)
    loss.backward()
    torch.testing.assert_close(lp.grad, torch.tensor([0.0, 0.0, 0.5 * inside], dtype=torch.float64))
    wide = lp.detach().clone().requires_grad_(True)
    gspo_loss(LossInputs(wide, old, advantages, weights, sequence), 0.5, 0.5)[0].backward()
    ratio = torch.tensor(0.1, dtype=torch.float64).exp().item()  # a sequence's gradient is shared by its tokens
    torch.testing.assert_close(wide.grad[:2], torch.full((2,), -0.5 * ratio * 2 / 2, dtype=torch.float64))


def test_gmpo_by_hand() -> None:
    """Log ratios 0.6 (held at 0.4, A > 0) and -0.9 (not held, A > 0); -0.6 (held at -0.4, A < 0) and 0.7 (not held)."""
    lp = torch.tensor([0.6, -0.9, -0.6, 0.7], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1])
    loss, sums = gmpo_loss(LossInputs(lp, torch.zeros_like(lp), advantages, weights, sequence), 0.4, 0.4)
    first, second = math.exp((0.4 - 0.9) / 2), math.exp((-0.4 + 0.7) / 2)
    assert loss.item() == pytest.approx(-(0.5 * 2 * first - 0.5 * second))
    assert sums["clip_frac"].item() == 0.5
    loss.backward()
    expected = [0.0, -0.5 * 2 * first / 2, 0.0, 0.5 * second / 2]
    torch.testing.assert_close(lp.grad, torch.tensor(expected, dtype=torch.float64))


def test_sapo_by_hand() -> None:
    ratio = torch.tensor([1.5, 0.5], dtype=torch.float64)
    lp = ratio.log().requires_grad_(True)
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    loss, _ = sapo_loss(LossInputs(lp, torch.zeros_like(lp), advantages, weights), 1.0, 2.0)
    up, down = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(1.0))
    assert loss.item() == pytest.approx(-0.5 * 4 * up + 0.5 * 2 * 2 * down)
    loss.backward()
    expected = [-0.5 * 4 * up * (1 - up) * 1.5, 0.5 * 2 * 4 * down * (1 - down) * 0.5]
    torch.testing.assert_close(lp.grad, torch.tensor(expected, dtype=torch.float64))


def test_cispo_by_hand() -> None:
    ratio = torch.tensor([0.5, 8.0], dtype=torch.float64)
    lp = ratio.log().requires_grad_(True)
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    loss, sums = cispo_loss(LossInputs(lp, torch.zeros_like(lp), advantages, weights), cap=5.0)
    loss.backward()
    torch.testing.assert_close(lp.grad, torch.tensor([-0.25, 5.0], dtype=torch.float64))
    assert sums["clip_frac"].item() == 0.5 and sums["ratio"].item() == pytest.approx(4.25)


def test_dppo_by_hand() -> None:
    """Probabilities .5 -> .8 and .01 -> .05: PPO at 0.2 clips both ratios, DPPO only the first."""
    p_old, p = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.01, 0.5, 0.5], [0.8, 0.05, 0.2, 0.2]))
    lp = p.log().requires_grad_(True)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    loss, sums = dppo_loss(x := LossInputs(lp, p_old.log(), advantages, weights), 0.2, 0.2)
    loss.backward()
    # the last token moved far, but against its advantage: it stays
    torch.testing.assert_close(lp.grad, torch.tensor([0.0, -0.25 * 5, 0.0, -0.25 * 0.4], dtype=torch.float64))
    assert sums["clip_frac"].item() == 0.5
    kl = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    for delta, held in ((kl - 1e-6, 0.0), (kl + 1e-6, -0.25 * 1.6)):
        lp.grad = None
        dppo_loss(x, delta, delta, "kl")[0].backward()
        assert lp.grad[0].item() == pytest.approx(held)
    assert dppo_loss(x, 1, 1, cap=2.0)[0].item() == pytest.approx(
        -0.25 * (1.6 * math.log(0.8) + 2.0 * math.log(0.05) - 0.4 * math.log(0.2) + 0.4 * math.log(0.2))
    )


def test_first_update_has_one_gradient_whatever_the_loss() -> None:
    """At ratio 1, clip, CISPO, SAPO, DPPO and (for equal lengths' weights) GSPO and GMPO are all REINFORCE."""
    g = torch.Generator().manual_seed(0)
    lp = torch.randn(6, generator=g)
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = torch.randn(2, generator=g)[sequence]
    grads = []
    for loss in (ppo_clip_loss, cispo_loss, sapo_loss, dppo_loss, gspo_loss, gmpo_loss):
        x = lp.clone().requires_grad_(True)
        loss(LossInputs(x, lp, advantages, torch.full((6,), 1 / 6), sequence))[0].backward()
        grads.append(x.grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def test_engine_correction_by_hand() -> None:
    old, engine = torch.tensor([0.5, 0.2, 0.9]).log(), torch.tensor([0.25, 0.4, 0.1]).log()
    torch.testing.assert_close(tis_weights(old, engine), torch.tensor([2.0, 0.5, 2.0]))

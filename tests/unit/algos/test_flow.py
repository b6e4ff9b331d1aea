"""Flow matching: hand-computed steps, and the closed form on a Gaussian, whose velocity and score are known."""

import math
import random
from itertools import pairwise

import pytest
import torch

from audiorl.algos import flow
from audiorl.algos.losses import LossInputs
from audiorl.algos.preference import PairLogprobs, dpo
from audiorl.config.flow import FlowConfig

MEAN, STD = 1.5, 0.5  # Of the sounds x0
torch.manual_seed(0)


def velocity(x, t):
    """E[ε - x0 | x_t = x] for x0 ~ N(MEAN, STD²)."""
    centred = (x - (1 - t) * MEAN) / ((1 - t) ** 2 * STD**2 + t**2)
    return t * centred - (MEAN + (1 - t) * STD**2 * centred)


def close_to_marginal(x, t):
    """Whether mean and variance of samples x [F, 1] are those of x_t within 3 σ."""
    variance = (1 - t) ** 2 * STD**2 + t**2
    off = abs(float(x.mean()) - (1 - t) * MEAN) / math.sqrt(variance / len(x))
    return off < 3 and abs(float(x.var()) / variance - 1) / math.sqrt(2 / len(x)) < 3


@pytest.mark.parametrize(("noise", "level"), [("sde", 0.7), ("dance", 0.3), (None, 0.0)])
def test_marginals_agree_at_every_time(noise, level):
    generator = torch.Generator().manual_seed(1)
    t = 0.98  # σ of Flow-SDE is infinite at 1, where a first step of any width is coarse
    x = (1 - t) * MEAN + math.sqrt((1 - t) ** 2 * STD**2 + t**2) * torch.randn(4000, 1, generator=generator)
    times = torch.linspace(t, 0, 400, dtype=torch.float64).tolist()
    for t, next_t in pairwise(times):
        v = velocity(x, t)
        if noise is None or next_t == 0:
            x = x + v * (next_t - t)
        else:
            x = flow.transition(x, v, t, next_t, noise, level).sample(torch.randn(x.shape, generator=generator))
        assert close_to_marginal(x, next_t), (noise, next_t)


def test_cps_keeps_the_noise_of_a_point_and_loses_variance_of_a_spread():
    x = torch.full((1, 1), 0.9)  # x_t of a single sound: v is exact, so any step is
    t, next_t, sound = 0.6, 0.5, 0.2
    v = (x - sound) / t
    step = flow.transition(x, v, t, next_t, "cps", 0.8)
    noise = (x - (1 - t) * sound) / t
    new = next_t * math.sin(0.4 * math.pi)
    torch.testing.assert_close(step.mean, 0.5 * sound + math.sqrt(next_t**2 - new**2) * noise)
    assert float(step.std) == pytest.approx(new)
    assert float(step.std**2) + (next_t**2 - new**2) == pytest.approx(next_t**2)  # all the noise there is at t'
    variance = 0.1**2 * STD**2 + 0.9**2  # of x_t, which a step takes on by the slope of its mean
    for t, next_t in [(0.9 - 0.01 * i, 0.89 - 0.01 * i) for i in range(80)]:
        ends = torch.tensor([[0.0], [1.0]])
        step = flow.transition(ends, velocity(ends, t), t, next_t, "cps", 0.8)
        variance = float(step.mean[1] - step.mean[0]) ** 2 * variance + float(step.std) ** 2
    assert variance < 0.75 * (0.9**2 * STD**2 + 0.1**2)


def test_flow_sde_by_hand():
    x, v, a, t, next_t = torch.tensor([[0.3, -1.2]]), torch.tensor([[0.5, 0.1]]), 0.7, 0.6, 0.5
    step, dt = flow.transition(x, v, t, next_t, "sde", a), next_t - t
    sigma = a * math.sqrt(t / (1 - t))
    published = x * (1 + sigma**2 / (2 * t) * dt) + v * (1 + sigma**2 * (1 - t) / (2 * t)) * dt
    torch.testing.assert_close(step.mean, published)
    torch.testing.assert_close(step.mean, x * (1 + a**2 * dt / (2 * (1 - t))) + (1 + a**2 / 2) * v * dt)
    assert float(step.std) == pytest.approx(sigma * math.sqrt(-dt))
    first = flow.transition(x, v, 1.0, 0.9, "sde", a)
    assert float(first.std) == pytest.approx(a * math.sqrt(1 / 0.1 * 0.1))
    after = torch.tensor([[0.1, -1.0]])
    expected = torch.distributions.Normal(step.mean, step.std).log_prob(after).mean()
    torch.testing.assert_close(step.logprobs(after, [1]), expected[None])
    other = torch.distributions.Normal(step.mean + 0.2, step.std.expand(1, 2))
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(step.mean, step.std), other).mean()
    torch.testing.assert_close(flow.gaussian_kl(step.mean, step.mean + 0.2, step.std, [1]), kl[None])


def test_log_probs_of_a_window_are_those_of_the_full_run_and_of_single_clips():
    lengths, times = [3, 5], flow.sampling_times(6, shift=2.0)
    x, generator = torch.randn(8, 4), torch.Generator().manual_seed(2)
    path, full = [x], []
    for t, next_t in pairwise(times[:-1]):
        step = flow.transition(path[-1], velocity(path[-1], t), t, next_t)
        path.append(step.sample(torch.randn(8, 4, generator=generator)))
        full.append(step.logprobs(path[-1], lengths))
    for i in flow.noisy_range("window", 6, 2, random.Random(3)):
        clips = zip(path[i].split(lengths), path[i + 1].split(lengths), lengths, strict=True)
        t, next_t = times[i], times[i + 1]
        alone = [flow.transition(a, velocity(a, t), t, next_t).logprobs(b, [n]) for a, b, n in clips]
        assert torch.equal(torch.cat(alone), full[i])


@pytest.mark.parametrize(("solver", "ratio"), [("euler", (1.9, 2.1)), ("midpoint", (3.7, 9)), ("dpm++", (3.7, 4.3))])
def test_solvers_follow_the_ode_at_their_order(solver, ratio):
    x, errors = torch.tensor([[0.4], [-2.0]], dtype=torch.float64), []
    for start, end in ((1.0, 0.0), (0.9, 0.1)):  # the ODE of a Gaussian keeps how many deviations from the mean x lies
        (m, s), (end_m, end_s) = (((1 - t) * MEAN, math.sqrt((1 - t) ** 2 * STD**2 + t**2)) for t in (start, end))
        for steps in (20, 40):
            times = [start + (end - start) * i / steps for i in range(steps + 1)]
            wrong = flow.solve(velocity, x, times, solver) - (end_m + end_s * (x - m) / s)
            errors.append(float(wrong.abs().max()))
    assert errors[0] < 0.08 if solver == "euler" else errors[0] < 0.012
    assert ratio[0] < errors[2] / errors[3] < ratio[1]


def test_which_steps_are_noisy():
    assert flow.noisy_range("all", 5, 2, random.Random(0)) == range(4)
    draws = {flow.noisy_range("branch", 24, 2, random.Random(i)) for i in range(400)}
    assert {(len(r), r.start <= 12) for r in draws} == {(2, True)} and len(draws) == 13
    draws = {flow.noisy_range("window", 4, 2, random.Random(i)).start for i in range(40)}
    assert draws == {0, 1}  # step 3, the last, has no noise
    for steps, window in ((4, 4), (1, 1)):
        with pytest.raises(ValueError, match="without noise"):
            flow.noisy_range("window", steps, window, random.Random(0))
    with pytest.raises(ValueError, match=r"sampling\.window is 24; it must be below sampling\.steps 24"):
        FlowConfig(window=24).check_trained()
    with pytest.raises(ValueError, match="without noise"):  # CPS's last step
        flow.transition(torch.zeros(1, 1), torch.zeros(1, 1), 0.1, 0.0, "cps")


def test_times():
    assert flow.sampling_times(2, shift=3.0) == [1.0, 0.75, 0.0]
    generator = torch.Generator().manual_seed(0)
    uniform = flow.training_times(4000, "uniform", generator=generator)
    normal = flow.training_times(4000, "logit-normal", generator=generator)
    assert abs(float(uniform.mean()) - 0.5) < 0.02 and abs(float(uniform.var()) - 1 / 12) < 0.01
    assert abs(float(normal.logit().mean())) < 0.05 and abs(float(normal.logit().std()) - 1) < 0.05
    torch.testing.assert_close(flow.shifted(torch.tensor([0.5]), 3.0), torch.tensor([0.75]))


def test_nft_gradient_at_the_old_policy_is_the_advantage_times_that_of_supervised_learning():
    x0, noise, old = torch.randn(7, 3), torch.randn(7, 3), torch.randn(7, 3)
    lengths, advantages, t = [4, 3], torch.tensor([2.0, -7.0]), 0.4
    v = old.clone().requires_grad_()
    flow.nft_loss(v, old, noise - x0, t, advantages, lengths, beta=0.3).sum().backward()
    error = flow.predicted_sound(flow.interpolate(x0, noise, t), old, t) - x0
    scale = flow.clip_means(error.abs(), lengths)
    a = torch.repeat_interleave(advantages.clamp(-5, 5) / scale / torch.tensor([12.0, 9.0]), torch.tensor(lengths))
    torch.testing.assert_close(v.grad, -2 * t * a[:, None] * error, atol=1e-6, rtol=1e-6)


def test_guard_ratio_has_mean_one_and_one_spread():
    """Its log-ratio is the mean of z·(mean - old mean): hand-computed from the noise of the step."""
    x, lengths = torch.randn(6, 4), [2, 4]
    step = flow.transition(x, velocity(x, 0.5), 0.5, 0.4)
    z = torch.randn(6, 4)
    after, shift = step.sample(z), 0.01 * torch.randn(6, 4)
    moved = flow.Transition(step.mean + shift, step.std)
    drift = flow.gaussian_kl(moved.mean, step.mean, step.std, lengths)
    lp, old = moved.logprobs(after, lengths), step.logprobs(after, lengths)
    a, weights, dt = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5]), torch.full((2,), -0.1)
    std = step.std.expand(2)
    loss, sums = flow.guard_loss(LossInputs(lp, old, a, weights), drift, std, dt, 1.0, 1.0)
    ratio = flow.clip_means(z * shift, lengths).exp()
    torch.testing.assert_close(loss, -(weights / 0.1 * ratio * a).sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums["ratio"], ratio.mean(), rtol=1e-5, atol=1e-6)


def test_crpo_is_dpo_and_at_equal_losses_log_two():
    w, l, ref_w, ref_l = torch.rand(4, 5).unbind(0)
    parts = ([-x[None] for x in xs] for xs in (w, l, ref_w, ref_l))
    expected = dpo(PairLogprobs(*parts), beta=1000.0)[0] + w
    torch.testing.assert_close(flow.crpo_loss(w, l, ref_w, ref_l, 2000.0), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(flow.crpo_loss(w, w, w, w, 2000.0), w + math.log(2), rtol=1e-6, atol=1e-6)


def test_flow_matching_loss_and_the_best_of_a_group():
    v, x0, noise = torch.tensor([[1.0], [0.0], [2.0]]), torch.zeros(3, 1), torch.tensor([[1.0], [2.0], [0.0]])
    torch.testing.assert_close(flow.flow_matching_loss(v, x0, noise, [2, 1]), torch.tensor([2.0, 4.0]))
    assert flow.best_and_worst([0.1, 0.5, 0.5, 0.2, 0.4, 0.5], ["a", "b", "b", "a", "b", "c"]) == [(3, 0), (1, 4)]
    torch.testing.assert_close(flow.matching(v).logprobs(noise - x0, [2, 1]), torch.tensor([-2.0, -4.0]))
    kl = flow.gaussian_kl(v, v + 3, flow.matching(v).std, [2, 1])
    torch.testing.assert_close(kl, torch.tensor([9.0, 9.0]))

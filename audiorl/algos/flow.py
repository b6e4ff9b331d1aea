"""Flow matching: paths between sound and noise, solvers, noisy steps with log-probs, and losses.

Everywhere x_t = (1 - t)·x0 + t·ε, with ε ~ N(0, I): t is 1 at noise and 0 at sound, and the velocity is v = ε - x0. A
sampler goes along `times` t_0 = 1 > … > t_n = 0. F5-TTS, CosyVoice and Matcha count the other way: t → 1 - t, v → -v.

Shapes: x, v and noise [F, D], the latent frames of B clips laid end to end, `lengths` [B] frames each; t a number for
all of them or [F, 1]. A *noisy step* takes x to x' ~ N(mean, std²), and is what a policy gradient is about: its
log-prob is the mean over the F·D numbers of a clip (Flow-GRPO, arXiv 2505.05470), so that ratios lie near 1 and clips
are tiny (1e-4). Steps of a solver have no noise and no log-prob.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from audiorl.algos.losses import Loss, LossInputs, check_shapes, ppo_clip_loss
from audiorl.config.flow import Noise, NoisyRule, Solver, Times

Time = float | Tensor
Velocity = Callable[[Tensor, float], Tensor]
"""(x [F, D], t) -> v [F, D]."""


def interpolate(x0: Tensor, noise: Tensor, t: Time) -> Tensor:
    """Return x_t, between sound x0 (t 0) and noise (t 1)."""
    return (1 - t) * x0 + t * noise


def predicted_sound(x: Tensor, v: Tensor, t: Time) -> Tensor:
    """Return x̂0, the sound at which the line through x with velocity v ends."""
    return x - t * v


def predicted_noise(x: Tensor, v: Tensor, t: Time) -> Tensor:
    """Return ε̂, the noise at which it begins."""
    return x + (1 - t) * v


def clip_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean of [F, D] or [F, 1] over the frames of each clip and their channels, [B]."""
    return torch.stack([part.mean() for part in values.split(list(lengths))])


# -- times -------------------------------------------------------------------------------------------------------------


def shifted(t: Tensor, shift: float) -> Tensor:
    """Move times towards noise for a shift above 1: s·t / (1 + (s - 1)·t) (SD3, arXiv 2403.03206, eq. 23)."""
    return shift * t / (1 + (shift - 1) * t)


def sampling_times(steps: int, shift: float = 1.0) -> list[float]:
    """Return the steps + 1 times from 1 to 0 that a sampler goes along, equally far apart before they are shifted."""
    return shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).tolist()


def training_times(
    count: int, times: Times = "logit-normal", shift: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw `count` times in (0, 1): uniform, or the sigmoid of a standard normal (SD3, eq. 19); then `shifted`."""
    if times == "uniform":
        drawn = torch.rand(count, generator=generator)
    elif times == "logit-normal":
        drawn = torch.randn(count, generator=generator).sigmoid()
    else:
        raise ValueError(f"training_times: {times!r} is neither 'uniform' nor 'logit-normal'")
    return shifted(drawn, shift)


# -- noisy steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Transition:
    """The distribution N(mean, std²) of x' after a noisy step."""

    mean: Tensor  # [F, D] float32
    std: Tensor  # [F, 1] or [], float32, above 0
    noise: Noise | Literal["none"] = "sde"

    def sample(self, z: Tensor) -> Tensor:
        """Return x' from standard normal z [F, D]."""
        return self.mean + self.std * z

    def logprobs(self, after: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the log-prob of x' [F, D] for each clip, [B], as a mean over its numbers.

        With CPS it is -(x' - mean)², without the division by 2·std² and the constant, as its authors train
        (arXiv 2509.05952): all steps then weigh the same, and clips are tinier (1e-5). So it is with "none".
        """
        square = (after.detach().float() - self.mean) ** 2
        if self.noise not in ("cps", "none"):
            square = square / (2 * self.std**2) + self.std.log() + 0.5 * math.log(2 * math.pi)
        return -clip_means(square, lengths)


def matching(v: Tensor) -> Transition:
    """Return a velocity [F, D] as a step to the noise - sound that it is to be, N(v, ½): its log-prob is minus
    `flow_matching_loss`, and `gaussian_kl` the mean of (v - ref_v)².

    A clipped ratio of such log-probs is that of FPO (arXiv 2507.21053), their policy gradient Advantage Weighted
    Matching (arXiv 2509.25050).
    """
    return Transition(v, v.new_full((1, 1), math.sqrt(0.5)).expand(len(v), 1), "none")


def transition(x: Tensor, v: Tensor, t: Time, next_t: Time, noise: Noise = "sde", level: float = 0.7) -> Transition:
    """Return the noisy step from t to next_t < t in place of x + v·(next_t - t), in float32.

    sde: σ = level·sqrt(t / (1 - t)), Flow-SDE (Flow-GRPO, arXiv 2505.05470; usual level 0.7). dance: σ = level (usual
    0.3; DanceGRPO, arXiv 2505.07818). Both are Euler steps of an SDE with the marginals of the ODE, and leave noise
    behind in a last step to t 0. cps: t' parts of noise of which sin(level·π/2) are new (usual 0.8; Flow-CPS, arXiv
    2509.05952). It leaves none behind, but is no such SDE: the noise of a step does not shrink with the step, and
    with many steps samples have less variance than the data. Raises ValueError where a step has no noise.
    """
    x, v, t, next_t = x.float(), v.float(), _time(t, x), _time(next_t, x)
    dt = next_t - t
    if noise == "cps":
        std = next_t * math.sin(level * math.pi / 2)
        old_noise = (next_t**2 - std**2).clamp(min=0).sqrt()
        mean = (1 - next_t) * predicted_sound(x, v, t) + old_noise * predicted_noise(x, v, t)
    else:
        sigma = torch.full_like(t, level)
        if noise == "sde":
            # At t 1 the density of sounds says nothing, σ is infinite: the next time stands in for it.
            sigma = level * (t / (1 - torch.where(t < 1, t, next_t))).sqrt()
        std = sigma * (-dt).sqrt()
        score = -predicted_noise(x, v, t) / t
        mean = x + v * dt - 0.5 * sigma**2 * score * dt
    if not bool((std > 0).all()):
        raise ValueError(f"a noisy step without noise ({noise}, level {level:g}): it has no log-prob; take an ODE step")
    return Transition(mean, std, noise)


def _time(t: Time, like: Tensor) -> Tensor:
    return torch.as_tensor(t, dtype=torch.float32, device=like.device)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the exact KL of two transitions of one std for each clip, [B]: the mean over its numbers, as of log-probs,
    of (mean - ref_mean)² / (2·std²).

    Flow-GRPO's code divides by 2·σ² with std² = σ²·(-dt): less than the KL by the step's width.
    """
    check_shapes("gaussian_kl", mean=mean, ref_mean=ref_mean)
    return clip_means((mean.float() - ref_mean.float()) ** 2 / (2 * std**2), lengths)


def noisy_range(rule: NoisyRule, steps: int, window: int, rng: random.Random) -> range:
    """Return which of `steps` steps are noisy.

    all: each but the last, whose noise would be heard as hiss. window: `window` steps that follow each other, the first
    drawn from all that leave the last step out (MixGRPO, arXiv 2507.21802). branch: likewise, drawn from the first half
    (Fast-GRPO, PrismAudio, arXiv 2511.18833); a group shares its path up to there. Draw once a group, so that its
    members differ by their noise alone. Raises ValueError for a window that does not fit.
    """
    if steps < 2:
        raise ValueError(f"noisy steps: {steps} step of the sampler leaves none, since the last is without noise")
    if rule == "all":
        return range(steps - 1)
    if not 1 <= window < steps:
        raise ValueError(f"noisy steps: a window of {window} does not fit into {steps} steps, the last without noise")
    latest = steps - 1 - window
    first = rng.randint(0, min(steps // 2, latest) if rule == "branch" else latest)
    return range(first, first + window)


# -- samplers ----------------------------------------------------------------------------------------------------------


Step = tuple[float, Tensor]
"""t of a step of dpm++, and the sound that it predicted."""


def step_velocity(velocity: Velocity, x: Tensor, v: Tensor, t: float, next_t: float, solver: Solver) -> Tensor:
    """Return the velocity of a solver's step from x with velocity v: v, or with midpoint the one halfway."""
    return v if solver != "midpoint" else velocity(x + v * ((next_t - t) / 2), (t + next_t) / 2)


def ode_step(
    x: Tensor, v: Tensor, t: float, next_t: float, solver: Solver = "euler", last: Step | None = None
) -> tuple[Tensor, Step | None]:
    """Return x at next_t < t, reached with a `step_velocity`, and what the next step takes as its `last`.

    dpm++ is 2M (arXiv 2211.01095, algorithm 2), which for straight paths is a step of Euler's and a correction from the
    step before. Without `last`, as after a noisy step, there is none.
    """
    after = x + v * (next_t - t)
    if solver != "dpm++":
        return after, None
    sound = predicted_sound(x, v, t)
    if last is not None and next_t > 0 and last[0] < 1:  # log signal-to-noise ratios are infinite at t 1 and t 0
        here, before, there = (math.log((1 - s) / s) for s in (t, last[0], next_t))
        after = after + (1 - next_t / t) * (there - here) / (2 * (here - before)) * (sound - last[1])
    return after, (t, sound)


def solve(velocity: Velocity, x: Tensor, times: Sequence[float], solver: Solver = "euler") -> Tensor:
    """Follow the ODE from x at times[0] to the last of `times`."""
    last = None
    for t, next_t in pairwise(times):
        v = step_velocity(velocity, x, velocity(x, t), t, next_t, solver)
        x, last = ode_step(x, v, t, next_t, solver, last)
    return x


# -- losses ------------------------------------------------------------------------------------------------------------


def flow_matching_loss(v: Tensor, x0: Tensor, noise: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean of |v - (ε - x0)|² for each clip, [B] (Lipman et al. 2023, arXiv 2210.02747; straight paths).

    RAFT (arXiv 2304.06767) is this loss on the best of n sounds, `best_and_worst`.
    """
    check_shapes("flow_matching_loss", v=v, x0=x0, noise=noise)
    return clip_means((v.float() - (noise - x0)) ** 2, lengths)


def best_and_worst(rewards: Sequence[float], group_ids: Sequence[str]) -> list[tuple[int, int]]:
    """Return the indices of the highest and of the lowest reward of each group, in the groups' order, the first of
    equal ones; none of a group whose rewards are all equal."""
    groups: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        groups.setdefault(group, []).append(i)
    pairs = [(max(g, key=rewards.__getitem__), min(g, key=rewards.__getitem__)) for g in groups.values()]
    return [(best, worst) for best, worst in pairs if best != worst]


def guard_loss(x: LossInputs, drift: Tensor, std: Tensor, dt: Tensor, clip_low: float, clip_high: float) -> Loss:
    """GRPO-Guard: clipped ratios whose mean is 1 and whose spread is the same at every step (arXiv 2510.22319).

    The ratio of a noisy step is exp((lp - lp_old + drift)·std), where drift [N] is the mean of (mean - old mean)² /
    (2·std²), `gaussian_kl`, and std [N] that of the step; its loss is divided by -dt [N].
    """
    check_shapes("guard_loss", logprobs=x.logprobs, drift=drift, std=std, dt=dt)
    ratio = (x.log_ratio + drift) * std
    guarded = replace(x, logprobs=ratio, old_logprobs=torch.zeros_like(ratio))
    loss, _ = ppo_clip_loss(replace(guarded, weights=x.weights / -dt), clip_low, clip_high)
    return loss, ppo_clip_loss(guarded, clip_low, clip_high)[1]


def nft_loss(
    v: Tensor,
    old_v: Tensor,
    target: Tensor,
    t: Time,
    advantages: Tensor,
    lengths: Sequence[int],
    beta: float = 1.0,
    max_advantage: float = 5.0,
) -> Tensor:
    """DiffusionNFT's loss for each clip, [B] (arXiv 2509.16117, eq. 5): needs no log-probs and takes any sampler.

    target [F, D]: noise - x0 of sounds x0 that the old policy made; velocities at x_t; advantages [B]. With
    r = clip(A / max_advantage, ±1) / 2 + 1/2 the velocity β·v + (1 - β)·old_v is to lead to a sound by r, and its
    mirror image at old_v by 1 - r; each squared error of the sounds, which is t·(target - v), is divided by its mean
    absolute error.
    """
    check_shapes("nft_loss", v=v, old_v=old_v, target=target)
    v, old_v = v.float(), old_v.detach().float()
    r = (advantages / max_advantage).clamp(-1, 1) / 2 + 0.5
    loss = torch.zeros_like(r)
    for share, velocity in ((r, beta * v + (1 - beta) * old_v), (1 - r, (1 + beta) * old_v - beta * v)):
        error = t * (target - velocity)
        scale = clip_means(error.detach().abs(), lengths).clamp(min=1e-5)
        loss = loss + share * clip_means(error**2, lengths) / (scale * beta)
    return max_advantage * loss


def crpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """DPO of flows with the loss of the chosen sound, -log σ(-β/2·[(l_w - l_l) - (l_w,ref - l_l,ref)]) + l_w (CRPO,
    TangoFlux, arXiv 2412.21037, eq. 3 and 6).

    Flow-matching losses [P] of P pairs under the policy and under the reference, each pair with the same t and noise.
    """
    check_shapes("crpo_loss", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    return -logsigmoid(-beta / 2 * margin) + chosen

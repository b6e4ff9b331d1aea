"""Policy and value losses over flat streams of sampled tokens, and the KL to the reference.

Shapes: N sampled tokens of all sequences in a mini-batch, or any part of it. Losses are *sums* of weighted tokens. The
weights of a mini-batch are made once from its global counts, so the sum over any split into micro-batches or ranks is
the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from audiorl.config import Aggregation, KLConfig, KLKind

NONE = torch.zeros(0, dtype=torch.long)  # A tensor of `LossInputs` that the loss does not use
MAX_LOG_RATIO = 80.0
"""Where a loss does not depend on a ratio, larger log ratios count as this: e^89 is infinite in float32, and a clipped
token's gradient would be 0 · ∞."""


def check_shapes(function: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors have one shape; None is an input that is not given.

    Others would broadcast: a loss over wrong shapes is a wrong number, not an error.
    """
    shapes = {name: list(t.shape) for name, t in tensors.items() if t is not None}
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise ValueError(f"{function}: shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The actions that a policy loss is a weighted sum over: sampled tokens, or single codes of frames, [N].

    Raises ValueError for tensors of different shapes, which would broadcast to a wrong number.
    """

    logprobs: Tensor  # [N] under the policy, with gradients
    old_logprobs: Tensor  # [N] under the policy before the step's updates
    advantages: Tensor  # [N]
    weights: Tensor  # [N] from `token_weights`; 0 where an action does not count
    sequence: Tensor = NONE
    """[N] int64, on the CPU: the sequence of each action, from 0; no sequence is split over two calls."""

    def __post_init__(self) -> None:
        tensors = {name: x for name, x in vars(self).items() if x is not NONE}
        check_shapes("a policy loss", **tensors)

    @property
    def log_ratio(self) -> Tensor:
        """Return the log of each action's probability over its old one, [N]."""
        return self.logprobs - self.old_logprobs


Loss = tuple[Tensor, dict[str, Tensor]]
"""A loss to differentiate, and `clip_frac`, `approx_kl` and `ratio`, each a sum weighted like the loss."""


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation = "sequence-mean-token-mean", constant_length: int | None = None
) -> list[float]:
    """Return the weight of every token of each sequence, for sequences of `lengths` sampled tokens.

    sequence-mean-token-mean: 1 / (M · N_i), GRPO and Ke-Omni-R. token-mean: 1 / Σ N_i, DAPO.
    sequence-mean-token-sum: 1 / (M · constant_length), Dr.GRPO. M counts the sequences with at least one token.
    """
    sequences = max(sum(n > 0 for n in lengths), 1)
    if aggregation == "sequence-mean-token-mean":
        return [1.0 / (sequences * max(n, 1)) for n in lengths]
    if aggregation == "token-mean":
        return [1.0 / max(sum(lengths), 1)] * len(lengths)
    if aggregation == "sequence-mean-token-sum":
        assert constant_length, "the response budget"
        return [1.0 / (sequences * constant_length)] * len(lengths)
    raise ValueError(f"token_weights: unknown aggregation {aggregation!r}")


def ppo_clip_loss(x: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Loss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7).

    `dual_clip` c > 1 bounds the loss of tokens with negative advantage by -c·A (Ye et al. 2020). Without it nothing
    bounds these: a ratio that float32 cannot hold makes the loss infinite.
    """
    log_ratio = x.log_ratio
    ratio = bounded(log_ratio, (x.advantages >= 0) | (x.weights == 0) | (dual_clip is not None)).exp()
    unclipped = ratio * x.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * x.advantages
    gain = torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        gain = torch.where(x.advantages < 0, torch.maximum(gain, dual_clip * x.advantages), gain)
    return -(x.weights * gain).sum(), ratio_sums(log_ratio, clipped < unclipped, x.weights)


def bounded(log_ratio: Tensor, where: Tensor) -> Tensor:
    """Return log ratios, at most `MAX_LOG_RATIO` where `where` is True."""
    return torch.where(where, log_ratio.clamp(max=MAX_LOG_RATIO), log_ratio)


@torch.no_grad()
def ratio_sums(log_ratio: Tensor, clipped: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return what a loss on ratios reports; `clipped` [N] bool marks the tokens whose ratio was held back."""
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return {
        "clip_frac": (weights * clipped).sum(),
        "approx_kl": (weights * (torch.expm1(log_ratio) - log_ratio)).sum(),
        "ratio": (weights * log_ratio.exp()).sum(),
    }


def gspo_loss(x: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5): PPO's clipped surrogate with one ratio a sequence.

    s = exp(mean_t(logprobs - old_logprobs)) stands at every token of its sequence.
    """
    mean = sequence_means(x.log_ratio, x.sequence)
    return ppo_clip_loss(replace(x, logprobs=mean, old_logprobs=torch.zeros_like(mean)), clip_low, clip_high)


def sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the mean of its sequence at every token, [N]. Where `sequence` is on the CPU no device is waited for."""
    count = torch.zeros(int(sequence.max()) + 1 if len(sequence) else 0, dtype=values.dtype, device=values.device)
    sequence = sequence.to(values.device, non_blocking=True)
    total = count.index_add(0, sequence, values)
    count = count.index_add(0, sequence, torch.ones_like(values))
    return (total / count.clamp(min=1))[sequence]


def cispo_loss(x: LossInputs, cap: float = 5.0) -> Loss:
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4): REINFORCE with truncated ratios, so that no token is left out.

    -sg(min(ratio, cap))·A·logprob. `clip_frac` counts the tokens at the cap.
    """
    log_ratio = x.log_ratio.detach()
    ratio = log_ratio.exp()
    loss = -(x.weights * ratio.clamp(max=cap) * x.advantages * x.logprobs).sum()
    return loss, ratio_sums(log_ratio, ratio > cap, x.weights)


def reinforce_loss(x: LossInputs) -> Loss:
    """Return the plain policy gradient, -A·logprob (Williams 1992). Old log-probs only make metrics."""
    loss = -(x.weights * x.advantages * x.logprobs).sum()
    return loss, ratio_sums(x.log_ratio.detach(), torch.zeros_like(x.weights), x.weights)


def tis_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling for an engine whose log-probs are not the trainer's (Yao et al. 2025).

    min(exp(old - rollout), cap), elementwise and constant: multiplies the tokens' loss weights. 1 where the engine gave
    nan.
    """
    check_shapes("tis_weights", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    weights = (old_logprobs - rollout_logprobs).detach().exp().clamp(max=cap)
    return weights.masked_fill(rollout_logprobs.isnan(), 1.0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """½·max((V - R)², (clip(V, V_old ± clip) - R)²) as a weighted sum over tokens (OpenAI baselines' PPO).

    All inputs [N]; `clip=None` leaves the plain squared error. Returns (loss, sums): the sum `value_clip_frac`,
    weighted like the loss.
    """
    check_shapes("value_loss", values=values, old_values=old_values, returns=returns, weights=weights)
    error = (values - returns) ** 2
    if clip is None:
        return 0.5 * (weights * error).sum(), {"value_clip_frac": torch.zeros_like(error.sum().detach())}
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (near - returns) ** 2
    with torch.no_grad():
        sums = {"value_clip_frac": (weights * (clipped > error)).sum()}
    return 0.5 * (weights * torch.maximum(error, clipped)).sum(), sums


# -- the KL ------------------------------------------------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Estimate KL(pi || pi_ref) from samples of pi, elementwise (Schulman 2020, "Approximating KL divergence").

    Two tensors of one shape. With d = lp - ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1.

    k1 is unbiased; k3 is unbiased, never negative, and what GRPO puts into the loss. Of k3 a d below -80 counts as -80,
    with gradient 0: float32 does not hold e^89.
    """
    check_shapes("kl_estimate", logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d**2
    d = d.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-d) + d


BETAS = (1e-12, 1e12)
"""Within which an adaptive β stays: at 0 or infinity it could never change again."""


@dataclass(frozen=True)
class KLController:
    """The KL's coefficient β, which follows the observed KL as `config.control` says; e = clip(KL/target - 1, ±0.2).

    fixed: it stays. horizon: β ← β·(1 + e·samples/horizon), `samples` being those since the last update. log-space:
    β ← β·(1 + gain·e), proportional control of log β. Both from Ziegler et al. 2019, arXiv 1909.08593, 2.2 (gain: K_β).
    β is divided by at most 10 at once, since the factor may be negative, and stays within `BETAS`.
    """

    beta: float
    config: KLConfig = KLConfig()

    def update(self, observed: float, samples: int = 1) -> Self:
        """Return the controller with the next coefficient. Raises ValueError for a KL that is not finite."""
        config = self.config
        if config.control == "fixed":
            return self
        if not math.isfinite(observed):
            raise ValueError(f"the observed KL is {observed}; the coefficient cannot follow it")
        error = min(max(observed / config.target - 1, -0.2), 0.2)
        change = config.gain * error if config.control == "log-space" else error * samples / config.horizon
        beta = self.beta * max(1 + change, 0.1)
        return replace(self, beta=min(max(beta, BETAS[0]), BETAS[1]))

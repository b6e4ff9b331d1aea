"""Losses and estimators from papers that no experiment of ours has needed: read them before you rely on them.

Shapes: B rollouts, K reward terms, N sampled tokens of all sequences in a mini-batch, or any part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from audiorl.algos.advantages import centre_groups, group_relative, identity
from audiorl.algos.losses import Loss, LossInputs, check_shapes, ratio_sums, sequence_means

# -- advantages --------------------------------------------------------------------------------------------------------


def maxrl(rewards: Tensor, group_ids: Sequence[str] | Tensor) -> Tensor:
    """MaxRL's advantage, (r - mean) / mean within each group (Tajwar et al. 2026, arXiv 2602.02710).

    With rewards of 0 and 1 the gradient is that of the mean log-prob of the right answers, which approaches maximum
    likelihood as groups grow. rewards [B], none below 0; group_ids: B labels. Returns [B]; a group of zeros has
    advantage 0. Raises ValueError for a reward below 0.
    """
    if bool((rewards < 0).any()):
        raise ValueError(f"maxrl divides by the group's mean: a reward of {float(rewards.min()):g} is below 0")
    centred, index, count = centre_groups(rewards, group_ids, "maxrl")
    mean = torch.zeros_like(count).index_add(0, index, rewards) / count
    return torch.where(mean[index] > 0, centred / mean[index], 0.0)


def gdpo(
    rewards: Tensor,
    weights: Sequence[float],
    group_ids: Sequence[str] | Tensor,
    eps: float = 1e-4,
    reduce: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """GDPO's advantage (Liu et al. 2026, arXiv 2601.05242): each of K rewards is normalised within its group, then the
    weighted sum is normalised over the batch.

    rewards [B, K]; K weights; group_ids: B labels. Returns [B]. The weights say how much each reward moves the policy,
    whatever its scale; a reward that is constant in a group does not count there. Standard deviations are unbiased.
    `reduce` sums a tensor over all ranks, which makes the batch that of all ranks.
    """
    if rewards.dim() != 2 or rewards.shape[1] != len(weights):
        raise ValueError(f"gdpo: rewards of shape {list(rewards.shape)} but {len(weights)} weights")
    columns = [w * group_relative(r, group_ids, eps=eps) for r, w in zip(rewards.unbind(1), weights, strict=True)]
    total = torch.stack(columns, 1).sum(1)
    # Terms that cancel leave rounding, which the division below would make a signal of.
    rounding = 3 * torch.finfo(total.dtype).eps * torch.stack(columns, 1).abs().sum(1)
    total = torch.where(total.abs() > rounding, total, 0.0)
    count, summed = reduce(torch.stack([total.new_tensor(float(len(total))), total.sum()]).double())
    centred = total.double() - summed / count.clamp(min=1)
    deviation = (reduce((centred**2).sum()) / (count - 1).clamp(min=1)).sqrt()
    return (centred / (deviation + eps if deviation > 0 else 1.0)).to(total.dtype)


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """ReMax's advantage, r minus the reward of the greedy answer to the same prompt (Li et al. 2023, arXiv 2310.10505).

    Both [B]: `greedy_rewards` repeats a prompt's value for each of its rollouts.
    """
    check_shapes("remax", rewards=rewards, greedy_rewards=greedy_rewards)
    return rewards - greedy_rewards


# -- losses ------------------------------------------------------------------------------------------------------------


def gmpo_loss(x: LossInputs, clip_low: float = 0.4, clip_high: float = 0.4) -> Loss:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673, eq. 4 and algorithm 1): a sequence's ratio is the geometric mean of its
    tokens' ratios, each clipped in log space to [-clip_low, clip_high] on the side that PPO clips.

    The ratio stands at every token of its sequence. `clip_frac` counts clipped tokens.
    """
    log_ratio = x.log_ratio
    held = log_ratio.clamp(-clip_low, clip_high)
    clipped = torch.where(x.advantages >= 0, torch.minimum(log_ratio, held), torch.maximum(log_ratio, held))
    gain = sequence_means(clipped, x.sequence).exp() * x.advantages
    return -(x.weights * gain).sum(), ratio_sums(log_ratio, clipped != log_ratio, x.weights)


def sapo_loss(x: LossInputs, positive: float = 1.0, negative: float = 1.05) -> Loss:
    """SAPO (Gao et al. 2025, arXiv 2511.20347, eq. 5 and 6): a soft gate in place of the clip.

    -A·4σ(τ(ratio - 1))/τ; τ is `positive` where A > 0, else `negative`. At ratio 1 the gradient is that of the plain
    surrogate. `clip_frac` is 0.
    """
    a = x.advantages
    tau = torch.where(a > 0, a.new_tensor(positive), a.new_tensor(negative))
    log_ratio = x.log_ratio
    gate = torch.sigmoid(tau * (log_ratio.clamp(max=20.0).exp() - 1)) * 4 / tau
    return -(x.weights * gate * a).sum(), ratio_sums(log_ratio, torch.zeros_like(x.weights), x.weights)


def dppo_loss(
    x: LossInputs,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    cap: float = 20.0,
) -> Loss:
    """DPPO (Qi et al. 2026, arXiv 2602.04879): REINFORCE with truncated ratios, without the tokens whose probability
    has moved too far in the direction of their advantage.

    How far is the divergence between old and new policy as distributions over "this token" and "another one": total
    variation |p - p_old|, or KL(p_old || p). A ratio says little about either for a rare token. A token is left out
    above `delta_high` where A > 0 and p > p_old, above `delta_low` where A <= 0 and p < p_old; `clip_frac` counts them.
    """
    log_ratio = x.log_ratio.detach().clamp(-20.0, 20.0)
    p, p_old = x.logprobs.detach().exp(), x.old_logprobs.exp()
    if divergence == "tv":
        distance = (p - p_old).abs()
    else:
        rest, rest_old = (1 - p + 1e-8).log(), (1 - p_old + 1e-8).log()
        distance = p_old * (x.old_logprobs - x.logprobs.detach()) + (1 - p_old) * (rest_old - rest)
    up, down = (distance > delta_high) & (p > p_old), (distance > delta_low) & (p < p_old)
    too_far = torch.where(x.advantages > 0, up, down)
    ratio = log_ratio.exp().clamp(max=cap).masked_fill(too_far, 0.0)
    loss = -(x.weights * ratio * x.advantages * x.logprobs).sum()
    return loss, ratio_sums(log_ratio, too_far, x.weights)

"""Policy and value losses over flat streams of sampled tokens.

Shapes: N sampled tokens of all sequences in a mini-batch, or any part of it. Losses are *sums* of weighted tokens. The
weights of a mini-batch are made once from its global counts, so the sum over any split into micro-batches or ranks is
the same loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from audiorl.algos.shapes import check_shapes
from audiorl.config import Aggregation


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation = "sequence-mean-token-mean", constant_length: int | None = None
) -> list[float]:
    """The weight of every token of each sequence, for sequences of `lengths` sampled tokens.

    sequence-mean-token-mean: 1 / (M · N_i), GRPO and Ke-Omni-R. token-mean: 1 / Σ N_i, DAPO.
    sequence-mean-token-sum: 1 / (M · constant_length), Dr.GRPO. M counts the sequences with at least one token.
    """
    sequences = max(sum(n > 0 for n in lengths), 1)
    if aggregation == "sequence-mean-token-mean":
        return [1.0 / (sequences * max(n, 1)) for n in lengths]
    if aggregation == "token-mean":
        return [1.0 / max(sum(lengths), 1)] * len(lengths)
    if aggregation == "sequence-mean-token-sum":
        if not constant_length:
            raise ValueError("token_weights: sequence-mean-token-sum needs constant_length (the response budget)")
        return [1.0 / (sequences * constant_length)] * len(lengths)
    raise ValueError(f"token_weights: unknown aggregation {aggregation!r}")


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), as a weighted sum over tokens.

    All inputs [N]; `weights` from `token_weights`, 0 where a token does not count. `dual_clip` c > 1 bounds the loss of
    tokens with negative advantage by -c·A (Ye et al. 2020). Returns (loss, sums): the sums `clip_frac`, `approx_kl`
    (k3 of old against new) and `ratio`, each weighted like the loss.
    """
    check_shapes("ppo_clip_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain = torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -(weights * gain).sum(), _ratio_sums(log_ratio, clipped < unclipped, weights)


@torch.no_grad()
def _ratio_sums(log_ratio: Tensor, clipped: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What a loss on ratios reports; `clipped` [N] bool marks the tokens whose ratio was held back."""
    return {
        "clip_frac": (weights * clipped).sum(),
        "approx_kl": (weights * (torch.expm1(log_ratio) - log_ratio)).sum(),
        "ratio": (weights * log_ratio.exp()).sum(),
    }


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequence: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5): PPO's clipped surrogate with one ratio a sequence.

    s = exp(mean_t(logprobs - old_logprobs)) stands at every token of its sequence. sequence [N] int64 numbers
    each token's sequence from 0; a sequence must not be split. The rest is as in `ppo_clip_loss`.
    """
    check_shapes(
        "gspo_loss",
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        sequence=sequence,
    )
    mean = _sequence_means(logprobs - old_logprobs, sequence)
    return ppo_clip_loss(mean, torch.zeros_like(mean), advantages, weights, clip_low, clip_high)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequence: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673, eq. 4 and algorithm 1): a sequence's ratio is the geometric mean of its
    tokens' ratios, each clipped in log space to [-clip_low, clip_high] on the side that PPO clips.

    The ratio stands at every token of its sequence. sequence as in `gspo_loss`. `clip_frac` counts clipped tokens.
    """
    check_shapes(
        "gmpo_loss",
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        sequence=sequence,
    )
    log_ratio = logprobs - old_logprobs
    held = log_ratio.clamp(-clip_low, clip_high)
    bounded = torch.where(advantages >= 0, torch.minimum(log_ratio, held), torch.maximum(log_ratio, held))
    gain = _sequence_means(bounded, sequence).exp() * advantages
    return -(weights * gain).sum(), _ratio_sums(log_ratio, bounded != log_ratio, weights)


def _sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    """The mean of its sequence at every token, [N]. Where `sequence` is on the CPU no device is waited for."""
    count = torch.zeros(int(sequence.max()) + 1 if len(sequence) else 0, dtype=values.dtype, device=values.device)
    sequence = sequence.to(values.device)
    total = count.index_add(0, sequence, values)
    count = count.index_add(0, sequence, torch.ones_like(values))
    return (total / count.clamp(min=1))[sequence]


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    positive: float = 1.0,
    negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO (Gao et al. 2025, arXiv 2511.20347, eq. 5 and 6): a soft gate in place of the clip.

    -A·4σ(τ(ratio - 1))/τ, summed with `weights`; τ is `positive` where A > 0, else `negative`. At ratio 1 the gradient
    is that of the plain surrogate. `clip_frac` is 0.
    """
    check_shapes("sapo_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    log_ratio = logprobs - old_logprobs
    tau = torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
    gate = torch.sigmoid(tau * (log_ratio.clamp(max=20.0).exp() - 1)) * 4 / tau
    return -(weights * gate * advantages).sum(), _ratio_sums(log_ratio, torch.zeros_like(weights), weights)


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO (Qi et al. 2026, arXiv 2602.04879): REINFORCE with truncated ratios, without the tokens whose probability
    has moved too far in the direction of their advantage.

    How far is the divergence between old and new policy as distributions over "this token" and "another one": total
    variation |p - p_old|, or KL(p_old || p). A ratio says little about either for a rare token. A token is left out
    above `delta_high` where A > 0 and p > p_old, above `delta_low` where A <= 0 and p < p_old; `clip_frac` counts them.
    """
    check_shapes("dppo_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    log_ratio = (logprobs - old_logprobs).detach().clamp(-20.0, 20.0)
    p, p_old = logprobs.detach().exp(), old_logprobs.exp()
    if divergence == "tv":
        distance = (p - p_old).abs()
    elif divergence == "kl":
        rest, rest_old = (1 - p + 1e-8).log(), (1 - p_old + 1e-8).log()
        distance = p_old * (old_logprobs - logprobs.detach()) + (1 - p_old) * (rest_old - rest)
    else:
        raise ValueError(f"dppo_loss: unknown divergence {divergence!r}; use 'tv' or 'kl'")
    too_far = torch.where(advantages > 0, (distance > delta_high) & (p > p_old), (distance > delta_low) & (p < p_old))
    ratio = log_ratio.exp().clamp(max=cap).masked_fill(too_far, 0.0)
    return -(weights * ratio * advantages * logprobs).sum(), _ratio_sums(log_ratio, too_far, weights)


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Each token's share of the covariance of log-prob and advantage, whose sum drives the entropy down: [N] -> [N].

    (A - mean A)·(logprob - mean logprob); Cui et al. 2025, arXiv 2505.22617, eq. 10.
    """
    check_shapes("covariances", logprobs=logprobs, advantages=advantages)
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_tokens(covariance: Tensor, fraction: float, low: float, high: float, seed: int) -> Tensor:
    """Clip-Cov's choice [N] bool: at random, `fraction` of all tokens, at least one, with `low` < covariance < `high`.

    Source: arXiv 2505.22617, eq. 11.
    """
    eligible = ((covariance > low) & (covariance < high)).nonzero().squeeze(-1).cpu()
    count = max(int(fraction * len(covariance)), 1)
    order = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(seed))
    return _chosen(covariance, eligible[order[:count]])


def kl_cov_tokens(covariance: Tensor, fraction: float) -> Tensor:
    """KL-Cov's choice [N] bool: the `fraction` of tokens with the largest covariance, at least one.

    Source: arXiv 2505.22617, eq. 13.
    """
    count = min(max(int(fraction * len(covariance)), 1), len(covariance))
    return _chosen(covariance, covariance.topk(count).indices)


def _chosen(like: Tensor, indices: Tensor) -> Tensor:
    chosen = torch.zeros(len(like), dtype=torch.bool, device=like.device)
    chosen[indices.to(like.device)] = True
    return chosen


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    chosen: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov (arXiv 2505.22617, eq. 12): PPO's clipped surrogate without the tokens `chosen` [N] by
    `clip_cov_tokens` among those of the mini-batch."""
    clips = clip_low, clip_high
    _, sums = ppo_clip_loss(logprobs, old_logprobs, advantages, weights, *clips)
    loss, of_others = ppo_clip_loss(logprobs, old_logprobs, advantages, weights.masked_fill(chosen, 0.0), *clips)
    return loss, sums | {"clip_frac": of_others["clip_frac"] + (weights * chosen).sum()}


def kl_cov_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, chosen: Tensor, coef: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov (arXiv 2505.22617, eq. 14): -ratio·A, plus coef·|log ratio| at the tokens `chosen` [N] by `kl_cov_tokens`.

    Nothing is clipped. At ratio 1, and so in the first update of a step, the penalty has no gradient.
    """
    check_shapes("kl_cov_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    log_ratio = logprobs - old_logprobs
    loss = (weights * (coef * chosen * log_ratio.abs() - log_ratio.exp() * advantages)).sum()
    return loss, _ratio_sums(log_ratio, torch.zeros_like(weights), weights)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, cap: float = 5.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4): REINFORCE with truncated ratios, so that no token is left out.

    -sg(min(ratio, cap))·A·logprob, summed with `weights`. `clip_frac` counts the tokens at the cap.
    """
    check_shapes("cispo_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.exp()
    loss = -(weights * ratio.clamp(max=cap) * advantages * logprobs).sum()
    return loss, _ratio_sums(log_ratio, ratio > cap, weights)


def reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient, -A·logprob, summed with `weights` (Williams 1992). Old log-probs only make metrics."""
    check_shapes("reinforce_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    loss = -(weights * advantages * logprobs).sum()
    return loss, _ratio_sums((logprobs - old_logprobs).detach(), torch.zeros_like(weights), weights)


def engine_correction(old_logprobs: Tensor, engine_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling for an engine whose log-probs are not the trainer's (Yao et al. 2025).

    min(exp(old - engine), cap), elementwise and constant: multiplies the tokens' loss weights.
    """
    check_shapes("engine_correction", old_logprobs=old_logprobs, engine_logprobs=engine_logprobs)
    return (old_logprobs - engine_logprobs).detach().exp().clamp(max=cap)


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

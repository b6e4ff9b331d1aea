"""The loss of the policy in one pack: surrogate, KL to the reference, entropy bonus.

The formulas are in `audiorl.algos`; here `RLConfig` chooses among them.

Shapes: N sampled tokens of a pack, Q codebooks where codec frames are among them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from audiorl.algos.experience import PolicyOutput
from audiorl.algos.kl import kl_estimate
from audiorl.algos.losses import (
    cispo_loss,
    clip_cov_loss,
    dppo_loss,
    engine_correction,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
)
from audiorl.config import RLConfig
from audiorl.train.batches import gather_code_mask, logprobs_by_code, sum_codebooks
from audiorl.train.rl.packs import Pack


def policy_loss(pack: Pack, output: PolicyOutput, config: RLConfig, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over a pack's tokens that `config` asks for, and this pack's share of the mini-batch's metrics.

    Needs advantages and the engine's log-probs; without `old_logprobs` the policy's own, detached (a single update);
    with `config.kl_in` "loss" and `ref_logprobs` the term `beta`·KL.
    """
    logprobs = logprobs_by_code(output)
    weights_N, means_N = pack.loss_weights_N, pack.mean_weights_N
    old, engine, advantages_N = (pack.gather(n) for n in ("old_logprobs", "engine_logprobs", "advantages"))
    assert advantages_N is not None and engine is not None
    old = logprobs.detach() if old is None else old
    old_N, engine_N = sum_codebooks(old), sum_codebooks(engine)
    surrogate_weights_N = weights_N
    if config.engine_cap is not None:
        surrogate_weights_N = weights_N * engine_correction(old_N, engine_N, config.engine_cap)
    loss, sums = surrogate(pack, logprobs, old, advantages_N, surrogate_weights_N, config)
    metrics = {
        "policy/loss": loss.detach(),
        "policy/clip_frac": sums["clip_frac"],
        "policy/approx_kl": sums["approx_kl"],
        "policy/ratio": sums["ratio"],
        "policy/engine_gap": (means_N * (old_N - engine_N).abs()).sum(),
        **pack.means("policy/entropy", output.entropy.detach()),
    }
    ref = pack.gather("ref_logprobs")
    if ref is not None and config.kl_in == "loss":
        kl = kl_estimate(logprobs, ref, config.kl_kind)
        loss = loss + beta * (weights_N * sum_codebooks(kl)).sum()
        metrics |= pack.kl_means(kl.detach())
    if config.entropy_coef:
        loss = loss - config.entropy_coef * (weights_N * output.entropy).sum()
    return loss, metrics


def surrogate(
    pack: Pack, logprobs: Tensor, old: Tensor, advantages_N: Tensor, weights_N: Tensor, config: RLConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient term over log-probs [N] or [N, Q]. Its metrics are means, whatever the loss's own weights.

    With `frame_ratio` "code" every sampled code is an action with the advantage and the weight of its frame.
    """
    sequence_N, chosen_N = pack.sequence_N, pack.chosen_N
    loss_weights, means_N = weights_N, pack.mean_weights_N
    code_mask = gather_code_mask(pack.experiences, torch.device("cpu"))
    if code_mask is not None and config.frame_ratio == "code":
        rows, codes = code_mask.nonzero(as_tuple=True)
        sequence_N = sequence_N[rows]
        rows, codes = rows.to(logprobs.device), codes.to(logprobs.device)
        logprobs, old = logprobs[rows, codes], old[rows, codes]
        advantages_N, loss_weights = advantages_N[rows], weights_N[rows]
        if config.codebook_weights:
            loss_weights = loss_weights * _code_weights(pack, config, rows, codes)
        chosen_N = None if chosen_N is None else chosen_N[rows]
    else:
        logprobs, old = sum_codebooks(logprobs), sum_codebooks(old)
    clips = config.clip_low, config.clip_high
    if config.loss in ("gspo", "gmpo"):
        by_sequence = gspo_loss if config.loss == "gspo" else gmpo_loss
        loss, sums = by_sequence(logprobs, old, advantages_N, loss_weights, sequence_N, *clips)
    elif config.loss in ("dppo-tv", "dppo-kl"):
        divergence: Literal["tv", "kl"] = "tv" if config.loss == "dppo-tv" else "kl"
        loss, sums = dppo_loss(logprobs, old, advantages_N, loss_weights, *clips, divergence, config.ratio_cap)
    elif chosen_N is not None and config.loss == "clip-cov":
        loss, sums = clip_cov_loss(logprobs, old, advantages_N, loss_weights, chosen_N, *clips)
    elif chosen_N is not None:
        loss, sums = kl_cov_loss(logprobs, old, advantages_N, loss_weights, chosen_N, config.cov_coef)
    elif config.loss == "sapo":
        taus = config.sapo_positive, config.sapo_negative
        loss, sums = sapo_loss(logprobs, old, advantages_N, loss_weights, *taus)
    elif config.loss == "cispo":
        loss, sums = cispo_loss(logprobs, old, advantages_N, loss_weights, config.ratio_cap)
    elif config.loss == "reinforce":
        loss, sums = reinforce_loss(logprobs, old, advantages_N, loss_weights)
    else:
        loss, sums = ppo_clip_loss(logprobs, old, advantages_N, loss_weights, *clips, config.dual_clip)
    share = means_N.sum() / loss_weights.sum().clamp_min(torch.finfo(loss_weights.dtype).tiny)
    return loss, {name: share * value for name, value in sums.items()}


def _code_weights(pack: Pack, config: RLConfig, rows: Tensor, codes: Tensor) -> Tensor:
    """`codebook_weights` of the entries (row, codebook); 1 for text tokens, which stand in column 0."""
    count = 0 if pack.frame_counts is None else pack.frame_counts.codebooks
    if len(config.codebook_weights) != count:
        raise ValueError(
            f"codebook_weights has {len(config.codebook_weights)} weights; the model has {count} codebooks"
        )
    weights = torch.tensor(config.codebook_weights, device=codes.device)
    return torch.where(pack.is_frame_N.to(rows.device)[rows], weights[codes], 1.0)

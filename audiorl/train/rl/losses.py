"""The loss of the policy in one micro-batch: surrogate, KL to the reference, entropy bonus.

The formulas are in `audiorl.algos`; here `RLConfig` chooses among them. Shapes: N sampled tokens of a micro-batch, Q
codebooks where codec frames are among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from audiorl.algos.experience import NoisySteps, PolicyOutput
from audiorl.algos.experimental import dppo_loss, gmpo_loss, sapo_loss
from audiorl.algos.flow import crpo_loss, guard_loss, nft_loss
from audiorl.algos.losses import (
    Loss,
    LossInputs,
    cispo_loss,
    gspo_loss,
    kl_estimate,
    ppo_clip_loss,
    ratio_sums,
    reinforce_loss,
    tis_weights,
)
from audiorl.config import RLConfig
from audiorl.train.batches import logprobs_by_code, sum_codebooks
from audiorl.train.rl.minibatch import MicroBatch
from audiorl.user_files import load_function

LOSSES: dict[str, Callable[[LossInputs, RLConfig], Loss]] = {
    "ppo": lambda x, c: ppo_clip_loss(x, c.clip_low, c.clip_high, c.loss_options.dual_clip),
    "gspo": lambda x, c: gspo_loss(x, c.clip_low, c.clip_high),
    "cispo": lambda x, c: cispo_loss(x, c.loss_options.ratio_cap),
    "reinforce": lambda x, c: reinforce_loss(x),
    "gmpo": lambda x, c: gmpo_loss(x, c.clip_low, c.clip_high),
    "sapo": lambda x, c: sapo_loss(x, c.loss_options.sapo_positive, c.loss_options.sapo_negative),
    "dppo-tv": lambda x, c: dppo_loss(x, c.clip_low, c.clip_high, "tv", c.loss_options.ratio_cap),
    "dppo-kl": lambda x, c: dppo_loss(x, c.clip_low, c.clip_high, "kl", c.loss_options.ratio_cap),
    "raft": lambda x, c: reinforce_loss(replace(x, advantages=torch.ones_like(x.advantages))),
}
"""`RLConfig.loss` by name."""


def policy_loss(
    micro: MicroBatch, output: PolicyOutput, config: RLConfig, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum over a micro-batch's tokens that `config` asks for, and its share of the metrics.

    Needs advantages and the engine's log-probs; without `old_logprobs` takes the policy's own, detached (a single
    update); with `config.kl.place` "loss" and `ref_logprobs` adds the term `beta`·KL.
    """
    logprobs, rollout = logprobs_by_code(output), micro.rollout_logprobs
    assert micro.advantages is not None and rollout is not None
    old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
    old_N, rollout_N = sum_codebooks(old), sum_codebooks(rollout)
    weights = micro.loss_weights
    if config.tis_cap is not None:  # the engine's distribution is not the trainer's
        weights = weights * tis_weights(old_N, rollout_N, config.tis_cap)
    loss, sums = _surrogate(micro, logprobs, old, weights, config, output.noisy_steps)
    metrics = {
        "policy/loss": loss.detach(),
        "policy/clip_frac": sums["clip_frac"],
        "policy/approx_kl": sums["approx_kl"],
        "policy/ratio": sums["ratio"],
        "policy/logprob_gap": (micro.mean_weights * (old_N - rollout_N).abs().nan_to_num(nan=0.0)).sum(),
        **micro.means("policy/entropy", output.entropy.detach()),
    }
    if micro.ref_logprobs is not None and config.kl.place == "loss":
        exact = None if output.noisy_steps is None else output.noisy_steps.kl
        kl = kl_estimate(logprobs, micro.ref_logprobs, config.kl.kind) if exact is None else exact
        loss = loss + beta * (micro.loss_weights * sum_codebooks(kl)).sum()
        metrics |= micro.kl_means(kl.detach())
    if config.entropy_coef:
        loss = loss - config.entropy_coef * (micro.loss_weights * output.entropy).sum()
    return loss, metrics


def _surrogate(
    micro: MicroBatch, logprobs: Tensor, old: Tensor, weights: Tensor, config: RLConfig, steps: NoisySteps | None
) -> Loss:
    """Return the policy gradient term from log-probs [N] or [N, Q] and weights [N], and its metrics' sums over tokens.

    With `frame_ratio` "code" every sampled code is an action with the advantage and the weight of its frame; a frame's
    metrics are the means over its codes.
    """
    assert micro.advantages is not None
    options, mean_weights = config.loss_options, micro.mean_weights
    inputs = LossInputs(sum_codebooks(logprobs), sum_codebooks(old), micro.advantages, weights, micro.sequence)
    if micro.code_mask is not None and options.frame_ratio == "code":
        rows, codes = micro.code_mask.nonzero(as_tuple=True)
        on_device, codes = (x.to(logprobs.device, non_blocking=True) for x in (rows, codes))
        weights = weights[on_device]
        codes_of_token = micro.code_mask.sum(1)[rows].to(logprobs.device, non_blocking=True)
        mean_weights = mean_weights[on_device] / codes_of_token
        if options.codebook_weights:
            count = 0 if micro.frame_counts is None else micro.frame_counts.codebooks
            if len(options.codebook_weights) != count:
                raise ValueError(
                    f"codebook_weights has {len(options.codebook_weights)} weights; the model has {count} codebooks"
                )
            by_code = torch.tensor(options.codebook_weights, device=codes.device)[codes]
            # A text token stands in column 0.
            weights = weights * torch.where(
                micro.is_frame.to(on_device.device, non_blocking=True)[on_device], by_code, 1.0
            )
        inputs = LossInputs(
            logprobs[on_device, codes],
            old[on_device, codes],
            micro.advantages[on_device],
            weights,
            micro.sequence[rows],
        )

    def loss_of(x: LossInputs) -> Loss:
        if config.loss in ("guard", "nft", "crpo"):
            assert steps is not None, "of flows alone"
            return _flow_loss(x, micro, steps, config)
        return _loss_named(config.loss)(x, config)

    loss, _ = loss_of(inputs)
    with torch.no_grad():  # sums carry the weights of the loss: once more with those of a mean over tokens
        _, sums = loss_of(replace(inputs, weights=mean_weights))
    return loss, sums


def _flow_loss(x: LossInputs, micro: MicroBatch, steps: NoisySteps, config: RLConfig) -> Loss:
    options = config.loss_options
    if config.loss == "guard":
        return guard_loss(x, steps.drift, steps.std, steps.dt, config.clip_low, config.clip_high)
    if config.loss == "nft":
        velocities = (steps.means, steps.old_means, steps.after)
        each = nft_loss(*velocities, steps.times, x.advantages, steps.lengths, options.nft_beta)
    else:
        assert micro.ref_logprobs is not None
        # Best and worst sounds take turns, each pair at the same times and noises.
        pairs = (-values.view(len(micro.experiences) // 2, 2, -1) for values in (x.logprobs, micro.ref_logprobs))
        (chosen, rejected), (ref_chosen, ref_rejected) = (losses.unbind(1) for losses in pairs)
        each = crpo_loss(chosen, rejected, ref_chosen, ref_rejected, options.crpo_beta)
        each = torch.stack([each, each], 1).flatten()
    sums = ratio_sums(x.log_ratio.detach(), torch.zeros_like(x.weights), x.weights)
    return (x.weights * each).sum(), sums


@cache
def _loss_named(name: str) -> Callable[[LossInputs, RLConfig], Loss]:
    if name in LOSSES:
        return LOSSES[name]
    path, _, function = name.rpartition(":")
    given = load_function(path, function, "loss")
    return lambda inputs, config: given(inputs)

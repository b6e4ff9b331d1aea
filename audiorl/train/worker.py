"""The trainer of one rank: log-probs, the loss, the optimizer. It sees experiences and gives metrics.

Shapes: L tokens of an experience, N sampled tokens of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from audiorl.algos.kl import kl_estimate
from audiorl.algos.losses import cispo_loss, engine_correction, gspo_loss, policy_loss, token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import GRPOConfig, OptimConfig
from audiorl.models import AudioPolicy, Reference
from audiorl.train.optim import Optimizer
from audiorl.types import Experience


class GRPOWorker:
    """Updates a policy from experiences that carry their advantages.

    `temperature` is the one that rollouts are sampled at: log-probs are taken under the same distribution.
    """

    def __init__(self, policy: AudioPolicy, grpo: GRPOConfig, optim: OptimConfig, temperature: float, max_tokens: int):
        self.policy = policy
        self.grpo = grpo
        self.temperature = temperature or 1.0
        self.max_tokens = max_tokens
        self.reference = policy.reference() if grpo.kl_beta > 0 else None
        updates = grpo.steps * grpo.epochs * grpo.mini_batches
        self.optimizer = Optimizer(policy.trainable(), optim, updates)

    def train(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """One step: old and reference log-probs, then `epochs` passes over `mini_batches`. Returns means of metrics."""
        experiences = list(experiences)
        if self.reference is not None:
            experiences = self._with_logprobs(experiences, self.reference, "ref_logprobs")
        # With a single update the old policy is the current one: its log-probs come with the loss.
        if self.grpo.epochs * self.grpo.mini_batches > 1:
            experiences = self._with_logprobs(experiences, self.policy, "old_logprobs")
        size = len(experiences) // self.grpo.mini_batches
        totals: dict[str, float] = defaultdict(float)
        updates = 0
        for _ in range(self.grpo.epochs):
            for start in range(0, len(experiences), size):
                for name, value in self._update(experiences[start : start + size]).items():
                    totals[name] += value
                updates += 1
        return {name: value / updates for name, value in totals.items()}

    def _update(self, experiences: Sequence[Experience]) -> dict[str, float]:
        self.optimizer.zero_grad()
        lengths = [int(e.loss_mask.sum()) for e in experiences]
        per_token = token_weights(lengths, self.grpo.aggregation, self.max_tokens)
        mean_weights = token_weights(lengths, "token-mean")
        totals: dict[str, float] = defaultdict(float)
        for indices in micro_batches(experiences, self.grpo.micro_batch_tokens, self.grpo.share_prompts):
            part = [experiences[i] for i in indices]
            n = [lengths[i] for i in indices]
            weights = _spread([per_token[i] for i in indices], n).to(self.policy.device)
            means = _spread([mean_weights[i] for i in indices], n).to(self.policy.device)
            loss, sums = self._loss(part, weights, means)
            loss.backward()
            for name, value in sums.items():
                totals[name] += float(value)
        totals.update(self.optimizer.step())
        self.policy.weights_changed()
        return totals

    def _loss(self, part: Sequence[Experience], weights: Tensor, means: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch: a sum of tokens weighted by the counts of the whole mini-batch.

        `means` [N] are the weights under which the metrics are plain means over all tokens of the mini-batch.
        """
        config = self.grpo
        out = self.policy.forward(pack_experiences(part, config.share_prompts), self.temperature)
        old = self._gather(part, "old_logprobs")
        old = out.logprobs.detach() if old is None else old
        advantages, engine = self._gather(part, "advantages"), self._gather(part, "engine_logprobs")
        assert advantages is not None and engine is not None
        counted = weights if config.engine_cap is None else weights * engine_correction(old, engine, config.engine_cap)
        loss, sums = self._surrogate(out.logprobs, old, advantages, counted, part)
        metrics = {
            "policy/loss": loss.detach(),
            "policy/entropy": (means * out.entropy.detach()).sum(),
            "policy/clip_frac": sums["clip_frac"],
            "policy/approx_kl": sums["approx_kl"],
            "policy/ratio": sums["ratio"],
            "policy/engine_gap": (means * (old - engine).abs()).sum(),
        }
        ref = self._gather(part, "ref_logprobs")
        if ref is not None:
            kl = kl_estimate(out.logprobs, ref, config.kl_kind)
            loss = loss + config.kl_beta * (weights * kl).sum()
            metrics["kl"] = (means * kl.detach()).sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (weights * out.entropy).sum()
        return loss, metrics

    def _surrogate(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, part: Sequence[Experience]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.grpo
        if config.loss == "gspo":
            counts = [int(e.loss_mask.sum()) for e in part]
            sequence = _spread(range(len(part)), counts).to(logprobs.device)
            return gspo_loss(logprobs, old, advantages, weights, sequence, config.clip_low, config.clip_high)
        if config.loss == "cispo":
            return cispo_loss(logprobs, old, advantages, weights, config.ratio_cap)
        return policy_loss(logprobs, old, advantages, weights, config.clip_low, config.clip_high, config.dual_clip)

    @torch.no_grad()
    def _with_logprobs(
        self, experiences: Sequence[Experience], model: AudioPolicy | Reference, name: str
    ) -> list[Experience]:
        """The experiences with a field [L] of the model's log-probs of the sampled tokens."""
        filled = list(experiences)
        for indices in micro_batches(experiences, self.grpo.micro_batch_tokens, self.grpo.share_prompts):
            part = [experiences[i] for i in indices]
            flat = model.forward(pack_experiences(part, self.grpo.share_prompts), self.temperature).logprobs.cpu()
            for i, values in zip(indices, flat.split([int(e.loss_mask.sum()) for e in part]), strict=True):
                stream = torch.zeros(len(experiences[i]))
                stream[experiences[i].loss_mask] = values.float()
                filled[i] = experiences[i].replace(**{name: stream})
        return filled

    def _gather(self, part: Sequence[Experience], name: str) -> Tensor | None:
        """The sampled tokens' entries [N] of a field, in the order of the packed row."""
        streams = [getattr(e, name) for e in part]
        if streams[0] is None:
            return None
        picked = [s[e.loss_mask] for s, e in zip(streams, part, strict=True)]
        return torch.cat(picked).to(self.policy.device)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What a resumed run needs beside the weights; the reference is the policy that the phase began with."""
        return {"optimizer": self.optimizer.state()}

    def load(self, state: dict[str, dict[str, Tensor]], where: str) -> None:
        self.optimizer.load(state["optimizer"], where)

    def weights(self) -> Any:
        return self.policy.weights()


def _spread(values: Sequence[float], counts: Sequence[int]) -> Tensor:
    """Each value repeated as often as its count says, [N]: float32, or int64 for whole numbers."""
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(counts))

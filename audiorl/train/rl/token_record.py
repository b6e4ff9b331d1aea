"""Per-token diagnostics of recorded rollouts, for the viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PolicyOutput
from audiorl.train.batches import counts, sum_codebooks
from audiorl.train.rl.minibatch import MicroBatch

TokenNumbers = Mapping[str, Tensor]
"""Of one experience [L] float16 by name, 0 where nothing was sampled.

advantages: only where they differ within the response. entropies: of the distributions of the step's last pass, nats.
ratios: probabilities in the last pass over those that the engine sampled with, at most 1e4. Of a frame they are those
of all its codes together.
"""
_MOST = 1e4


class TokenRecord:
    """The numbers of all experiences of a rank. A pass that is recorded waits for the device once more."""

    def __init__(self, experiences: Sequence[Experience]):
        self._experiences = experiences
        self._passes: dict[int, tuple[Tensor, ...]] = {}

    def add(self, micro: MicroBatch, output: PolicyOutput) -> None:
        """Keep the micro-batch's log-probs and entropies in place of those of an earlier pass."""
        both_2N = torch.stack([output.logprobs.detach().float(), output.entropy.detach().float()]).cpu()
        parts = both_2N.split(counts(micro.experiences), dim=1)
        self._passes |= {id(e): part.unbind(0) for e, part in zip(micro.experiences, parts, strict=True)}

    def numbers(self) -> list[TokenNumbers]:
        """Return those of each experience; no entropies and ratios where there was no pass of the policy."""
        return [self._of(e) for e in self._experiences]

    def _of(self, e: Experience) -> TokenNumbers:
        assert e.advantages is not None and e.rollout_logprobs is not None
        out: dict[str, Tensor] = {}
        advantages_N = e.advantages[e.loss_mask]
        if len(advantages_N) and bool((advantages_N != advantages_N[0]).any()):
            out["advantages"] = advantages_N
        if id(e) in self._passes:
            logprobs_N, entropy_N = self._passes[id(e)]
            out["entropies"] = entropy_N
            gap_N = logprobs_N - sum_codebooks(e.rollout_logprobs[e.loss_mask].float())
            out["ratios"] = gap_N.exp().clamp(max=_MOST)
        return {name: _laid_out(values_N, e.loss_mask) for name, values_N in out.items()}


def _laid_out(values_N: Tensor, mask_L: Tensor) -> Tensor:
    values_L = torch.zeros(len(mask_L), dtype=torch.float16)
    values_L[mask_L] = values_N.half()
    return values_L

"""Estimators of KL(pi || pi_ref) from samples of pi (Schulman 2020, "Approximating KL divergence"), and its
coefficient's controller."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from audiorl.algos.shapes import check_shapes
from audiorl.config import KLConfig, KLKind


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Elementwise, two tensors of one shape. With d = lp - ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1.

    k1 is unbiased; k3 is unbiased, never negative, and what GRPO puts into the loss.
    """
    check_shapes("kl_estimate", logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d**2
    return torch.expm1(-d) + d


@dataclass(frozen=True)
class KLController:
    """The KL's coefficient β, which follows the observed KL as `config.control` says; e = clip(KL/target - 1, ±0.2).

    fixed: it stays. horizon: β ← β·(1 + e·samples/horizon), `samples` being those since the last update. log-space:
    β ← β·(1 + gain·e), proportional control of log β. Both from Ziegler et al. 2019, arXiv 1909.08593, 2.2 (gain: K_β).
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
        return replace(self, beta=self.beta * (1 + change))

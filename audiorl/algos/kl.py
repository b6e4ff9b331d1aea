"""Per-token estimators of KL(pi || pi_ref) from samples of pi (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Elementwise, any shape. With d = lp - ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1.

    k1 is unbiased; k3 is unbiased, never negative, and what GRPO puts into the loss.
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d**2
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kl_estimate: unknown kind {kind!r}; use 'k1', 'k2' or 'k3'")

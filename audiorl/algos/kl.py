"""Estimators of KL(pi || pi_ref) from samples of pi (Schulman 2020, "Approximating KL divergence"), and controllers of
its coefficient: frozen states, whose `update` gives the next one."""

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
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kl_estimate: unknown kind {kind!r}; use 'k1', 'k2' or 'k3'")


@dataclass(frozen=True)
class FixedKL:
    """A coefficient that stays as it is."""

    beta: float

    def update(self, observed: float, samples: int = 1) -> Self:
        return self


@dataclass(frozen=True)
class HorizonKL:
    """β ← β·(1 + e·samples/horizon), e = clip(KL/target - 1, -0.2, 0.2) (Ziegler et al. 2019, arXiv 1909.08593, 2.2).

    `samples` counts what was seen since the last update, in the unit of `horizon`.
    """

    beta: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        _check_target(self.target)

    def update(self, observed: float, samples: int = 1) -> Self:
        return replace(self, beta=self.beta * (1 + _error(observed, self.target) * samples / self.horizon))


@dataclass(frozen=True)
class LogSpaceKL:
    """β ← β·(1 + gain·e), e = clip(KL/target - 1, -0.2, 0.2): proportional control of log β (Ziegler et al. 2019, 2.2).

    `gain` is the paper's K_β; 0.1 there, and not stated for the interpreters that use this controller.
    """

    beta: float
    target: float
    gain: float = 0.1

    def __post_init__(self) -> None:
        _check_target(self.target)

    def update(self, observed: float, samples: int = 1) -> Self:
        return replace(self, beta=self.beta * (1 + self.gain * _error(observed, self.target)))


KLController = FixedKL | HorizonKL | LogSpaceKL


def kl_controller(config: KLConfig, beta: float) -> KLController:
    """Return the controller of `config.control` that begins with `beta`."""
    if config.control == "horizon":
        return HorizonKL(beta, config.target, config.horizon)
    if config.control == "log-space":
        return LogSpaceKL(beta, config.target, config.gain)
    return FixedKL(beta)


def _check_target(target: float) -> None:
    if not target > 0:
        raise ValueError(f"the KL's target must be above 0, got {target}")


def _error(observed: float, target: float) -> float:
    if not math.isfinite(observed):
        raise ValueError(f"the observed KL is {observed}; the coefficient cannot follow it")
    return min(max(observed / target - 1, -0.2), 0.2)

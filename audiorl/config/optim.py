"""The optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import require, require_ranges


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up, then constant, linear or cosine decay to zero."""

    lr: float = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's ε in the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_steps: int = 0
    """Optimizer updates of linear warm-up; of a short training half of its updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up, to 0 at the last update."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this total norm."""
    master_weights: bool | None = None
    """Keep float32 copies of 16-bit weights, which take gradients and updates: 16 bytes a trained weight instead of 8.
    Without them updates smaller than the weights' spacing are lost, which a warning counts. None: up to a rate of 1e-5,
    where more than 80 % are lost. Adapters are float32 anyway, and ZeRO always keeps the copies."""

    def __post_init__(self) -> None:
        positive = ("lr", "eps", "max_grad_norm")
        require_ranges(self, positive=positive, not_negative=("weight_decay", "warmup_steps"), prefix="optim.")
        require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "two numbers in [0, 1)")

    @property
    def keeps_masters(self) -> bool:
        """Tell if 16-bit weights get float32 copies."""
        return self.lr <= 1e-5 if self.master_weights is None else self.master_weights

"""The optimizer."""

from __future__ import annotations

import math
import re
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
    """Optimizer updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up, to 0 at the last update."""
    lr_factors: tuple[str, ...] = ()
    """REGEX=FACTOR: the rate of weights whose name matches the regular expression, as `ModelConfig.only` names them, is
    that factor times `lr`; the first match counts. `proj=0.1 lora_=2`, for example. Not with ZeRO."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this total norm."""
    master_weights: bool = False
    """Keep float32 copies of 16-bit weights, which take the updates, and float32 moments: 12 bytes a trained weight
    instead of 4. Without it updates smaller than the weights' spacing are lost, which a warning counts. No effect on
    float32 weights. ZeRO always keeps the copy."""

    def __post_init__(self) -> None:
        require_ranges(
            self,
            positive=("lr", "eps", "max_grad_norm"),
            not_negative=("weight_decay", "warmup_steps"),
            prefix="optim.",
        )
        self.factors()
        require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "two numbers in [0, 1)")

    def factors(self) -> list[tuple[re.Pattern[str], float]]:
        """`lr_factors` as patterns and numbers. Raises ValueError for another form."""
        out = []
        for entry in self.lr_factors:
            pattern, _, factor = entry.rpartition("=")
            try:
                out.append((re.compile(pattern), float(factor)))
            except (re.error, ValueError) as error:
                raise ValueError(f"optim.lr_factors {entry!r}: {error}; give REGEX=FACTOR, as in proj=0.1") from None
            require(bool(pattern) and 0 <= out[-1][1] < math.inf, "optim.lr_factors", entry, "REGEX=FACTOR, 0 or more")
        return out

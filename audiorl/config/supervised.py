"""Training on a fixed set of data; supervised fine-tuning on transcripts and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import require_counts, require_ranges


@dataclass(frozen=True)
class FitConfig:
    """Options of training on a fixed set of data."""

    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 16
    """Examples per update: transcripts, pairs, or single answers."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward pass; any value gives the same gradient. None: on a CPU 8192, on a GPU what its memory
    holds."""
    save_every: int = 100
    """Updates between checkpoints."""

    def __post_init__(self) -> None:
        require_counts(self, ("steps", "batch_size", "micro_batch_tokens", "save_every"))
        require_ranges(self)


@dataclass(frozen=True)
class SFTConfig(FitConfig):
    """Supervised fine-tuning on the assistant's turn."""

    weighting: Literal["token", "sequence"] = "token"
    """Every target token counts the same, or every example (LongAlign's loss weighting, arXiv 2401.18058)."""
    sort: bool = False
    """Batches of examples of similar length, in random order (LongAlign's sorted batching)."""

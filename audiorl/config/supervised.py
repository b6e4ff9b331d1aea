"""Training on transcripts and answers: supervised fine-tuning, and CTC of the audio side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import require, require_counts, require_ranges


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on the assistant's turn."""

    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 16
    """Examples per update."""
    weighting: Literal["token", "sequence"] = "token"
    """Every target token counts the same, or every example (LongAlign's loss weighting, arXiv 2401.18058)."""
    sort: bool = False
    """Batches of examples of similar length, in random order (LongAlign's sorted batching)."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass; any value gives the same gradient."""
    save_every: int = 100
    """Updates between checkpoints."""

    def __post_init__(self) -> None:
        require_counts(self, ("steps", "batch_size", "micro_batch_tokens", "save_every"))
        require_ranges(self)


@dataclass(frozen=True)
class CTCConfig:
    """Training of the audio side by CTC through the text model's embeddings."""

    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 32
    """Transcripts per update."""
    negatives: int = 2000
    """Random tokens of the training texts that compete with those of a batch; more sharpen the scores and cost time."""
    sort: bool = False
    """Batches of clips of similar length."""
    micro_batch_seconds: float = 120.0
    """Most seconds of audio in one forward pass; any value gives the same gradient but for rounding."""
    save_every: int = 200
    """Updates between checkpoints."""
    eval_every: int = 0
    """Updates between measurements of the token error rate on held-out transcripts; 0: none."""

    def __post_init__(self) -> None:
        require_counts(self, ("steps", "batch_size", "negatives", "save_every"))
        require(self.micro_batch_seconds > 0, "micro_batch_seconds", self.micro_batch_seconds, "greater than 0")

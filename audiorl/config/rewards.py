"""Reward models, process reward models, and the server of a reward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from audiorl.config.supervised import FitConfig


@dataclass(frozen=True)
class RewardModelConfig(FitConfig):
    """A reward model from pairs of answers."""

    margins: bool = True
    """Use the pairs' margins."""
    regulariser: float = 0.0
    """Weight c of c·(r_chosen² + r_rejected²)/2, which keeps scores near 0; 0 leaves it out."""
    length_debias: bool = False
    """Leave to a model of the answers' lengths, fitted before training, what length explains of the pairs (product of
    experts, arXiv 2310.05199)."""


@dataclass(frozen=True)
class ProcessRewardConfig(FitConfig):
    """A process reward model: at the marker that ends each step the decoder says whether the step was good."""

    marker: str = "\n\n"
    """Text after each step, at which the step is judged."""
    good: str = "+"
    """The first token of this text means that the step is good."""
    bad: str = "-"
    """The first token of this text means that the step is bad."""
    soft: bool = False
    """Take labels as probabilities; otherwise as 0 or 1."""


@dataclass(frozen=True)
class RewardServerConfig:
    """Serve the reward of a file over HTTP."""

    file: str
    """A Python file that defines `reward`."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but this machine's own needs a token."""
    port: int = 8300
    """TCP port; 0 takes a free one."""
    token_file: Path | None = None
    """File with the bearer token. By default the environment variable AUDIORL_REWARD_TOKEN holds it."""
    audio_root: tuple[Path, ...] = ()
    """Folders from which audio may be read by path. Without any, requests must contain the audio."""
    max_batch: int = 4096
    """Maximum number of rollouts per request."""
    max_bytes: int = 512 * 2**20
    """Maximum size of a request in bytes."""
    concurrency: int = 1
    """Calls of the reward at the same time. Rewards with models expect one."""
    max_queue: int = 16
    """Requests that may wait; further ones are refused with status 503."""
    max_seconds: float = 3600.0
    """Seconds that one call of the reward may take; then the request ends with status 504."""

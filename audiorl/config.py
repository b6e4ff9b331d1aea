"""Configuration: frozen dataclasses, nothing but values.

A recipe composes these into its own `Config`; the command line overrides any field by its path (`--grpo.lr 1e-6`); the
resolved result is written to the run folder as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from audiorl.algos.kl import KLKind
from audiorl.algos.losses import Aggregation


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the decoder (Hu et al. 2021)."""

    rank: int = 16
    alpha: int = 32
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelConfig:
    """How a model is held. `audio`: what of the audio side is trained; a frozen tower hears each clip once."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    autocast: bool = False
    """Run forward passes in bfloat16 over float32 weights."""
    audio: Literal["frozen", "projector", "full"] = "frozen"
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    attention: Literal["sdpa", "eager"] = "sdpa"
    audio_cache_mb: int = 4096
    """Memory for clips already heard by a frozen tower."""


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are sampled. `temperature` 0 is greedy. `stop` strings end a response and stay in it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    max_batch_tokens: int = 65_536
    """Bound on rows x (prompt + max_new_tokens) decoded side by side."""

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "sampling.temperature", self.temperature, "at least 0")
        _require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "sampling.top_k", self.top_k, "at least 0 (0 switches it off)")
        _require(self.max_new_tokens > 0, "sampling.max_new_tokens", self.max_new_tokens, "at least 1")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up, then constant, linear or cosine decay to zero."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "greater than 0")
        _require(self.max_grad_norm > 0, "optim.max_grad_norm", self.max_grad_norm, "greater than 0")


@dataclass(frozen=True)
class GRPOConfig:
    """Group relative policy optimisation, with Ke-Omni-R's choices as defaults (reference: arXiv 2402.03300)."""

    steps: int = 1000
    prompts_per_step: int = 8
    group_size: int = 8
    mini_batches: int = 1
    epochs: int = 1
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    """`gspo` wants much narrower clips: its authors use 3e-4 and 4e-4. `cispo` reads ratio_cap instead."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 5.0
    dual_clip: float | None = None
    kl_beta: float = 0.01
    kl_kind: KLKind = "k3"
    entropy_coef: float = 0.0
    engine_cap: float | None = None
    """Weigh tokens by min(trainer / engine probability, engine_cap); None takes the engine's as the trainer's."""
    advantage: Literal["group", "leave-one-out"] = "group"
    advantage_std: bool = True
    advantage_eps: float = 1e-4
    aggregation: Aggregation = "sequence-mean-token-mean"
    micro_batch_tokens: int = 8192
    """Row tokens in one forward pass; any value gives the same gradient."""
    share_prompts: bool = True
    eval_every: int = 0
    """Held-out evaluation during training, in steps; 0 only before and after."""
    save_every: int = 10
    rollouts_every: int = 10
    """Steps between rollouts written to the run folder; the first and the last are always written."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "group_size", "mini_batches", "epochs", "save_every"):
            _require(getattr(self, name) > 0, f"grpo.{name}", getattr(self, name), "at least 1")
        if (self.prompts_per_step * self.group_size) % self.mini_batches:
            raise ValueError(
                f"grpo.mini_batches {self.mini_batches} does not divide the {self.prompts_per_step} x "
                f"{self.group_size} rollouts of a step"
            )


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on the assistant's turn."""

    steps: int = 1000
    batch_size: int = 16
    micro_batch_tokens: int = 8192
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "save_every"):
            _require(getattr(self, name) > 0, f"sft.{name}", getattr(self, name), "at least 1")


def to_json(value: Any) -> Any:
    """A config, or anything in one, as plain JSON values. Dataclasses outside configs keep their class name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"a config holds plain values, not {type(value).__name__}")


def _require(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {what}")

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

KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum"]


def torch_device(device: str) -> str:
    """The name that torch knows: "auto" is "cuda" where there is a GPU, otherwise "cpu"."""
    if device != "auto":
        return device
    import torch  # only here: the help of a command loads this module and shall not wait for torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _require(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {what}")


def _require_counts(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        _require(getattr(config, name) > 0, name, getattr(config, name), "at least 1")


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
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one, otherwise the CPU."""
    autocast: bool = False
    """Run forward passes in bfloat16 over float32 weights."""
    audio: Literal["frozen", "projector", "full"] = "frozen"
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    only: tuple[str, ...] = ()
    """Of what would be trained only the weights in whose names one of these regular expressions is found; (): all."""
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
    """Bound on rows x (prompt + what may be written) decoded side by side."""
    max_frames: int = 500
    """Most codec frames of speech in an answer or a turn of a stream; speech that goes on is ended there."""
    audio_temperature: float | None = None
    """Of codes; None takes `temperature`."""
    audio_top_p: float = 1.0
    audio_top_k: int = 0
    ras_window: int = 0
    """Repetition-aware sampling (VALL-E 2, arXiv 2406.05370) of codes over so many frames, 7 in Higgs Audio; 0 is off.
    A code that is drawn although it stands `ras_repeats` times in its codebook's window is drawn again from the model's
    plain distribution. Log-probs are those of this mixture, which is not the one that a trainer computes: for
    evaluation, or with `engine_cap`."""
    ras_repeats: int = 2

    def __post_init__(self) -> None:
        _require(self.max_frames > 0, "sampling.max_frames", self.max_frames, "at least 1")
        if self.audio_temperature is not None:
            _require(self.audio_temperature >= 0, "sampling.audio_temperature", self.audio_temperature, "at least 0")
        _require(0 < self.audio_top_p <= 1, "sampling.audio_top_p", self.audio_top_p, "in (0, 1]")
        _require(self.audio_top_k >= 0, "sampling.audio_top_k", self.audio_top_k, "at least 0 (0 switches it off)")
        _require(self.ras_window >= 0, "sampling.ras_window", self.ras_window, "at least 0 (0 switches it off)")
        _require(self.ras_repeats > 0, "sampling.ras_repeats", self.ras_repeats, "at least 1")
        _require(self.temperature >= 0, "sampling.temperature", self.temperature, "at least 0")
        _require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "sampling.top_k", self.top_k, "at least 0 (0 switches it off)")
        _require(self.max_new_tokens > 0, "sampling.max_new_tokens", self.max_new_tokens, "at least 1")

    def of_codes(self) -> SamplingConfig:
        """The same for codes: their temperature, top_p and top_k in the place of the text's."""
        temperature = self.temperature if self.audio_temperature is None else self.audio_temperature
        return dataclasses.replace(self, temperature=temperature, top_p=self.audio_top_p, top_k=self.audio_top_k)


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


Advantage = Literal[
    "group", "time-index", "leave-one-out", "remax", "reinforce", "reinforce++", "reinforce++-baseline", "gae"
]


@dataclass(frozen=True)
class CriticConfig:
    """The critic of `advantage="gae"`."""

    shared: bool = False
    """One linear on the policy's own trunk, trained with it; otherwise a copy of the policy with its own optimizer."""
    coef: float = 0.5
    """Weight of the value loss beside the policy's, for a shared trunk."""
    clip: float | None = 0.2
    warmup_steps: int = 0
    """First steps in which the critic learns and the policy stays (with a shared trunk: only the value head learns)."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Of a critic with its own trunk."""


@dataclass(frozen=True)
class RLConfig:
    """Policy gradient training. The defaults are GRPO (arXiv 2402.03300) with Ke-Omni-R's choices.

    RLOO is advantage `leave-one-out`; REINFORCE++ has its own, best with kl_in `reward`; PPO is `gae`; `time-index`
    compares a group's streams turn by turn. Dr.GRPO is advantage_std False with aggregation
    `sequence-mean-token-sum`; DAPO is clip_high 0.28, aggregation `token-mean`, kl_beta 0 and dynamic_sampling.
    """

    steps: int = 1000
    prompts_per_step: int = 8
    group_size: int = 8
    mini_batches: int = 1
    epochs: int = 1
    advantage: Advantage = "group"
    advantage_std: bool = True
    """Divide group advantages by the group's standard deviation."""
    advantage_eps: float = 1e-4
    gamma: float = 1.0
    """Discount of `reinforce`, `reinforce++` and `gae`."""
    lam: float = 0.95
    """λ of `gae`."""
    whiten: bool = True
    """Whiten the advantages of `reinforce` and `gae` over all sampled tokens of the step."""
    critic: CriticConfig = CriticConfig()
    score_clip: float | None = None
    """Bound scores to ± this before anything else."""
    score_normalize: bool = False
    """Then to mean 0 and standard deviation 1 over the step."""
    dynamic_sampling: int = 0
    """Rounds in which groups whose scores are all equal are dropped and other prompts asked (DAPO); 0 keeps them."""
    loss: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """`gspo` wants much narrower clips: its authors use 3e-4 and 4e-4. `cispo` reads ratio_cap. `reinforce` has no
    ratio: the plain policy gradient."""
    frame_ratio: Literal["code", "frame"] = "code"
    """Of models that speak: a ratio (and a clip) for every drawn code, or one for a frame's codes together."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 5.0
    dual_clip: float | None = None
    kl_beta: float = 0.01
    kl_kind: KLKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """Where -β·KL goes: a term of the loss, or a penalty on the reward of every sampled token (use k1 there)."""
    kl_control: Literal["fixed", "horizon", "log-space"] = "fixed"
    """How β follows `kl_target`, the wanted mean KL of a sampled token."""
    kl_target: float = 0.05
    kl_horizon: float = 10_000
    """In rollouts."""
    kl_gain: float = 0.1
    entropy_coef: float = 0.0
    engine_cap: float | None = None
    """Weigh tokens by min(trainer / engine probability, engine_cap); None takes the engine's as the trainer's."""
    overlap: bool = False
    """Write the rollouts of a step while the step before it trains: with the weights of one update ago, which
    `engine_cap` corrects. Saves time where engines are apart from the trainers; elsewhere the same happens one after
    the other. Rollouts are not part of a checkpoint, so the step after one (every `save_every`) is written with the
    current weights, and a resumed run equals one that went through. After Ctrl-C the next step is such a step, too."""
    ptx_coef: float = 0.0
    """Weight of a supervised loss on `ptx_batch` examples beside every update (PPO-ptx, arXiv 2203.02155)."""
    ptx_batch: int = 8
    ema_decay: float | None = None
    """Keep an exponential moving average of the policy, saved as checkpoints/PHASE/ema when the phase ends."""
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
        _require_counts(self, ("steps", "prompts_per_step", "group_size", "mini_batches", "epochs", "save_every"))
        if (self.prompts_per_step * self.group_size) % self.mini_batches:
            raise ValueError(
                f"mini_batches {self.mini_batches} does not divide the {self.prompts_per_step} x "
                f"{self.group_size} rollouts of a step"
            )
        if self.overlap and self.engine_cap is None:
            raise ValueError(
                "overlap trains on rollouts of older weights, which engine_cap corrects: set engine_cap, for example 2"
            )
        if self.ema_decay is not None:
            _require(0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "between 0 and 1")
        if self.score_clip is not None:
            _require(self.score_clip > 0, "score_clip", self.score_clip, "greater than 0")


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on the assistant's turn."""

    steps: int = 1000
    batch_size: int = 16
    weighting: Literal["token", "sequence"] = "token"
    """Every target token counts the same, or every example (LongAlign's loss weighting, arXiv 2401.18058)."""
    sort: bool = False
    """Batches of examples of similar length, in random order (LongAlign's sorted batching)."""
    micro_batch_tokens: int = 8192
    save_every: int = 100

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "save_every"))


PreferenceLoss = Literal["dpo", "cdpo", "ipo", "r-dpo", "sampo", "ld-dpo", "simpo", "cpo", "orpo", "kto"]


@dataclass(frozen=True)
class PreferenceConfig:
    """Preference optimisation. Options left at None take the loss's own default (`audiorl.algos.preference`).

    The weights of `kto` that are not set balance desirable against undesirable answers.
    """

    loss: PreferenceLoss = "dpo"
    steps: int = 1000
    batch_size: int = 16
    """Pairs a step; with `kto` single answers."""
    beta: float | None = None
    label_smoothing: float | None = None
    alpha: float | None = None
    gamma: float | None = None
    lam: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    length_normalized: bool = False
    """Mean instead of summed token log-probs (the per-token form of IPO); for dpo, cdpo, ipo and r-dpo."""
    sft_coef: float = 0.0
    """Weight of the chosen answer's negative log-likelihood, a mean over tokens, beside the loss (RPO)."""
    sort: bool = False
    micro_batch_tokens: int = 8192
    save_every: int = 100
    eval_every: int = 0
    """Held-out evaluation during training, in steps; 0 only before and after."""

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "save_every"))
        for name in self.options():
            if name not in _PREFERENCE_OPTIONS[self.loss]:
                known = ", ".join(_PREFERENCE_OPTIONS[self.loss])
                raise ValueError(f"{name} is not an option of the loss {self.loss!r}, which takes {known}")
        if self.length_normalized and self.loss not in ("dpo", "cdpo", "ipo", "r-dpo"):
            raise ValueError(f"length_normalized is not an option of the loss {self.loss!r}")
        if self.label_smoothing is not None:
            _require(0 <= self.label_smoothing < 0.5, "label_smoothing", self.label_smoothing, "in [0, 0.5)")
        if self.loss == "kto" and self.sft_coef:
            raise ValueError("sft_coef is not an option of the loss 'kto'")
        if self.loss == "kto" and self.batch_size < 2:
            raise ValueError("kto compares the answers of a batch; batch_size must be at least 2")

    def options(self) -> dict[str, float]:
        """What was set of the loss's own options."""
        names = {name for options in _PREFERENCE_OPTIONS.values() for name in options}
        return {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}


_PREFERENCE_OPTIONS: dict[str, tuple[str, ...]] = {
    "dpo": ("beta",),
    "cdpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "r-dpo": ("beta", "alpha"),
    "sampo": ("beta",),
    "ld-dpo": ("beta", "alpha"),
    "simpo": ("beta", "gamma"),
    "cpo": ("beta", "alpha"),
    "orpo": ("lam",),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model from pairs of answers."""

    steps: int = 1000
    batch_size: int = 16
    log_exp: bool = False
    """log(1 + exp(r_rejected - r_chosen)) instead of Bradley-Terry with the pairs' margins."""
    margins: bool = True
    """Use the pairs' margins."""
    regulariser: float = 0.0
    """Weight c of c·(r_chosen² + r_rejected²)/2, which keeps scores near 0; 0 leaves it out."""
    sort: bool = False
    micro_batch_tokens: int = 8192
    save_every: int = 100

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "save_every"))


@dataclass(frozen=True)
class ProcessRewardConfig:
    """A process reward model: at the marker that ends each step the decoder says whether the step was good."""

    steps: int = 1000
    batch_size: int = 16
    marker: str = "\n\n"
    good: str = "+"
    bad: str = "-"
    """The tokens whose probabilities judge a step; the first token of each text."""
    soft: bool = False
    """Take labels as probabilities; otherwise as 0 or 1."""
    sort: bool = False
    micro_batch_tokens: int = 8192
    save_every: int = 100

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "save_every"))


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

"""Configuration: frozen dataclasses, nothing but values.

A recipe composes these into its own `Config`; the command line overrides any field by its path (`--grpo.lr 1e-6`); the
resolved result is written to the run folder as JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
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


def require_ranges(
    config: Any, positive: Sequence[str] = (), not_negative: Sequence[str] = (), prefix: str = ""
) -> None:
    """Refuse numbers that are not finite anywhere in `config`, and those out of range in the fields named.

    A field that is None is not set, and passes.
    """
    require_finite(config, prefix)
    for name in positive:
        value = getattr(config, name)
        _require(value is None or value > 0, prefix + name, value, "greater than 0")
    for name in not_negative:
        value = getattr(config, name)
        _require(value is None or value >= 0, prefix + name, value, "at least 0")


def require_finite(config: Any, path: str = "") -> None:
    """Raise ValueError naming the first number in `config`, at any depth, that is not finite."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            require_finite(value, f"{path}{field.name}.")
        for number in value if isinstance(value, tuple) else (value,):
            _require(not isinstance(number, float) or math.isfinite(number), path + field.name, value, "finite")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the decoder (Hu et al. 2021)."""

    rank: int = 16
    """Rank of the adapters' matrices."""
    alpha: int = 32
    """Scale: the adapters' output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers of the decoder that get an adapter, by the last part of their name."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("alpha",), not_negative=("rank",), prefix="model.lora.")


@dataclass(frozen=True)
class ModelConfig:
    """How a model is loaded, and which of its weights are trained."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; auto takes the checkpoint's."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one, otherwise the CPU."""
    autocast: bool = False
    """Run forward passes in bfloat16 over float32 weights."""
    audio: Literal["frozen", "projector", "full"] = "frozen"
    """What of the audio side is trained: nothing, the projector, or projector and audio encoder. A frozen audio encoder
    encodes each clip once."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all decoder weights; None: all weights."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    only: tuple[str, ...] = ()
    """Train only those of the trainable weights whose names match one of these regular expressions; empty: all."""
    attention: Literal["auto", "varlen", "flex", "sdpa", "eager"] = "auto"
    """Kernel of a packed row's attention. varlen: FlashAttention over all spans in one call (on a GPU, with `autocast`
    or a 16-bit `dtype`); flex: compiled FlexAttention (on a GPU); sdpa: one call for each span; eager: transformers'
    own under a mask of T x T. auto takes the first of varlen, flex and sdpa that can run; `audiorl doctor` names it."""
    audio_cache_mb: int = 4096
    """Memory in MiB for the outputs of a frozen audio encoder."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("audio_cache_mb",), prefix="model.")


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are sampled."""

    temperature: float = 1.0
    """Softmax temperature of text tokens; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities sum to this; 1 takes all."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 takes all."""
    max_new_tokens: int = 256
    """Text tokens of a response, or of one turn of a stream."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay in it."""
    max_batch_tokens: int = 65_536
    """Rows decoded together: at most this many tokens, prompts and maximum responses counted."""
    max_frames: int = 500
    """Codec frames of a response or of one turn of a stream; longer speech is cut there."""
    audio_temperature: float | None = None
    """Softmax temperature of codec codes; None takes `temperature`."""
    audio_top_p: float = 1.0
    """`top_p` of codec codes."""
    audio_top_k: int = 0
    """`top_k` of codec codes."""
    ras_window: int = 0
    """Frames of the window of repetition-aware sampling (VALL-E 2, arXiv 2406.05370); Higgs Audio uses 7, 0 is off. A
    code that occurs `ras_repeats` times in the window of its codebook is sampled again from the model's plain
    distribution. Log-probs are those of this mixture, which the trainer does not compute: for evaluation, or with
    `engine_cap`."""
    ras_repeats: int = 2
    """Occurrences in the window that cause a second draw."""

    def __post_init__(self) -> None:
        require_ranges(
            self,
            positive=("max_frames", "max_new_tokens", "max_batch_tokens", "ras_repeats"),
            not_negative=("temperature", "audio_temperature", "top_k", "audio_top_k", "ras_window"),
            prefix="sampling.",
        )
        for name in ("top_p", "audio_top_p"):
            _require(0 < getattr(self, name) <= 1, f"sampling.{name}", getattr(self, name), "in (0, 1]")

    def of_codes(self) -> SamplingConfig:
        """The same with the codes' temperature, top_p and top_k in place of the text's."""
        temperature = self.temperature if self.audio_temperature is None else self.audio_temperature
        return dataclasses.replace(self, temperature=temperature, top_p=self.audio_top_p, top_k=self.audio_top_k)


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
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this total norm."""
    master_weights: bool = False
    """Of 16-bit weights keep a float32 copy that takes the updates, and float32 moments: 12 bytes a trained weight
    instead of 4. Without it updates smaller than the weights' spacing are lost, which a warning counts. No effect on
    float32 weights. ZeRO always keeps the copy."""

    def __post_init__(self) -> None:
        require_ranges(
            self,
            positive=("lr", "eps", "max_grad_norm"),
            not_negative=("weight_decay", "warmup_steps"),
            prefix="optim.",
        )
        _require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "two numbers in [0, 1)")


Advantage = Literal[
    "group",
    "mean-relative",
    "decoupled",
    "process",
    "time-index",
    "leave-one-out",
    "remax",
    "reinforce",
    "reinforce++",
    "reinforce++-baseline",
    "gae",
    "none",
]


PolicyLoss = Literal["clip", "gspo", "gmpo", "sapo", "cispo", "dppo-tv", "dppo-kl", "clip-cov", "kl-cov", "reinforce"]


@dataclass(frozen=True)
class CriticConfig:
    """The critic of `advantage="gae"`."""

    shared: bool = False
    """One linear layer on the policy's own trunk, trained with it; otherwise a copy of the policy with its own
    optimizer."""
    coef: float = 0.5
    """Weight of the value loss relative to the policy's, for a shared trunk."""
    clip: float | None = 0.2
    """Clip range of the value loss around the old values; None: no clipping."""
    warmup_steps: int = 0
    """First steps in which only the critic learns (with a shared trunk: only the value head)."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer of a critic with its own trunk."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("clip",), not_negative=("coef", "warmup_steps"), prefix="critic.")


@dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: a teacher reads the same question under a view, such as its transcript in place of the
    audio, and says how it would have continued the policy's own answer, token by token (GKD, arXiv 2306.13649)."""

    coef: float = 0.0
    """Weight of the divergence in the loss, or with `sampled` of the advantage; 0: no distillation."""
    divergence: Literal["reverse", "forward", "jsd", "sampled"] = "reverse"
    """The loss between policy S and teacher T: KL(S ‖ T), KL(T ‖ S), or GKD's Jensen-Shannon divergence (reads `beta`).
    `sampled` is no loss: log T - log S of each sampled token is added to its advantage, whatever the estimator."""
    beta: float = 0.5
    """β of `jsd`, between 0 and 1: close to 0 like `forward`, close to 1 like `reverse`, and smaller than both."""
    top_k: int = 0
    """Compare only so many tokens at each place, and all others as one; 0: the whole vocabulary."""
    top_k_of: Literal["teacher", "student"] = "teacher"
    """Whose most probable tokens these are."""
    teacher: str = "reference"
    """`reference` (the policy as the phase begins, the same as the KL's), `policy` (as each step begins), or the folder
    or hub id of another model with the same tokenizer."""
    view: str = "transcript"
    """What the teacher reads: a view of `audiorl.data.views` by name, FILE.py:FUNCTION, or `none` for the prompt as it
    is."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Which tokens of a response count: all, those up to `</think>`, or those after it."""
    entropy_gate: float | None = None
    """Skip tokens where the teacher's entropy is above this, in nats; None skips none."""
    off_policy: float = 0.0
    """Share of a step's prompts that are answered by their reference instead of the policy (GKD's 1 - λ); below 1."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("coef", "top_k", "entropy_gate"), prefix="distill.")
        _require(0 < self.beta < 1, "distill.beta", self.beta, "between 0 and 1")
        _require(0 <= self.off_policy < 1, "distill.off_policy", self.off_policy, "at least 0 and below 1")
        for name in ("teacher", "view"):
            _require(bool(getattr(self, name)), f"distill.{name}", getattr(self, name), "a name")
        if self.divergence == "sampled" and (self.top_k or self.off_policy):
            name = "top_k" if self.top_k else "off_policy"
            raise ValueError(f"distill.{name} needs a distill.divergence over the vocabulary, not 'sampled'")
        if self.coef and (self.teacher, self.view) == ("policy", "none"):
            raise ValueError(
                "distill: the policy under its own prompt is no teacher; give distill.view or another teacher"
            )

    @property
    def loss_kind(self) -> Literal["reverse", "forward", "jsd"] | None:
        """The divergence that is a term of the loss; None for `sampled`."""
        return None if self.divergence == "sampled" else self.divergence

    @property
    def from_reference_process(self) -> bool:
        """Whether the teacher lives with the reference, where references are processes of their own."""
        return self.coef > 0 and self.teacher != "policy"


@dataclass(frozen=True)
class RLConfig:
    """Policy gradient training. The defaults are GRPO (arXiv 2402.03300) with Ke-Omni-R's choices.

    RLOO is advantage `leave-one-out`; REINFORCE++ has its own, best with kl_in `reward`; PPO is `gae`; `time-index`
    compares a group's streams turn by turn; `mean-relative` is MaxRL; `decoupled` is GDPO, which normalises each term
    of a `WeightedSum` within its group; `process` is GRPO with a reward for each step of an answer
    (`ProcessModelReward(credit="steps")`). Dr.GRPO is advantage_std False with aggregation
    `sequence-mean-token-sum`; DAPO is clip_high 0.28, aggregation `token-mean`, kl_beta 0 and dynamic_sampling. `none`
    has no advantages: distillation alone.
    """

    steps: int = 1000
    """Training steps: rollouts, then `epochs` x `mini_batches` optimizer updates."""
    prompts_per_step: int = 8
    """Prompts of a step."""
    group_size: int = 8
    """Rollouts per prompt."""
    mini_batches: int = 1
    """Optimizer updates per epoch; must divide the rollouts of a step."""
    epochs: int = 1
    """Passes over the rollouts of a step."""
    advantage: Advantage = "group"
    """The estimator; the docstring of this class names the algorithms."""
    advantage_std: bool = True
    """Divide group advantages by the group's standard deviation."""
    advantage_eps: float = 1e-4
    """Added to that standard deviation."""
    gamma: float = 1.0
    """Discount per sampled token, of `reinforce`, `reinforce++` and `gae`."""
    lam: float = 0.95
    """λ of `gae`."""
    whiten: bool = True
    """Whiten the advantages of `reinforce` and `gae` over all sampled tokens of the step."""
    critic: CriticConfig = CriticConfig()
    """The critic of `gae`."""
    distill: DistillConfig = DistillConfig()
    """Distillation from a teacher, off by default."""
    score_clip: float | None = None
    """Clip scores to ± this first; None: no clipping."""
    score_normalize: bool = False
    """Then normalise scores to mean 0 and standard deviation 1 over the step."""
    dynamic_sampling: int = 0
    """Rounds in which groups with equal scores are dropped and other prompts asked instead (DAPO); 0 keeps all
    groups."""
    loss: PolicyLoss = "clip"
    """The surrogate: PPO's clipped ratio, GSPO (which wants much narrower clips: its authors use 3e-4 and 4e-4), GMPO
    (clips log ratios; its authors use 0.4 and 0.4), SAPO (reads `sapo_positive` and `sapo_negative`), CISPO (reads
    `ratio_cap`), DPPO (`clip_low` and `clip_high` bound the change of a token's probability, or with `dppo-kl` the KL;
    its authors cap ratios at 20), Clip-Cov and KL-Cov (read `cov_fraction`), or the plain policy gradient without a
    ratio."""
    cov_fraction: float = 2e-4
    """Share of a mini-batch's tokens that Clip-Cov leaves out, or that KL-Cov holds back."""
    cov_low: float = 1.0
    """Covariance of log-prob and advantage above which Clip-Cov may leave a token out."""
    cov_high: float = 5.0
    """Covariance below which it may."""
    cov_coef: float = 1.0
    """Weight of KL-Cov's penalty."""
    sapo_positive: float = 1.0
    """SAPO's τ of tokens with positive advantage: how fast their gradient falls off with the ratio."""
    sapo_negative: float = 1.05
    """SAPO's τ of the other tokens."""
    frame_ratio: Literal["code", "frame"] = "code"
    """Of models that speak: one ratio (and clip) per sampled code, or one per codec frame."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - this."""
    clip_high: float = 0.2
    """Ratios are clipped above 1 + this."""
    ratio_cap: float = 5.0
    """Upper bound of the ratio, of CISPO and DPPO."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss of tokens with negative advantage, -c·A (dual-clip PPO); None: no bound."""
    kl_beta: float = 0.01
    """Coefficient β of the KL to the reference; 0: no KL, and no reference is held."""
    kl_kind: KLKind = "k3"
    """Estimator of the KL (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: a term of the loss, or a penalty on the reward of every sampled token (use k1 there)."""
    kl_control: Literal["fixed", "horizon", "log-space"] = "fixed"
    """How β changes to keep the KL near `kl_target`: not at all, proportionally (Ziegler et al. 2019), or in log
    space."""
    kl_target: float = 0.05
    """Wanted mean KL per sampled token."""
    kl_horizon: float = 10_000
    """Rollouts over which the horizon controller adapts."""
    kl_gain: float = 0.1
    """Gain of the log-space controller."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    engine_cap: float | None = None
    """Truncated importance sampling: weigh tokens by min(trainer / engine probability, this). None: no correction."""
    overlap: bool = False
    """Generate the next step's rollouts while this step trains, with weights of one update ago, which `engine_cap`
    corrects. Saves time with dedicated engines; without them both run one after the other. Rollouts are not part of a
    checkpoint: the step after one (every `save_every`, and after Ctrl-C) uses the current weights, so that a resumed
    run repeats it."""
    ptx_coef: float = 0.0
    """Weight of a supervised loss on `ptx_batch` examples in every update (PPO-ptx, arXiv 2203.02155); 0: none."""
    ptx_batch: int = 8
    """Examples per update of the supervised loss."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, saved as checkpoints/PHASE/ema at the end; None: none."""
    aggregation: Aggregation = "sequence-mean-token-mean"
    """How token losses are averaged: per sequence (GRPO), over all tokens (DAPO), or by a constant length (Dr.GRPO)."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass; lower values need less memory and give the same gradient."""
    share_prompts: bool = True
    """Responses of a group share one copy of their prompt, audio included; same gradients, less work."""
    audio_check_every: int = 0
    """After the first step and then every so many, measure what the right audio adds to sampled answers over silence,
    noise and the audio of another prompt: `audio/gain_*`, in nats per token; 0: never."""
    audio_check_prompts: int = 16
    """Prompts of the step that are measured, one answer each."""
    audio_check_min: float = 0.05
    """Gain, in nats per token, below which the model counts as not listening."""
    audio_check: Literal["warn", "stop"] = "warn"
    """What follows where it does not listen: a line on stderr, or the end of the run with an error."""
    eval_every: int = 0
    """Steps between held-out evaluations during training; 0: only before and after."""
    save_every: int = 10
    """Steps between checkpoints."""
    rollouts_every: int = 10
    """Steps between rollouts written to the run folder; the first and last step are always written."""

    def __post_init__(self) -> None:
        counts = ("steps", "prompts_per_step", "group_size", "mini_batches", "epochs", "save_every", "rollouts_every")
        _require_counts(self, (*counts, "micro_batch_tokens", "ptx_batch", "audio_check_prompts"))
        require_ranges(
            self,
            positive=(
                "score_clip",
                "clip_low",
                "clip_high",
                "ratio_cap",
                "engine_cap",
                "kl_target",
                "kl_horizon",
                "sapo_positive",
                "sapo_negative",
                "cov_fraction",
            ),
            not_negative=(
                "advantage_eps",
                "cov_coef",
                "kl_beta",
                "kl_gain",
                "ptx_coef",
                "eval_every",
                "dynamic_sampling",
                "audio_check_every",
                "audio_check_min",
            ),
        )
        for name in ("gamma", "lam"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        if self.dual_clip is not None:
            _require(self.dual_clip > 1, "dual_clip", self.dual_clip, "greater than 1")
        compared = ("group", "mean-relative", "decoupled", "time-index", "leave-one-out", "reinforce++-baseline")
        if self.group_size == 1 and self.advantage in compared:
            raise ValueError(
                f"advantage {self.advantage!r} compares the rollouts of a prompt, so group_size must be at least 2: a "
                "single rollout has advantage 0 and trains nothing"
            )
        if self.advantage == "decoupled" and (self.score_clip is not None or self.score_normalize):
            raise ValueError("advantage 'decoupled' normalises each term: score_clip and score_normalize do not apply")
        if self.advantage in ("mean-relative", "decoupled") and self.kl_in == "reward" and self.kl_beta:
            raise ValueError(f"advantage {self.advantage!r} compares scores, not token rewards: set kl_in 'loss'")
        _require(self.cov_fraction <= 1, "cov_fraction", self.cov_fraction, "at most 1")
        if not self.cov_low < self.cov_high:
            raise ValueError(f"cov_low {self.cov_low:g} must lie below cov_high {self.cov_high:g}")
        self._check_distillation()
        if (self.sampled_prompts * self.group_size) % self.mini_batches:
            raise ValueError(
                f"mini_batches {self.mini_batches} does not divide the {self.sampled_prompts} x "
                f"{self.group_size} rollouts of a step"
            )
        if self.overlap and self.engine_cap is None:
            raise ValueError(
                "overlap trains on rollouts of older weights, which engine_cap corrects: set engine_cap, for example 2"
            )
        if self.ema_decay is not None:
            _require(0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "between 0 and 1")

    def _check_distillation(self) -> None:
        distill = self.distill
        if self.advantage == "none" and not distill.coef:
            raise ValueError("advantage 'none' trains nothing without distillation: set distill.coef")
        if self.advantage == "none" and self.kl_in == "reward" and self.kl_beta:
            raise ValueError("advantage 'none' reads no rewards: set kl_in 'loss'")
        if self.advantage == "none" and self.dynamic_sampling:
            raise ValueError("advantage 'none' reads no rewards, by which dynamic_sampling drops groups: set it to 0")
        if not distill.coef:
            return
        if self.kl_beta and (distill.teacher, distill.view) == ("reference", "none"):
            raise ValueError(
                "kl_beta and distill.coef both hold the policy to its reference under the same prompt: set kl_beta 0, "
                "or give the teacher a distill.view"
            )
        if distill.off_policy and not 0 < self.reference_prompts < self.prompts_per_step:
            raise ValueError(
                f"distill.off_policy {distill.off_policy:g} of {self.prompts_per_step} prompts is "
                f"{self.reference_prompts}; some must be answered by their reference, and some by the policy"
            )

    @property
    def reference_prompts(self) -> int:
        """Prompts of a step that are answered by their reference."""
        return round(self.distill.off_policy * self.prompts_per_step) if self.distill.coef else 0

    @property
    def sampled_prompts(self) -> int:
        """Prompts of a step that the policy answers."""
        return self.prompts_per_step - self.reference_prompts


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
        _require_counts(self, ("steps", "batch_size", "micro_batch_tokens", "save_every"))
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
        _require_counts(self, ("steps", "batch_size", "negatives", "save_every"))
        _require(self.micro_batch_seconds > 0, "micro_batch_seconds", self.micro_batch_seconds, "greater than 0")


PreferenceLoss = Literal["dpo", "cdpo", "ipo", "r-dpo", "sampo", "ld-dpo", "simpo", "cpo", "orpo", "kto"]


@dataclass(frozen=True)
class PreferenceConfig:
    """Preference optimisation. Options left at None take the loss's own default (`audiorl.algos.preference`).

    The weights of `kto` that are not set balance desirable against undesirable answers.
    """

    loss: PreferenceLoss = "dpo"
    """DPO and its family on pairs, or KTO on single judged answers."""
    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 16
    """Pairs per update; with `kto` single answers."""
    beta: float | None = None
    """β: scale of the log-ratios."""
    label_smoothing: float | None = None
    """ε of cDPO: probability that a label is wrong."""
    alpha: float | None = None
    """α of R-DPO (length penalty), LD-DPO (weight of the longer answer's excess) and CPO (weight of the NLL)."""
    gamma: float | None = None
    """γ of SimPO: target margin."""
    lam: float | None = None
    """λ of ORPO: weight of the odds-ratio term."""
    desirable_weight: float | None = None
    """λ_D of KTO; None balances desirable against undesirable answers."""
    undesirable_weight: float | None = None
    """λ_U of KTO; None balances."""
    length_normalized: bool = False
    """Mean instead of summed token log-probs (the per-token form of IPO); for dpo, cdpo, ipo and r-dpo."""
    sft_coef: float = 0.0
    """Weight of the chosen answer's negative log-likelihood, a mean over tokens, added to the loss (RPO)."""
    audio_coef: float = 0.0
    """Weight of DPO on audio: the chosen answer with its audio against the same answer with parts of the audio silenced
    (mDPO, arXiv 2406.11839; OPA-DPO uses 0.2). One more pass over prompt and chosen answer for each pair; 0: none."""
    silenced: float = 0.3
    """Share of the audio that is silenced for `audio_coef`, in pieces of 0.1 s."""
    anchor_coef: float = 0.0
    """Weight of the anchor, which keeps the chosen answer's log-prob above the reference's (OPA-DPO uses 1); 0: none.
    """
    anchor: float = 0.0
    """δ of the anchor: by how much β times the chosen answer's log-ratio should exceed 0."""
    sort: bool = False
    """Batches of pairs of similar length."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass; any value gives the same gradient."""
    save_every: int = 100
    """Updates between checkpoints."""
    eval_every: int = 0
    """Updates between held-out evaluations; 0: only before and after."""

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "micro_batch_tokens", "save_every"))
        weights = ("alpha", "lam", "sft_coef", "audio_coef", "anchor_coef")
        require_ranges(self, positive=("beta",), not_negative=(*weights, "eval_every"))
        for name in self.options():
            if name not in _PREFERENCE_OPTIONS[self.loss]:
                names = ", ".join(_PREFERENCE_OPTIONS[self.loss])
                raise ValueError(f"{name} is not an option of the loss {self.loss!r}, which takes {names}")
        if self.length_normalized and self.loss not in ("dpo", "cdpo", "ipo", "r-dpo"):
            raise ValueError(f"length_normalized is not an option of the loss {self.loss!r}")
        if self.label_smoothing is not None:
            _require(0 <= self.label_smoothing < 0.5, "label_smoothing", self.label_smoothing, "in [0, 0.5)")
        if (self.audio_coef or self.anchor_coef) and self.loss in ("simpo", "cpo", "orpo", "kto"):
            raise ValueError(f"audio_coef and anchor_coef are not options of the loss {self.loss!r}")
        _require(0 < self.silenced <= 1, "silenced", self.silenced, "in (0, 1]")
        if self.loss == "kto" and self.sft_coef:
            raise ValueError("sft_coef is not an option of the loss 'kto'")
        if self.loss == "kto" and self.batch_size < 2:
            raise ValueError("kto compares the answers of a batch; batch_size must be at least 2")

    def options(self) -> dict[str, float]:
        """The loss's own options that are set, by name."""
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
    """Optimizer updates."""
    batch_size: int = 16
    """Pairs per update."""
    log_exp: bool = False
    """log(1 + exp(r_rejected - r_chosen)) instead of Bradley-Terry with the pairs' margins."""
    margins: bool = True
    """Use the pairs' margins."""
    regulariser: float = 0.0
    """Weight c of c·(r_chosen² + r_rejected²)/2, which keeps scores near 0; 0 leaves it out."""
    length_debias: bool = False
    """Leave to a fixed model of the answers' lengths what length explains of the pairs (product of experts, arXiv
    2310.05199), so that the score does not learn it. That model is fitted to the pairs before training and not saved.
    """
    sort: bool = False
    """Batches of pairs of similar length."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass; any value gives the same gradient."""
    save_every: int = 100
    """Updates between checkpoints."""

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "micro_batch_tokens", "save_every"))
        require_ranges(self)
        if self.length_debias and self.log_exp:
            raise ValueError("length_debias moves the margin, which log_exp does not know; set one of them")


@dataclass(frozen=True)
class ProcessRewardConfig:
    """A process reward model: at the marker that ends each step the decoder says whether the step was good."""

    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 16
    """Answers per update."""
    marker: str = "\n\n"
    """Text after each step, at which the step is judged."""
    good: str = "+"
    """The first token of this text means that the step is good."""
    bad: str = "-"
    """The first token of this text means that the step is bad."""
    soft: bool = False
    """Take labels as probabilities; otherwise as 0 or 1."""
    sort: bool = False
    """Batches of answers of similar length."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass; any value gives the same gradient."""
    save_every: int = 100
    """Updates between checkpoints."""

    def __post_init__(self) -> None:
        _require_counts(self, ("steps", "batch_size", "micro_batch_tokens", "save_every"))
        require_ranges(self)


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

"""Policy gradient training: the estimator, the loss, the critic and distillation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from audiorl.config.checks import refuse, require, require_counts, require_ranges
from audiorl.config.flow import FlowConfig, NoisyRule
from audiorl.config.optim import OptimConfig
from audiorl.config.sampling import SamplingConfig

KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum"]

GROUP_ADVANTAGES = ("grpo", "rloo", "process", "step-index", "time-index", "reinforce++-baseline", "maxrl", "gdpo")
"""Estimators that compare the rollouts of a prompt."""
ADVANTAGES = (*GROUP_ADVANTAGES, "gae", "reinforce", "reinforce++", "remax", "none")
LOSSES = (
    "ppo", "gspo", "cispo", "reinforce", "gmpo", "sapo", "dppo-tv", "dppo-kl", "guard", "raft", "nft", "crpo",
)  # fmt: skip
GROUP_LOSSES = ("raft", "crpo")
"""Losses of the best, or of the best and the worst rollout of each group alone."""


@dataclass(frozen=True)
class CriticConfig:
    """The critic of `advantage="gae"`."""

    shared: bool = False
    """One linear layer on the policy's own trunk; otherwise a copy of the policy with its own optimizer."""
    coef: float = 0.5
    """Weight of the value loss relative to the policy's, for a shared trunk."""
    clip: float | None = 0.2
    """Clip range of the value loss around the old values; None: no clipping."""
    warmup_steps: int = 0
    """First steps in which only the critic learns (with a shared trunk: only the value head); of a short training half
    of its steps."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer of a critic with its own trunk."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("clip",), not_negative=("coef", "warmup_steps"), prefix="critic.")


@dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: a teacher that reads the question under a view, such as its transcript in place of the
    audio, says how it would have continued the policy's own answer (GKD, arXiv 2306.13649)."""

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
    """`reference` (the KL's), `policy` (as each step begins), or another model with the same tokenizer."""
    view: str = "transcript"
    """What the teacher reads: a view of `audiorl.data.views`, FILE.py:FUNCTION, or `none` for the prompt as it is."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Which tokens of a response count: all, those up to `</think>`, or those after it."""
    entropy_gate: float | None = None
    """Skip tokens where the teacher's entropy is above this, in nats; None skips none."""
    off_policy: float = 0.0
    """Share of a step's prompts that are answered by their reference instead of the policy (GKD's 1 - λ); below 1."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("coef", "top_k", "entropy_gate"), prefix="distill.")
        require(0 < self.beta < 1, "distill.beta", self.beta, "between 0 and 1")
        require(0 <= self.off_policy < 1, "distill.off_policy", self.off_policy, "at least 0 and below 1")
        for name in ("teacher", "view"):
            require(bool(getattr(self, name)), f"distill.{name}", getattr(self, name), "a name")
        if self.divergence == "sampled" and (self.top_k or self.off_policy):
            name = "top_k" if self.top_k else "off_policy"
            raise ValueError(f"distill.{name} needs a distill.divergence over the vocabulary, not 'sampled'")
        if self.coef and (self.teacher, self.view) == ("policy", "none"):
            raise ValueError("distill: the policy under its own prompt is no teacher; give distill.view or a teacher")

    @property
    def loss_kind(self) -> Literal["reverse", "forward", "jsd"] | None:
        """The divergence that is a term of the loss; None for `sampled`."""
        return None if self.divergence == "sampled" else self.divergence

    @property
    def from_reference_process(self) -> bool:
        """Whether the teacher lives with the reference, where references are processes of their own."""
        return self.coef > 0 and self.teacher != "policy"


@dataclass(frozen=True)
class EstimatorConfig:
    """What advantage estimators read."""

    std: bool = True
    """Divide advantages in a group by its standard deviation (`grpo`, `process`, `step-index`, `time-index`)."""
    eps: float = 1e-4
    """Added to that standard deviation."""
    gamma: float = 1.0
    """Discount per sampled token (`reinforce`, `reinforce++`, `gae`)."""
    lam: float = 0.95
    """λ of `gae`."""
    step_gamma: float = 0.0
    """Discount of the steps after a token's own, of `step-index`; 0: only its own step counts."""
    whiten: bool = True
    """Whiten the advantages of `reinforce` (then `reinforce++`) and `gae` over all sampled tokens of a step."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("eps",), prefix="estimator.")
        for name in ("gamma", "lam", "step_gamma"):
            require(0 <= getattr(self, name) <= 1, f"estimator.{name}", getattr(self, name), "in [0, 1]")


@dataclass(frozen=True)
class LossOptions:
    """What single losses read beyond `clip_low` and `clip_high`."""

    dual_clip: float | None = None
    """`ppo`: bound c > 1 of the loss of tokens with negative advantage, -c·A (dual-clip PPO); None: no bound."""
    ratio_cap: float = 5.0
    """`cispo` and `dppo`: upper bound of the ratio."""
    sapo_positive: float = 1.0
    """τ of `sapo` for tokens with positive advantage: how fast their gradient falls off with the ratio."""
    sapo_negative: float = 1.05
    """τ of `sapo` for the other tokens."""
    frame_ratio: Literal["code", "frame"] = "code"
    """Models that speak: one ratio (and clip) per sampled code, or one per codec frame."""
    codebook_weights: tuple[float, ...] = ()
    """Models that speak, with `frame_ratio` code: weight of each codebook in the surrogate; empty: 1 each."""
    nft_beta: float = 1.0
    """`nft`: β; its two velocities lie β times as far from that of before the step as the policy's, to either side."""
    crpo_beta: float = 2000.0
    """`crpo`: β of DPO, for losses that are means over the numbers of a sound."""

    def __post_init__(self) -> None:
        positive = ("ratio_cap", "sapo_positive", "sapo_negative", "nft_beta", "crpo_beta")
        require_ranges(self, positive=positive, prefix="loss_options.")
        if self.dual_clip is not None:
            require(self.dual_clip > 1, "loss_options.dual_clip", self.dual_clip, "greater than 1")
        weights = self.codebook_weights
        refuse(
            (
                weights and (self.frame_ratio != "code" or min(weights) < 0),
                "loss_options.codebook_weights are numbers of at least 0, with loss_options.frame_ratio 'code'",
            ),
            (weights and not any(weights), "loss_options.codebook_weights: every weight is 0; give at least one"),
        )


@dataclass(frozen=True)
class KLConfig:
    """How the KL to the reference is measured and where it goes; its coefficient is `kl_beta`."""

    kind: KLKind = "k3"
    """Estimator (Schulman 2020). k1 is for the reward: in a loss its mean gradient is 0."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a penalty on the reward of every sampled token (use k1 there)."""
    control: Literal["fixed", "horizon", "log-space"] = "fixed"
    """How β changes to keep the KL near `target`: not at all, proportionally (Ziegler et al. 2019), or in log space. A
    `kl_beta` of 0 stays 0: no KL."""
    target: float = 0.05
    """Wanted mean KL per sampled token."""
    horizon: float = 10_000.0
    """Rollouts over which the horizon controller adapts."""
    gain: float = 0.1
    """Gain of the log-space controller."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("target", "horizon"), not_negative=("gain",), prefix="kl.")


@dataclass(frozen=True)
class ScoreConfig:
    """What happens to the scores of a step before advantages are made of them."""

    clip: float | None = None
    """Clip scores to ± this; None: no clipping."""
    normalize: bool = False
    """Then bring scores to mean 0 and standard deviation 1 over the step."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("clip",), prefix="scores.")


@dataclass(frozen=True)
class PtxConfig:
    """A supervised loss in every update (PPO-ptx, arXiv 2203.02155)."""

    coef: float = 0.0
    """Weight of the loss; 0: none."""
    batch: int = 8
    """Examples per update."""

    def __post_init__(self) -> None:
        require_counts(self, ("batch",), "ptx.")
        require_ranges(self, not_negative=("coef",), prefix="ptx.")


@dataclass(frozen=True)
class GenerationConfig:
    """Rollouts of weights that are older than those that learn from them. Both need `tis_cap`."""

    overlap: bool = False
    """Generate the next step's rollouts while this step trains, with weights of one update ago. Saves time with
    dedicated engines. The step after a checkpoint uses the current weights, so that a resumed run repeats it."""
    partial_tokens: int | None = None
    """Tokens that an answer may sample in one step; the next step continues one that has not ended by then. A step
    trains the groups that have ended. For long answers of text; None: every answer ends in its step."""

    def __post_init__(self) -> None:
        if self.partial_tokens is not None:
            require(self.partial_tokens >= 1, "generation.partial_tokens", self.partial_tokens, "at least 1, or None")


@dataclass(frozen=True)
class ListeningConfig:
    """A check during training that the policy still uses its audio."""

    every: int = 0
    """After the first step and then every so many, measure what the right audio adds to sampled answers over silence,
    noise and another prompt's audio: `audio/gain_*`, in nats per token; 0: never."""
    prompts: int = 16
    """Prompts of the step that are measured, one answer each."""
    min_gain: float = 0.05
    """Gain, in nats per token, below which the model counts as ignoring its audio."""
    action: Literal["warn", "stop"] = "warn"
    """What follows where it does: a line on stderr, or the end of the run with an error."""

    def __post_init__(self) -> None:
        require_counts(self, ("prompts",), "listening.")
        require_ranges(self, not_negative=("every", "min_gain"), prefix="listening.")


@dataclass(frozen=True)
class RLConfig:
    """Policy gradient training. The defaults are GRPO (arXiv 2402.03300) with Ke-Omni-R's choices.

    Advantages: `grpo`; `rloo`; `gae` (PPO, with a critic); `reinforce`; `reinforce++` (best with kl.place `reward`) and
    `reinforce++-baseline`; `process` is GRPO with a reward for each step of an answer
    (`ProcessModelReward(credit="steps")`); `step-index` compares the k-th step with the group's k-th steps
    (`WordIntelligibility`); `time-index` compares a group's streams turn by turn. Experimental: `maxrl`, `gdpo`, which
    normalises each term of a `WeightedSum` within its group, `remax`. `none` has no advantages: distillation alone.
    Dr.GRPO is estimator.std False with aggregation `sequence-mean-token-sum`; DAPO is clip_high 0.28, aggregation
    `token-mean`, kl_beta 0 and dynamic_sampling.
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
    advantage: str = "grpo"
    """The estimator: a name of this class's docstring, or FILE.py:FUNCTION, which gets an `AdvantageInputs` and the
    `estimator` options, and returns [B] or [B, T]; of several ranks also on one without rollouts, B = 0."""
    estimator: EstimatorConfig = EstimatorConfig()
    """Options of the estimator."""
    critic: CriticConfig = CriticConfig()
    """The critic of `gae`."""
    loss: str = "ppo"
    """The surrogate: `ppo` (clipped ratios), `gspo` (wants much narrower clips: its authors use 3e-4 and 4e-4), `cispo`
    (reads loss_options.ratio_cap) or `reinforce`, the plain policy gradient without a ratio; or FILE.py:FUNCTION, a
    function of a `LossInputs`. Experimental: `gmpo` (clips log ratios; its authors use 0.4 and 0.4), `sapo`, `dppo-tv`,
    `dppo-kl` (`clip_low` and `clip_high` bound the change of a token's probability, or the KL; its authors cap ratios
    at 20). Without a gradient of the policy: `raft`, supervised training on the best of
    each group. Of flows `guard` (GRPO-Guard), and with sampling.noisy none `nft` (DiffusionNFT) and `crpo` (DPO of the
    best and the worst of each group), too."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - this."""
    clip_high: float = 0.2
    """Ratios are clipped above 1 + this."""
    loss_options: LossOptions = LossOptions()
    """What single losses read."""
    aggregation: Aggregation = "sequence-mean-token-mean"
    """How token losses are averaged: per sequence (GRPO), over all tokens (DAPO), or by a constant length (Dr.GRPO)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    tis_cap: float | None = None
    """Truncated importance sampling: weigh tokens by min(trainer / engine probability, this). None: no correction."""
    kl_beta: float = 0.01
    """Coefficient β of the KL to the reference; 0: no KL, and no reference is held."""
    kl: KLConfig = KLConfig()
    """How the KL is measured, placed and controlled."""
    scores: ScoreConfig = ScoreConfig()
    """Clipping and normalisation of scores."""
    dynamic_sampling: int = 0
    """Rounds in which groups without signal are replaced by those of other prompts (DAPO); 0 keeps all groups."""
    generation: GenerationConfig = GenerationConfig()
    """Overlapped and partial rollouts."""
    distill: DistillConfig = DistillConfig()
    """Distillation from a teacher, off by default."""
    ptx: PtxConfig = PtxConfig()
    """Supervised examples in every update."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, saved as checkpoints/PHASE/ema at the end; None: none."""
    listening: ListeningConfig = ListeningConfig()
    """The check that the policy uses its audio."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward pass; any value gives the same gradient. None: on a CPU 8192, on a GPU what its memory
    holds."""
    share_prompts: bool = True
    """Responses of a group share one copy of their prompt, audio included; same gradients, less work."""
    eval_every: int = 0
    """Steps between held-out evaluations during training; 0: only before and after."""
    save_every: int = 10
    """Steps between checkpoints."""
    rollouts_every: int = 10
    """Steps between rollouts written to the run folder; the first and last step are always written."""

    def __post_init__(self) -> None:
        counts = ("steps", "prompts_per_step", "group_size", "mini_batches", "epochs", "save_every", "rollouts_every")
        require_counts(self, (*counts, "micro_batch_tokens"))
        require_ranges(
            self,
            positive=("clip_low", "clip_high", "tis_cap"),
            not_negative=("kl_beta", "eval_every", "dynamic_sampling"),
        )
        for option, known in (("advantage", ADVANTAGES), ("loss", LOSSES)):
            name = getattr(self, option)
            if name not in known and ".py:" not in name:
                raise ValueError(f"{option} {name!r}: give one of {', '.join(known)}, or FILE.py:FUNCTION")
        if self.ema_decay is not None:
            require(0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "between 0 and 1")
        kl_in_reward = self.kl.place == "reward" and self.kl_beta
        distill, none = self.distill, self.advantage == "none"
        of_reference = distill.coef and (distill.teacher, distill.view) == ("reference", "none")
        shares = f"{distill.off_policy:g} of {self.prompts_per_step} prompts is {self.reference_prompts}"
        some_of_each = 0 < self.reference_prompts < self.prompts_per_step
        refuse(
            (
                self.group_size == 1 and self.compares_groups and self.advantage != "process",
                f"advantage {self.advantage!r} compares the rollouts of a prompt, so group_size must be at least 2: a "
                "single rollout has advantage 0",
            ),
            (
                self.dynamic_sampling and not self.compares_groups and (none or self.group_size == 1),
                f"advantage {self.advantage!r} does not compare groups of {self.group_size}, of which dynamic_sampling "
                "drops those of equal rewards: set it to 0",
            ),
            (
                self.advantage == "gdpo" and self.scores != ScoreConfig(),
                "advantage 'gdpo' normalises each term: scores.clip and scores.normalize do not apply",
            ),
            (
                self.advantage in ("maxrl", "gdpo") and kl_in_reward,
                f"advantage {self.advantage!r} compares scores, not token rewards: set kl.place 'loss'",
            ),
            (
                self.loss in GROUP_LOSSES and (self.advantage != "grpo" or kl_in_reward or self.group_size == 1),
                f"loss {self.loss!r} compares the scores of a group, and reads no advantages: leave out advantage and "
                "kl.place, and set group_size to at least 2",
            ),
            (
                self.loss == "crpo" and self.prompts_per_step % self.mini_batches,
                f"loss 'crpo' takes pairs of a group: mini_batches {self.mini_batches} must divide prompts_per_step "
                f"{self.prompts_per_step}",
            ),
            (
                self.loss in GROUP_LOSSES and distill.coef and distill.loss_kind is None,
                f"distill.divergence {distill.divergence!r} adds to advantages, which loss {self.loss!r} ignores: "
                "take reverse, forward or jsd",
            ),
            (none and not distill.coef, "advantage 'none' trains nothing without distillation: set distill.coef"),
            (none and kl_in_reward, "advantage 'none' reads no rewards: set kl.place 'loss'"),
            (
                self.kl_beta and (self.kl.kind, self.kl.place) == ("k1", "loss"),
                "kl.kind 'k1' does nothing as a term of the loss, where its mean gradient is 0: set kl.kind 'k3' or "
                "'k2', or kl.place 'reward'",
            ),
            (
                self.kl_beta and of_reference,
                "kl_beta and distill.coef both hold the policy to its reference under the same prompt: set kl_beta 0, "
                "or give the teacher a distill.view",
            ),
            (
                distill.coef and distill.off_policy and not some_of_each,
                f"distill.off_policy {shares}; some must be answered by their reference, and some by the policy",
            ),
            (
                (self.sampled_prompts * self.group_size) % self.mini_batches,
                f"mini_batches {self.mini_batches} does not divide the {self.sampled_prompts} x {self.group_size} "
                "rollouts of a step",
            ),
            (
                self.tis_cap is None and self.generation != GenerationConfig(),
                f"generation.{'overlap' if self.generation.overlap else 'partial_tokens'} trains on tokens of older "
                "weights, which tis_cap corrects: set tis_cap, for example 2",
            ),
        )

    def check_separate_critic(self, critics: int) -> None:
        """Raise ValueError where `runtime.critics` processes cannot hold the critic: there is none, or only a head."""
        option = f"runtime.critics {critics}"
        refuse(
            (
                self.advantage != "gae",
                f"{option}: advantage {self.advantage!r} has no critic; leave the option out, or take gae",
            ),
            (
                self.critic.shared,
                f"{option}: the critic is a head on the policy's trunk (critic.shared), which the trainers hold; leave "
                "one of the two out",
            ),
        )

    def check_flow(self, noisy: NoisyRule) -> None:
        """Raise ValueError for what rollouts of a flow do not have: a critic, a teacher, tokens, answers in text."""
        refuse(
            (
                self.advantage == "gae",
                "advantage gae: flows have no critic; take grpo or another that compares rollouts",
            ),
            (self.distill.coef, "distill.coef: flows are not distilled; set it to 0"),
            (self.entropy_coef, "entropy_coef: the entropy of a flow's noisy steps is fixed; set it to 0"),
            (
                self.loss.startswith("dppo"),
                f"loss {self.loss!r} compares probabilities of tokens, and a flow has densities: take ppo or guard",
            ),
            (self.ptx.coef, "ptx.coef: flows have no supervised term; set it to 0"),
            (self.listening.every, "listening.every: flows do not listen; set it to 0"),
            (self.kl.place == "reward", "kl.place: of flows the KL is a term of the loss; set kl.place 'loss'"),
            (
                self.generation != GenerationConfig(),
                "generation: sounds are neither paused nor made ahead; leave partial_tokens and overlap out",
            ),
            (
                self.loss in ("nft", "crpo") and noisy != "none",
                f"loss {self.loss!r} noises finished sounds again: set sampling.noisy 'none'",
            ),
            (
                self.loss == "guard" and noisy == "none",
                "loss 'guard' is one of noisy steps: set sampling.noisy to 'branch', 'window' or 'all'",
            ),
        )

    def check_sampling(self, sampling: SamplingConfig | FlowConfig) -> None:
        """Raise ValueError where all rollouts of a prompt are one greedy answer, and where `tis_cap` would compare the
        whole distribution with the part of it that is sampled."""
        if isinstance(sampling, FlowConfig):
            sampling.check_trained()
            self.check_flow(sampling.noisy)
            return
        if self.loss in ("guard", "nft", "crpo"):
            raise ValueError(f"loss {self.loss!r} is one of flows; take ppo, gspo or another")
        if self.group_size > 1 and not any(
            (sampling.temperature, sampling.audio_temperature, *sampling.codebook_temperature)
        ):
            raise ValueError(
                f"sampling.temperature 0 gives {self.group_size} times the same answer to a prompt, with nothing to "
                "compare: raise it, or set group_size 1"
            )
        whole = replace(sampling, top_p=1.0, top_k=0, audio_top_p=1.0, audio_top_k=0, codebook_top_p=())
        name = next((f.name for f in fields(whole) if getattr(whole, f.name) != getattr(sampling, f.name)), "")
        if self.tis_cap is not None and name:
            raise ValueError(
                f"tis_cap weighs tokens by their whole distribution, but sampling.{name} {getattr(sampling, name)} "
                "samples from a part of it, whose probabilities are larger; leave one of the two out"
            )

    @property
    def critic_warmup(self) -> int:
        """Return the steps in which the critic alone learns: at most half of all."""
        return min(self.critic.warmup_steps, self.steps // 2) if self.advantage == "gae" else 0

    @property
    def compares_groups(self) -> bool:
        """Return whether a group of equal rollouts has no advantages; of an estimator in a file it is assumed."""
        return self.advantage in GROUP_ADVANTAGES or (".py:" in self.advantage and self.group_size > 1)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with its reference."""
        return self.kl_beta > 0 or self.loss == "crpo"

    @property
    def reference_prompts(self) -> int:
        """Prompts of a step that are answered by their reference."""
        return round(self.distill.off_policy * self.prompts_per_step) if self.distill.coef else 0

    @property
    def sampled_prompts(self) -> int:
        """Prompts of a step that the policy answers."""
        return self.prompts_per_step - self.reference_prompts

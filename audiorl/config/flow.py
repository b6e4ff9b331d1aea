"""Options of flows: their size, how they are sampled, which steps a policy gradient is about, how they are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import require, require_counts, require_ranges
from audiorl.config.supervised import FitConfig

Solver = Literal["euler", "midpoint", "dpm++"]
Noise = Literal["sde", "cps", "dance"]
NoisyRule = Literal["all", "window", "branch", "none"]
Times = Literal["uniform", "logit-normal"]


@dataclass(frozen=True)
class FlowModelConfig:
    """The size of a flow. ThinkSound has width 1024, 7 joint and 14 single blocks."""

    width: int = 256
    """Width of the streams."""
    heads: int = 4
    """Attention heads."""
    joint_blocks: int = 2
    """Blocks in which words and frames attend to each other."""
    single_blocks: int = 4
    """Blocks of frames alone after them."""
    text_blocks: int = 1
    """Blocks of the text encoder, which is trained with the flow."""
    text_rows: int = 16_384
    """Rows of the table of hashed words and parts of words."""
    video: int = 0
    """Video features a frame; 0: no video."""
    channels: int = 1
    """Audio channels: 1 or 2. Each goes through the codec alone, unless that makes phases up, as `mels` does: then one
    sound does, and every frame has a place, delay and level between the ears."""
    max_seconds: float = 30.0
    """The longest sound."""

    def __post_init__(self) -> None:
        require_counts(self, ("width", "heads", "joint_blocks", "text_rows"), "network.")
        require_ranges(self, not_negative=("single_blocks", "text_blocks", "video"), prefix="network.")
        fits = self.width % (4 * self.heads) == 0
        require(fits, "network.width", self.width, f"a multiple of 4 x {self.heads} heads")
        require(self.channels in (1, 2), "network.channels", self.channels, "1 (mono) or 2 (stereo)")
        require(0 < self.max_seconds <= 600, "network.max_seconds", self.max_seconds, "in (0, 600]")


@dataclass(frozen=True)
class FlowConfig:
    """How sounds are sampled from a flow."""

    steps: int = 24
    """Steps from noise to sound."""
    solver: Solver = "euler"
    """Solver of the steps without noise: euler and dpm++ (2M) evaluate the model once a step, midpoint twice."""
    shift: float = 1.0
    """Above 1 more of the steps lie near noise: t becomes shift·t / (1 + (shift - 1)·t)."""
    guidance_scale: float = 1.0
    """Classifier-free guidance: v without conditions plus this times the difference that they make; 1: conditions
    alone. The log-probs of noisy steps are guided, too, so training costs twice as much with it; without noisy steps it
    is not guided."""
    noisy: NoisyRule = "branch"
    """Steps with noise, whose log-probs are trained: all but the last; a random window of them (MixGRPO); or a window
    in the first half up to which a group shares its path (Fast-GRPO). Only in training: evaluation follows the ODE.
    none: training follows it, too, and the loss is one of the finished sounds, which are noised again (DiffusionNFT,
    CRPO, RAFT)."""
    window: int = 2
    """Noisy steps of a window; with `none` the times to which each sound is noised again."""
    noise: Noise = "sde"
    """Flow-SDE, CPS, which leaves no noise behind, or Dance, of constant level; see `audiorl.algos.flow.transition`."""
    noise_level: float = 0.7
    """How much noise: Flow-SDE usually 0.7, CPS 0.8 (at most 1), Dance 0.3."""
    max_batch_frames: int = 16_384
    """Latent frames of the sounds that are made together."""

    def __post_init__(self) -> None:
        require_ranges(
            self,
            positive=("steps", "shift", "guidance_scale", "noise_level", "window", "max_batch_frames"),
            prefix="sampling.",
        )
        if self.noise == "cps":
            require(self.noise_level <= 1, "sampling.noise_level", self.noise_level, "at most 1 with cps")

    def check_trained(self) -> None:
        """Raise ValueError where no step, or not a whole window of them, could have noise."""
        if self.noisy == "none":
            return
        require(self.steps >= 2, "sampling.steps", self.steps, "at least 2: the last step is without noise")
        if self.noisy != "all":
            what = f"below sampling.steps {self.steps}: the last step is without noise"
            require(self.window < self.steps, "sampling.window", self.window, what)

    @property
    def training_temperatures(self) -> tuple[float, float]:
        """Return 1 and 1: noisy steps have no temperature."""
        return 1.0, 1.0


@dataclass(frozen=True, kw_only=True)
class FlowInference:
    """How commands load and sample a flow that makes sounds."""

    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    codec: str | None = None
    """The audio tokenizer of the flow's latents; by default the folder codec/ in or above the flow's."""
    sampling: FlowConfig = FlowConfig()
    """How it is sampled: steps, solver, guidance."""
    seed: int = 0
    """Seed of sampling: equal seeds give equal sounds."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


@dataclass(frozen=True)
class FlowSFTConfig(FitConfig):
    """Flow matching on sounds and what is said of them."""

    batch_size: int = 32
    """Sounds per update."""
    times: Times = "logit-normal"
    """How the time of each sound is drawn: uniform, or more in the middle (SD3)."""
    shift: float = 1.0
    """As `sampling.shift`, of these times."""
    drop: float = 0.1
    """Probability of each condition, and of all together, to be left out of a sound's prompt. Guidance needs it."""
    inpaint: float = 0.0
    """Share of the sounds of which a random span is to be made while the rest is given, as editing needs it."""
    micro_batch_tokens: int | None = None
    """Latent frames and bytes of prompts of one forward pass; any value gives the same gradient. None: 8192."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ranges(self, positive=("shift",))
        for name in ("drop", "inpaint"):
            require(0 <= getattr(self, name) < 1, f"sft.{name}", getattr(self, name), "in [0, 1)")

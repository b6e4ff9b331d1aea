"""Preference optimisation: DPO and its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import require, require_ranges
from audiorl.config.supervised import FitConfig

PreferenceLoss = Literal["dpo", "dpo-norm", "cdpo", "ipo", "r-dpo", "sampo", "ld-dpo", "simpo", "cpo", "orpo", "kto"]


@dataclass(frozen=True)
class PreferenceConfig(FitConfig):
    """Preference optimisation. Options left at None take the loss's own default (`audiorl.algos.preference`).

    The weights of `kto` that are not set balance desirable against undesirable answers.
    """

    loss: PreferenceLoss = "dpo"
    """DPO and its family on pairs, or KTO on single judged answers, of which `batch_size` counts."""
    beta: float | None = None
    """β: scale of the log-ratios. With `dpo-norm`, of means over tokens, `audio_coef` and `anchor_coef` keep 0.1."""
    label_smoothing: float | None = None
    """ε of cDPO: probability that a label is wrong."""
    alpha: float | None = None
    """α of R-DPO (length penalty), LD-DPO (weight of the longer answer's excess) and CPO (weight of the NLL)."""
    gamma: float | None = None
    """γ of SimPO: target margin."""
    lam: float | None = None
    """λ of ORPO: weight of the odds-ratio term."""
    desirable_weight: float | None = None
    """λ_D of KTO; None balances desirable against undesirable answers, with the other weight if that is given."""
    undesirable_weight: float | None = None
    """λ_U of KTO; None balances, likewise."""
    sft_coef: float = 0.0
    """Weight of the chosen answer's negative log-likelihood, a mean over tokens, added to the loss (RPO)."""
    audio_coef: float = 0.0
    """Weight of DPO on audio: the chosen answer against itself after silenced audio (mDPO; OPA-DPO: 0.2); 0: none."""
    silenced: float = 0.3
    """Share of the audio that is silenced for `audio_coef`, in pieces of 0.1 s."""
    anchor_coef: float = 0.0
    """Weight of the anchor, which keeps the chosen answer as likely as under the reference (OPA-DPO: 1); 0: none."""
    eval_every: int = 0
    """Updates between held-out evaluations; 0: only before and after."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = ("alpha", "lam", "sft_coef", "audio_coef", "anchor_coef")
        require_ranges(self, positive=("beta",), not_negative=(*weights, "eval_every"))
        require(0 < self.silenced <= 1, "silenced", self.silenced, "in (0, 1]")
        if self.label_smoothing is not None:
            require(0 <= self.label_smoothing < 0.5, "label_smoothing", self.label_smoothing, "in [0, 0.5)")
        own = OPTIONS_OF_LOSS[self.loss]
        for name in self.options():
            if name not in own:
                names = ", ".join(own)
                raise ValueError(f"{name} is not an option of the loss {self.loss!r}, which takes {names}")
        without = {
            "audio_coef": ("simpo", "cpo", "orpo", "kto"),
            "anchor_coef": ("simpo", "cpo", "orpo", "kto"),
            "sft_coef": ("kto",),
        }
        for name, losses in without.items():
            if getattr(self, name) and self.loss in losses:
                raise ValueError(f"{name} is not an option of the loss {self.loss!r}")

    def options(self) -> dict[str, float]:
        """Return the loss's own options that are set, by name."""
        names = {name for options in OPTIONS_OF_LOSS.values() for name in options}
        return {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}


OPTIONS_OF_LOSS: dict[str, tuple[str, ...]] = {
    "dpo": ("beta",),
    "dpo-norm": ("beta",),
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

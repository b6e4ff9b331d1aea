"""Losses on preferences: DPO and its family on pairs, KTO on single answers, and those of reward models.

A loss on pairs is a function of `PairLogprobs` and its own options and returns one loss a pair [P], differentiable in
the policy's log-probs, and the margin [P] of the chosen answer that it raises, without β; `PAIR_LOSSES` has them by
name. h is DPO's margin, (chosen - ref_chosen) - (rejected - ref_rejected), of log-probs summed over an answer's tokens.
Shapes: P pairs, n tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from audiorl.algos.losses import check_shapes


@dataclass(frozen=True, eq=False)
class PairLogprobs:
    """Log-probs [n] of every token of P pairs of answers, under the policy and under the frozen reference.

    `seeds`: one a pair, of SamPO's draw.
    """

    chosen: Sequence[Tensor]
    rejected: Sequence[Tensor]
    ref_chosen: Sequence[Tensor] = ()
    ref_rejected: Sequence[Tensor] = ()
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert len(self.chosen) == len(self.rejected)
        for answers, refs in ((self.chosen, self.ref_chosen), (self.rejected, self.ref_rejected)):
            assert not refs or [len(x) for x in answers] == [len(x) for x in refs], "the reference saw other answers"

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probs of the chosen and of the rejected answers, [P] each."""
        return sum_each(self.chosen), sum_each(self.rejected)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of the chosen and of the rejected answers, [P] each."""
        both = [[len(answer) for answer in answers] for answers in (self.chosen, self.rejected)]
        good, bad = torch.tensor(both, device=self.chosen[0].device)
        return good, bad

    def margin(self) -> Tensor:
        """Return h [P]."""
        good, bad = self.sums()
        return (good - sum_each(self.ref_chosen)) - (bad - sum_each(self.ref_rejected))

    def ratios(self) -> list[tuple[Tensor, Tensor]]:
        """Return each pair's log-ratios [n] of policy to reference by token: chosen, rejected."""
        answers = zip(self.chosen, self.rejected, self.ref_chosen, self.ref_rejected, strict=True)
        return [(c - ref_c, r - ref_r) for c, r, ref_c, ref_r in answers]


def sum_each(answers: Sequence[Tensor]) -> Tensor:
    """Sum the log-probs [n] of each answer: [P]."""
    return torch.stack([a.sum() for a in answers])


PairLoss = tuple[Tensor, Tensor]
"""Losses [P] and margins [P]."""

# -- losses on pairs ---------------------------------------------------------------------------------------------------


def dpo(pairs: PairLogprobs, beta: float = 0.1) -> PairLoss:
    """-log σ(β·h) (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)."""
    h = pairs.margin()
    return -logsigmoid(beta * h), h


def dpo_norm(pairs: PairLogprobs, beta: float = 5.0) -> PairLoss:
    """DPO of mean log-ratios a token: -log σ(β·(ratio_w/|w| - ratio_l/|l|)) (Lambert et al. 2024, arXiv 2411.15124)."""
    h = torch.stack([good.mean() - bad.mean() for good, bad in pairs.ratios()])
    return -logsigmoid(beta * h), h


def cdpo(pairs: PairLogprobs, beta: float = 0.1, label_smoothing: float = 0.1) -> PairLoss:
    """DPO where a label is wrong with probability ε: -(1-ε)·log σ(β·h) - ε·log σ(-β·h) (Mitchell 2023)."""
    h = pairs.margin()
    return -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h), h


def ipo(pairs: PairLogprobs, beta: float = 0.1) -> PairLoss:
    """(h - 1/(2β))² (Azar et al. 2023, arXiv 2310.12036, eq. 17)."""
    h = pairs.margin()
    return (h - 1 / (2 * beta)) ** 2, h


def r_dpo(pairs: PairLogprobs, beta: float = 0.1, alpha: float = 0.01) -> PairLoss:
    """-log σ(β·h + α·(|chosen| - |rejected|)): what length explains is not learned again (Park et al., 2403.19159)."""
    h, (good_length, bad_length) = pairs.margin(), pairs.lengths()
    return -logsigmoid(beta * h + alpha * (good_length - bad_length)), h


def sampo(pairs: PairLogprobs, beta: float = 0.1) -> PairLoss:
    """DPO on equally many tokens of both answers, drawn from the longer by the pair's seed (Lu et al., 2406.10957)."""
    margins = []
    for ratios, seed in zip(pairs.ratios(), pairs.seeds, strict=True):
        n = min(map(len, ratios))
        generator = torch.Generator().manual_seed(seed)
        drawn = (r[torch.randperm(len(r), generator=generator)[:n].to(r.device)] if len(r) > n else r for r in ratios)
        good, bad = (r.sum() for r in drawn)
        margins.append(good - bad)
    h = torch.stack(margins)
    return -logsigmoid(beta * h), h


def ld_dpo(pairs: PairLogprobs, beta: float = 0.1, alpha: float = 0.5) -> PairLoss:
    """DPO where the tokens beyond the shorter answer's length count α times (Liu et al. 2024, arXiv 2409.06411)."""
    margins = []
    for ratios in pairs.ratios():
        n = min(map(len, ratios))
        good, bad = (r[:n].sum() + alpha * r[n:].sum() for r in ratios)
        margins.append(good - bad)
    h = torch.stack(margins)
    return -logsigmoid(beta * h), h


def simpo(pairs: PairLogprobs, beta: float = 2.0, gamma: float = 1.0) -> PairLoss:
    """-log σ(β·chosen/|chosen| - β·rejected/|rejected| - γ) (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""
    (good, bad), (good_length, bad_length) = pairs.sums(), pairs.lengths()
    loss = -logsigmoid(beta * good / good_length - beta * bad / bad_length - gamma)
    return loss, good / good_length - bad / bad_length


def cpo(pairs: PairLogprobs, beta: float = 0.1, alpha: float = 1.0) -> PairLoss:
    """-log σ(β·(chosen - rejected)) - α·chosen, no reference (Xu et al. 2024, arXiv 2401.08417)."""
    good, bad = pairs.sums()
    return -logsigmoid(beta * (good - bad)) - alpha * good, good - bad


def orpo(pairs: PairLogprobs, lam: float = 0.1) -> PairLoss:
    """NLL of the chosen answer - λ·log σ(log-odds of chosen - of rejected) (Hong et al. 2024, arXiv 2403.07691).

    Both from mean token log-probs m; log-odds = m - log(1 - e^m), in float32 without cancellation.
    """
    (good, bad), (good_length, bad_length) = pairs.sums(), pairs.lengths()
    good, bad = (good / good_length).float(), (bad / bad_length).float()

    def log_odds(m: Tensor) -> Tensor:
        """Exact near 0 and far from it (Mächler 2012, log1mexp)."""
        x = m.clamp(max=-torch.finfo(m.dtype).tiny)
        near = x > -0.6931472
        below = (-torch.expm1(torch.where(near, x, -1.0))).log()
        return m - torch.where(near, below, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))

    h = log_odds(good) - log_odds(bad)
    return -good - lam * logsigmoid(h), h


PAIR_LOSSES: dict[str, Callable[..., PairLoss]] = {
    "dpo": dpo,
    "dpo-norm": dpo_norm,
    "cdpo": cdpo,
    "ipo": ipo,
    "r-dpo": r_dpo,
    "sampo": sampo,
    "ld-dpo": ld_dpo,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
}
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")


def anchored(chosen: Tensor, ref_chosen: Tensor, beta: float = 0.1) -> Tensor:
    """-log σ(β·(chosen - ref_chosen)) of summed log-probs [P]: keeps a chosen answer as likely as the reference does.

    mDPO (Wang et al. 2024, arXiv 2406.11839, eq. 5) and OPA-DPO (Yang et al. 2025, arXiv 2501.09695).
    """
    return -logsigmoid(beta * (chosen - ref_chosen))


# -- KTO ---------------------------------------------------------------------------------------------------------------


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO over single answers [B] (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

    desirable [B] bool. With Δ = logprobs - ref_logprobs: λ_D·(1 - σ(β(Δ - z0))) where desirable, otherwise
    λ_U·(1 - σ(β(z0 - Δ))). `baseline`: z0, from `kto_baseline`.
    """
    check_shapes("kto", logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable)
    gain = beta * (logprobs - ref_logprobs - baseline.detach())
    good, bad = desirable_weight * (1 - gain.sigmoid()), undesirable_weight * (1 - (-gain).sigmoid())
    return torch.where(desirable.bool(), good, bad)


def kto_baseline(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return KTO's z0: the mean log-ratio of mismatched prompts and answers [B] of all ranks, at least 0."""
    return (logprobs - ref_logprobs).mean().clamp(min=0).detach()


def kto_weights(desirable: int, undesirable: int) -> tuple[float, float]:
    """Return (λ_D, λ_U) that balance so many answers of each kind; one of them is 1.

    λ_D·n_D / (λ_U·n_U) lies in [1, 4/3], as KTO's authors advise. With answers of one kind only, both are 1.
    """
    if not desirable or not undesirable:
        return 1.0, 1.0
    ratio = desirable / undesirable
    return max(1.0, 1 / ratio), max(1.0, ratio * 3 / 4)


# -- reward models -----------------------------------------------------------------------------------------------------


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, regulariser: float = 0.0) -> Tensor:
    """Return a reward model's loss on scores [P]: -log σ(r_w - r_l - margin) (Ouyang et al. 2022, eq. 1).

    `regulariser` c adds c·(r_w² + r_l²)/2, the mean of the squared scores, which keeps them near 0 (the code of Safe
    RLHF, Dai et al. 2023, arXiv 2310.12773).
    """
    given = margin if isinstance(margin, Tensor) else None
    check_shapes("bradley_terry", chosen=chosen, rejected=rejected, margin=given)
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + regulariser * (chosen**2 + rejected**2) / 2 if regulariser else loss


def length_expert(differences: Tensor) -> tuple[float, float]:
    """Fit (slope, scale) of σ(slope·tanh(d / scale)), how far length alone predicts which answer of a pair is chosen.

    differences [P]: tokens of the chosen answer less those of the rejected one. `scale` is their root mean square, the
    slope the most probable one under a normal prior of variance 10, which keeps it finite where every chosen answer is
    longer. The form is that of length-controlled AlpacaEval (Dubois et al. 2024, arXiv 2404.04475, eq. 3).
    """
    scale = float(differences.double().square().mean().sqrt()) or 1.0
    x = torch.tanh(differences.double() / scale)
    slope = 0.0
    for _ in range(50):  # Newton: the negative log-likelihood is convex
        p = torch.sigmoid(slope * x)
        gradient, curvature = slope / 10 - float((x * (1 - p)).sum()), 0.1 + float((x**2 * p * (1 - p)).sum())
        slope -= gradient / curvature
    return slope, scale


def length_logit(differences: Tensor, slope: float, scale: float) -> Tensor:
    """Return the log-odds [P] that length alone gives; see `length_expert`.

    `bradley_terry` with the margin -length_logit is a product of experts (Clark et al. 2019, arXiv 1909.03683; Shen et
    al. 2023, arXiv 2310.05199): the scores do not learn what length explains.
    """
    return slope * torch.tanh(differences / scale)


def process_reward(logits: Tensor, labels: Tensor, label_ids: tuple[int, int]) -> Tensor:
    """Cross-entropy [K] of a process reward model at its step markers, over the tokens of a good and of a bad step.

    logits [K, V] at K positions, labels [K] in [0, 1]: the probability of `label_ids[0]` against `label_ids[1]`, hard
    ones 1 and 0 (Lightman et al. 2023; Wang et al. 2024).
    """
    targets = torch.stack([labels, 1 - labels], 1).float()
    return cross_entropy(logits[:, list(label_ids)].float(), targets, reduction="none")

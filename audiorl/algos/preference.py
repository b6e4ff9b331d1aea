"""Losses on preferences: DPO and its family on pairs, KTO on single answers, and those of reward models.

A loss on pairs is a function of `PairLogprobs` and its own options and returns one loss a pair [P], differentiable in
the policy's log-probs; `PAIR_LOSSES` has them by name. h is the margin, (chosen - ref_chosen) - (rejected -
ref_rejected), of log-probs summed over an answer's tokens. Shapes: P pairs, n tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from audiorl.algos.shapes import check_shapes


@dataclass(frozen=True, eq=False)
class PairLogprobs:
    """Log-probs [n] of every token of P pairs of answers, under the policy and under the frozen reference.

    `per_token`: h of mean instead of summed log-probs. `seeds`: one a pair, of SamPO's draw. Raises ValueError for
    answers that do not make pairs, for one without tokens and for one of another length under the reference.
    """

    chosen: Sequence[Tensor]
    rejected: Sequence[Tensor]
    ref_chosen: Sequence[Tensor] = ()
    ref_rejected: Sequence[Tensor] = ()
    per_token: bool = False
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        given = [answers for answers in (self.chosen, self.rejected, self.ref_chosen, self.ref_rejected) if answers]
        if len(set(map(len, given))) > 1:
            raise ValueError(f"{', '.join(str(len(answers)) for answers in given)} answers do not make pairs")
        for answers, refs in ((self.chosen, self.ref_chosen), (self.rejected, self.ref_rejected)):
            for i, answer in enumerate(answers):
                if not len(answer):
                    raise ValueError(f"pair {i}: an answer has no tokens")
                if refs and len(refs[i]) != len(answer):
                    raise ValueError(f"pair {i}: policy and reference saw answers of different length")

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of the chosen and of the rejected answers, [P] each."""
        device = self.chosen[0].device
        good, bad = (torch.tensor([len(a) for a in answers], device=device) for answers in (self.chosen, self.rejected))
        return good, bad

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probs of the chosen and of the rejected answers, [P] each."""
        return sum_each(self.chosen), sum_each(self.rejected)

    def margin(self) -> Tensor:
        """Return h [P]."""
        (good, bad), (ref_good, ref_bad) = self.sums(), (sum_each(self.ref_chosen), sum_each(self.ref_rejected))
        if self.per_token:
            good_length, bad_length = self.lengths()
            good, ref_good = good / good_length, ref_good / good_length
            bad, ref_bad = bad / bad_length, ref_bad / bad_length
        return (good - ref_good) - (bad - ref_bad)

    def ratios(self) -> list[tuple[Tensor, Tensor]]:
        """Return each pair's log-ratios [n] of policy to reference by token: chosen, rejected."""
        answers = zip(self.chosen, self.rejected, self.ref_chosen, self.ref_rejected, strict=True)
        return [(c - ref_c, r - ref_r) for c, r, ref_c, ref_r in answers]


def sum_each(answers: Sequence[Tensor]) -> Tensor:
    """Sum the log-probs [n] of each answer: [P]."""
    return torch.stack([a.sum() for a in answers])


# -- losses on pairs ---------------------------------------------------------------------------------------------------


def dpo(pairs: PairLogprobs, beta: float = 0.1) -> Tensor:
    """-log σ(β·h) (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)."""
    return -logsigmoid(beta * pairs.margin())


def cdpo(pairs: PairLogprobs, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """DPO where a label is wrong with probability ε: -(1-ε)·log σ(β·h) - ε·log σ(-β·h) (Mitchell 2023)."""
    h = beta * pairs.margin()
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def ipo(pairs: PairLogprobs, beta: float = 0.1) -> Tensor:
    """(h - 1/(2β))² (Azar et al. 2023, arXiv 2310.12036, eq. 17); its per-token form with `per_token`."""
    return (pairs.margin() - 1 / (2 * beta)) ** 2


def r_dpo(pairs: PairLogprobs, beta: float = 0.1, alpha: float = 0.01) -> Tensor:
    """-log σ(β·h + α·(|chosen| - |rejected|)) (Park et al. 2024, arXiv 2403.19159).

    The sign is the one under which a longer chosen answer gets the smaller gradient: what its length explains is not
    learned again.
    """
    good_length, bad_length = pairs.lengths()
    return -logsigmoid(beta * pairs.margin() + alpha * (good_length - bad_length))


def sampo(pairs: PairLogprobs, beta: float = 0.1) -> Tensor:
    """DPO on equally many tokens of both answers (Lu et al. 2024, arXiv 2406.10957).

    From the longer answer as many positions as the shorter one has are drawn without replacement, the same for policy
    and reference. The draw depends on the pair's seed alone.
    """
    margins = []
    for ratios, seed in zip(pairs.ratios(), pairs.seeds, strict=True):
        n = min(map(len, ratios))
        generator = torch.Generator().manual_seed(seed)
        good, bad = (
            r[torch.randperm(len(r), generator=generator)[:n].to(r.device)] if len(r) > n else r for r in ratios
        )
        margins.append(good.sum() - bad.sum())
    return -logsigmoid(beta * torch.stack(margins))


def ld_dpo(pairs: PairLogprobs, beta: float = 0.1, alpha: float = 0.5) -> Tensor:
    """DPO where the tokens beyond the shorter answer's length count α times (Liu et al. 2024, arXiv 2409.06411).

    α = 1 is DPO; the paper uses 0.3 to 0.6.
    """
    margins = []
    for ratios in pairs.ratios():
        n = min(map(len, ratios))
        good, bad = (r[:n].sum() + alpha * r[n:].sum() for r in ratios)
        margins.append(good - bad)
    return -logsigmoid(beta * torch.stack(margins))


def simpo(pairs: PairLogprobs, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-log σ(β·chosen/|chosen| - β·rejected/|rejected| - γ) (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""
    (good, bad), (good_length, bad_length) = pairs.sums(), pairs.lengths()
    return -logsigmoid(beta * good / good_length - beta * bad / bad_length - gamma)


def cpo(pairs: PairLogprobs, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """-log σ(β·(chosen - rejected)) - α·chosen, no reference (Xu et al. 2024, arXiv 2401.08417)."""
    good, bad = pairs.sums()
    return -logsigmoid(beta * (good - bad)) - alpha * good


def orpo(pairs: PairLogprobs, lam: float = 0.1) -> Tensor:
    """NLL of the chosen answer - λ·log σ(log-odds of chosen - of rejected) (Hong et al. 2024, arXiv 2403.07691).

    Both from mean token log-probs m; log-odds = m - log(1 - e^m), in float32 without cancellation.
    """
    (good, bad), (good_length, bad_length) = pairs.sums(), pairs.lengths()
    good, bad = (good / good_length).float(), (bad / bad_length).float()
    return -good - lam * logsigmoid((good - _log1mexp(good)) - (bad - _log1mexp(bad)))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact near 0 and far from it (Mächler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931472
    return torch.where(
        near, (-torch.expm1(torch.where(near, x, -1.0))).log(), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )


PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    "dpo": dpo,
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


def anchored(chosen: Tensor, ref_chosen: Tensor, beta: float = 0.1, anchor: float = 0.0) -> Tensor:
    """-log σ(β·(chosen - ref_chosen) - δ) of summed log-probs [P]: keeps a chosen answer as likely as the reference.

    δ is `anchor`, 0 in both papers: mDPO (Wang et al. 2024, arXiv 2406.11839, eq. 5) and OPA-DPO (Yang et al. 2025,
    arXiv 2501.09695), which add it to DPO on answers and to DPO on audio: `dpo` of the chosen answer with its audio
    against the same answer with distorted audio.
    """
    return -logsigmoid(beta * (chosen - ref_chosen) - anchor)


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
    return torch.where(
        desirable.bool(),
        desirable_weight * (1 - gain.sigmoid()),
        undesirable_weight * (1 - (-gain).sigmoid()),
    )


def kto_baseline(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return KTO's z0: the mean log-ratio of mismatched prompts and answers [B], not below 0; a constant of the loss.

    Over several ranks take the mean over all of them first. Needs more than one pair: with one, no mismatch exists.
    """
    if len(logprobs) < 2:
        raise ValueError("kto_baseline: needs at least two mismatched pairs; use a batch of more than one")
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
    check_shapes(
        "bradley_terry", chosen=chosen, rejected=rejected, margin=margin if isinstance(margin, Tensor) else None
    )
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

    A reward model trained on r_w - r_l + this (a product of experts: Clark et al. 2019, arXiv 1909.03683; for length
    Shen et al. 2023, arXiv 2310.05199) does not learn what length explains: `bradley_terry` with the margin
    -length_logit.
    """
    return slope * torch.tanh(differences / scale)


def process_reward(logits: Tensor, labels: Tensor, label_ids: tuple[int, int]) -> Tensor:
    """Cross-entropy [K] of a process reward model at its step markers, over the tokens of a good and of a bad step.

    logits [K, V] at K positions, labels [K] in [0, 1]: the probability of `label_ids[0]` against `label_ids[1]`, hard
    ones 1 and 0 (Lightman et al. 2023; Wang et al. 2024).
    """
    return cross_entropy(
        logits[:, list(label_ids)].float(), torch.stack([labels, 1 - labels], 1).float(), reduction="none"
    )

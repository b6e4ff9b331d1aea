"""Preference losses. Each returns one loss a pair (KTO: one an answer), differentiable in the policy's log-probs.

Shapes: P pairs. `chosen`, `rejected` [P] are log-probs of whole answers under the policy, summed over their tokens;
`ref_chosen`, `ref_rejected` [P] the same under the reference, constants. Losses that look inside an answer take its
per-token log-probs instead: sequences of P tensors [tokens]. h = (chosen - ref_chosen) - (rejected - ref_rejected).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from audiorl.algos.shapes import check_shapes

Answers = Sequence[Tensor]


def dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    """-log σ(β·h) (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)."""
    return -logsigmoid(beta * _margin(chosen, rejected, ref_chosen, ref_rejected))


def cdpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> Tensor:
    """DPO where a label is wrong with probability ε: -(1-ε)·log σ(β·h) - ε·log σ(-β·h) (Mitchell 2023)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"cdpo: label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    h = beta * _margin(chosen, rejected, ref_chosen, ref_rejected)
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    """(h - 1/(2β))² (Azar et al. 2023, arXiv 2310.12036, eq. 17). Pass means instead of sums for the per-token form."""
    return (_margin(chosen, rejected, ref_chosen, ref_rejected) - 1 / (2 * beta)) ** 2


def r_dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
    alpha: float = 0.01,
) -> Tensor:
    """-log σ(β·h + α·(|chosen| - |rejected|)) (Park et al. 2024, arXiv 2403.19159).

    The sign is the one under which a longer chosen answer gets the smaller gradient: what its length explains is not
    learned again. Lengths [P] in tokens.
    """
    check_shapes("r_dpo", chosen=chosen, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    excess = alpha * (chosen_lengths - rejected_lengths)
    return -logsigmoid(beta * _margin(chosen, rejected, ref_chosen, ref_rejected) + excess)


def sampo(
    chosen: Answers,
    rejected: Answers,
    ref_chosen: Answers,
    ref_rejected: Answers,
    beta: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """DPO on equally many tokens of both answers (Lu et al. 2024, arXiv 2406.10957).

    From the longer answer as many positions as the shorter one has are drawn without replacement, the same for policy
    and reference. `generator` (CPU) makes the draw reproducible.
    """
    margins = []
    for c, r, ref_c, ref_r in _pairs(chosen, rejected, ref_chosen, ref_rejected):
        n = min(len(c), len(r))
        ratios = [
            (lp - ref)[torch.randperm(len(lp), generator=generator)[:n].to(lp.device)] if len(lp) > n else lp - ref
            for lp, ref in ((c, ref_c), (r, ref_r))
        ]
        margins.append(ratios[0].sum() - ratios[1].sum())
    return -logsigmoid(beta * torch.stack(margins))


def ld_dpo(
    chosen: Answers,
    rejected: Answers,
    ref_chosen: Answers,
    ref_rejected: Answers,
    beta: float = 0.1,
    alpha: float = 0.5,
) -> Tensor:
    """DPO where the tokens beyond the shorter answer's length count α times (Liu et al. 2024, arXiv 2409.06411).

    α = 1 is DPO; the paper uses 0.3 to 0.6.
    """
    margins = []
    for c, r, ref_c, ref_r in _pairs(chosen, rejected, ref_chosen, ref_rejected):
        n = min(len(c), len(r))
        sums = [(lp - ref)[:n].sum() + alpha * (lp - ref)[n:].sum() for lp, ref in ((c, ref_c), (r, ref_r))]
        margins.append(sums[0] - sums[1])
    return -logsigmoid(beta * torch.stack(margins))


def anchored(chosen: Tensor, ref_chosen: Tensor, beta: float = 0.1, anchor: float = 0.0) -> Tensor:
    """-log σ(β·(chosen - ref_chosen) - δ): keeps the chosen answer's log-prob above the reference's.

    δ is `anchor`, 0 in both papers: mDPO (Wang et al. 2024, arXiv 2406.11839, eq. 5) and OPA-DPO (Yang et al. 2025,
    arXiv 2501.09695), which add it to DPO on answers and to DPO on audio: `dpo` of the chosen answer with its audio
    against the same answer with distorted audio.
    """
    check_shapes("anchored", chosen=chosen, ref_chosen=ref_chosen)
    return -logsigmoid(beta * (chosen - ref_chosen) - anchor)


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    """-log σ(β·chosen/|chosen| - β·rejected/|rejected| - γ) (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""
    lengths = dict(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    check_shapes("simpo", chosen=chosen, rejected=rejected, **lengths)
    return -logsigmoid(beta * chosen / chosen_lengths - beta * rejected / rejected_lengths - gamma)


def cpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """-log σ(β·(chosen - rejected)) - α·chosen, no reference (Xu et al. 2024, arXiv 2401.08417)."""
    check_shapes("cpo", chosen=chosen, rejected=rejected)
    return -logsigmoid(beta * (chosen - rejected)) - alpha * chosen


def orpo(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, lam: float = 0.1
) -> Tensor:
    """NLL of the chosen answer - λ·log σ(log-odds of chosen - of rejected) (Hong et al. 2024, arXiv 2403.07691).

    Both from mean token log-probs m; log-odds = m - log(1 - e^m), in float32 without cancellation.
    """
    lengths = dict(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    check_shapes("orpo", chosen=chosen, rejected=rejected, **lengths)
    good, bad = (chosen / chosen_lengths).float(), (rejected / rejected_lengths).float()
    return -good - lam * logsigmoid((good - _log1mexp(good)) - (bad - _log1mexp(bad)))


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
    """KTO's z0: the mean log-ratio of mismatched prompts and answers [B], not below 0; a constant of the loss.

    Over several ranks take the mean over all of them first. Needs more than one pair: with one, no mismatch exists.
    """
    if len(logprobs) < 2:
        raise ValueError("kto_baseline: needs at least two mismatched pairs; use a batch of more than one")
    return (logprobs - ref_logprobs).mean().clamp(min=0).detach()


def kto_weights(desirable: int, undesirable: int) -> tuple[float, float]:
    """(λ_D, λ_U) for so many answers of each kind that λ_D·n_D / (λ_U·n_U) lies in [1, 4/3], as KTO's authors advise.

    One of them is 1. With answers of one kind only, both are.
    """
    if not desirable or not undesirable:
        return 1.0, 1.0
    ratio = desirable / undesirable
    return max(1.0, 1 / ratio), max(1.0, ratio * 3 / 4)


def pairwise(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, log_exp: bool = False, regulariser: float = 0.0
) -> Tensor:
    """A reward model's loss on scores [P]: -log σ(r_w - r_l - margin), Bradley-Terry (Ouyang et al. 2022, eq. 1).

    `log_exp` asks for log(1 + exp(r_l - r_w)), which knows no margin. `regulariser` c adds c·(r_w² + r_l²)/2, the mean
    of the squared scores, which keeps them near 0 (the code of Safe RLHF, Dai et al. 2023, arXiv 2310.12773).
    """
    if log_exp and (isinstance(margin, Tensor) or margin):
        raise ValueError("pairwise: the LogExp form knows no margin")
    check_shapes("pairwise", chosen=chosen, rejected=rejected, margin=margin if isinstance(margin, Tensor) else None)
    loss = softplus(rejected - chosen) if log_exp else -logsigmoid(chosen - rejected - margin)
    return loss + regulariser * (chosen**2 + rejected**2) / 2 if regulariser else loss


def length_expert(differences: Tensor) -> tuple[float, float]:
    """(slope, scale) of σ(slope·tanh(d / scale)), how far length alone predicts which answer of a pair is chosen.

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
    """The log-odds [P] that length alone gives; see `length_expert`.

    A reward model trained on r_w - r_l + this (a product of experts: Clark et al. 2019, arXiv 1909.03683; for length
    Shen et al. 2023, arXiv 2310.05199) does not learn what length explains: `pairwise` with the margin -length_logit.
    """
    return slope * torch.tanh(differences / scale)


def process_reward(logits: Tensor, labels: Tensor, label_ids: Sequence[int] | None = None) -> Tensor:
    """A process reward model's cross-entropy at its step markers; -100 marks what does not count. Returns [K].

    logits [K, V] at K positions. Hard labels [K] int64 are token ids; with `label_ids` the softmax runs over these
    alone and every label must be one of them. Soft labels [K] float in [0, 1] are the probability of `label_ids[0]`
    against `label_ids[1]` (Lightman et al. 2023; Wang et al. 2024). Positions without label give 0.
    """
    counted = labels != -100
    if labels.is_floating_point():
        if label_ids is None or len(label_ids) != 2:
            raise ValueError("process_reward: soft labels need two label_ids, of the good and of the bad step")
        if bool(((labels[counted] < 0) | (labels[counted] > 1)).any()):
            raise ValueError("process_reward: soft labels must lie in [0, 1]")
        logs = logits[:, list(label_ids)].float().log_softmax(-1)
        soft = torch.where(counted, labels, 0.0)
        return torch.where(counted, -(soft * logs[:, 0] + (1 - soft) * logs[:, 1]), 0.0)
    if label_ids is None:
        return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="none")
    ids = torch.tensor(list(label_ids), device=labels.device)
    which = labels[:, None] == ids
    if bool((counted & ~which.any(1)).any()):
        raise ValueError(f"process_reward: a label is none of the label_ids {list(label_ids)}")
    places = torch.where(counted, which.long().argmax(1), -100)
    return torch.nn.functional.cross_entropy(
        logits[:, list(label_ids)].float(), places, ignore_index=-100, reduction="none"
    )


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    log_probs = dict(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    check_shapes("preference loss", **log_probs)
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _pairs(*answers: Answers) -> list[tuple[Tensor, ...]]:
    pairs = list(zip(*answers, strict=True))
    for i, (c, r, ref_c, ref_r) in enumerate(pairs):
        if len(c) != len(ref_c) or len(r) != len(ref_r):
            raise ValueError(f"pair {i}: policy and reference saw answers of different length")
        if not len(c) or not len(r):
            raise ValueError(f"pair {i}: an answer has no tokens")
    return pairs


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact near 0 and far from it (Mächler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931472
    return torch.where(
        near, (-torch.expm1(torch.where(near, x, -1.0))).log(), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )

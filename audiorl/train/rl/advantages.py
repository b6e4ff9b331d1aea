"""From the scores of a step's experiences to an advantage on every sampled token.

The formulas are in `audiorl.algos.advantages`; here `RLConfig` chooses among them. Shapes: B experiences, padded to T
tokens here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiorl.algos.advantages import (
    decoupled_relative,
    gae,
    group_relative,
    leave_one_out,
    mean_relative,
    process_relative,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reinforce_returns,
    remax,
    step_index_relative,
    time_index_on_tokens,
    whiten,
)
from audiorl.algos.experience import Experience
from audiorl.algos.kl import kl_estimate
from audiorl.config import RLConfig
from audiorl.train.batches import widened
from audiorl.types import Score

if TYPE_CHECKING:  # collecting needs the rewards' packages, training does not
    from audiorl.train.rl.collect import RolloutBatch

Reduce = Callable[[Tensor], Tensor]
GROUP_ESTIMATORS = (
    "group",
    "mean-relative",
    "decoupled",
    "process",
    "step-index",
    "leave-one-out",
    "remax",
    "time-index",
    "none",
)
"""Estimators that need the scores of one group and nothing else."""


def normalize_scores(scores: Sequence[Score], clip: float | None, normalize: bool) -> list[Score]:
    """Scores clipped to ± `clip`, then brought to mean 0 and standard deviation 1 over the step.

    Values per segment or token are clipped and scaled likewise; the shift to mean 0 goes onto the last of them, where
    an outcome belongs. Equal scores become 0. `parts` are logged, never normalised.
    """
    out = list(scores)
    if clip is not None:
        out = [_mapped(s, lambda x: min(max(x, -clip), clip)) for s in out]
    if normalize and out:
        totals = torch.tensor([s.total for s in out], dtype=torch.float64)
        mean, std = float(totals.mean()), float(totals.std(unbiased=False))
        scale = 1 / std if std > 1e-8 else 0.0
        out = [_shifted(_mapped(s, lambda x: x * scale), -mean * scale) for s in out]
    return out


def scored_experiences(batch: RolloutBatch, config: RLConfig) -> list[Experience]:
    """The experiences of a step; their scores, and those of greedy answers, clipped and normalised together."""
    scores = [r.score for r in batch.rollouts if r.score]
    normalized = normalize_scores([*scores, *batch.greedy], config.score_clip, config.score_normalize)
    out = [Experience.from_rollout(r.with_score(s)) for r, s in zip(batch.rollouts, normalized, strict=False)]
    if not batch.greedy:
        return out
    groups = list(dict.fromkeys(e.group_id for e in out))
    greedy = dict(zip(groups, (s.total for s in normalized[len(scores) :]), strict=True))
    return [e.replace(greedy_score=greedy[e.group_id]) for e in out]


def compute_advantages(experiences: Sequence[Experience], config: RLConfig) -> list[Experience]:
    """On the driver: `advantages` [L] of the estimators that compare the scores of a group, 0 on observed tokens.

    They are those of GROUP_ESTIMATORS. Experiences of the other estimators, and all where the
    KL is part of the reward, come back as they are: `compute_token_advantages` completes them in the trainers, which
    have log-probs and values and whiten over all ranks.
    """
    if config.advantage not in GROUP_ESTIMATORS or (config.kl_in == "reward" and config.kl_beta):
        return list(experiences)
    return _group_advantages(experiences, config, *_scores_and_rewards(experiences, config, 0.0))


def compute_token_advantages(
    experiences: Sequence[Experience], config: RLConfig, beta: float, reduce: Reduce | None = None
) -> list[Experience]:
    """In the trainers: `advantages` (and for `gae` `returns`) [L] of experiences that have none yet.

    With the KL in the reward each sampled token costs `beta`·KL, from old and reference log-probs; `gae` needs values.
    Groups are whole: no group is split over ranks. `reduce` sums a tensor over all ranks, for whitening.
    """
    # A rank without experiences still takes part in the sums over ranks of the estimators that whiten.
    if all(e.advantages is not None for e in experiences) and (experiences or config.advantage in GROUP_ESTIMATORS):
        return list(experiences)
    scores_B, rewards_BT, mask_BT = _scores_and_rewards(experiences, config, beta)
    if config.advantage in GROUP_ESTIMATORS:
        return _group_advantages(experiences, config, scores_B, rewards_BT, mask_BT)
    returns_BT: Tensor | None = None
    if config.advantage == "reinforce":
        advantages_BT = reinforce_returns(rewards_BT, mask_BT, config.gamma)
    elif config.advantage == "reinforce++":
        advantages_BT = reinforce_plus_plus(rewards_BT, mask_BT, config.gamma, reduce)
    elif config.advantage == "reinforce++-baseline":
        groups = [e.group_id for e in experiences]
        advantages_BT = reinforce_plus_plus_baseline(scores_B, groups, mask_BT, reduce)
    else:
        values_BT = _padded([_field(e, "values") for e in experiences])
        advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, config.gamma, config.lam)
    if config.whiten and config.advantage in ("reinforce", "gae"):
        advantages_BT = whiten(advantages_BT, mask_BT, reduce)
    return _filled(experiences, advantages_BT, returns_BT)


def _scores_and_rewards(
    experiences: Sequence[Experience], config: RLConfig, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B], token rewards [B, T] and the mask [B, T] of sampled tokens, less the KL where it is in the reward."""
    mask_BT = _padded([e.loss_mask for e in experiences])
    rewards_BT = _padded([_field(e, "rewards") for e in experiences])
    scores_B = torch.tensor([e.score for e in experiences], dtype=torch.float32)
    if config.kl_in == "reward" and beta:
        old, ref = (_padded(widened([_field(e, n) for e in experiences])) for n in ("old_logprobs", "ref_logprobs"))
        kl = kl_estimate(old, ref, config.kl_kind)
        penalty_BT = torch.where(mask_BT, beta * (kl if kl.dim() == 2 else kl.sum(-1)), 0.0)
        rewards_BT, scores_B = rewards_BT - penalty_BT, scores_B - penalty_BT.sum(1)
    return scores_B, rewards_BT, mask_BT


def _group_advantages(
    experiences: Sequence[Experience], config: RLConfig, scores_B: Tensor, rewards_BT: Tensor, mask_BT: Tensor
) -> list[Experience]:
    groups = [e.group_id for e in experiences]
    if config.advantage == "none":
        return _filled(experiences, torch.zeros_like(rewards_BT))
    if config.advantage == "time-index":
        return _filled(experiences, _per_turn(experiences, rewards_BT, mask_BT, config))
    if config.advantage == "process":
        std, eps = config.advantage_std, config.advantage_eps
        return _filled(experiences, process_relative(rewards_BT, mask_BT, groups, std, eps))
    if config.advantage == "step-index":
        normalisation = config.advantage_std, config.advantage_eps, config.step_gamma
        return _filled(experiences, step_index_relative(rewards_BT, mask_BT, groups, *normalisation))
    if config.advantage == "group":
        advantages_B = group_relative(scores_B, groups, config.advantage_std, config.advantage_eps)
    elif config.advantage == "mean-relative":
        advantages_B = mean_relative(scores_B, groups)
    elif config.advantage == "decoupled":
        advantages_B = decoupled_relative(*_terms(experiences), groups, config.advantage_eps)
    elif config.advantage == "leave-one-out":
        advantages_B = leave_one_out(scores_B, groups)
    else:
        advantages_B = remax(scores_B, torch.tensor([e.greedy_score for e in experiences], dtype=torch.float32))
    return _filled(experiences, advantages_B[:, None] * mask_BT)


def _terms(experiences: Sequence[Experience]) -> tuple[Tensor, list[float]]:
    """The values [B, K] and the K weights of the terms of the reward."""
    weights = [w for _, w in experiences[0].score_terms]
    for e in experiences:
        if not e.score_terms or [w for _, w in e.score_terms] != weights:
            raise ValueError(
                f"{e.name}: advantage 'decoupled' needs a reward that is a WeightedSum, the same for all rollouts"
            )
    return torch.tensor([[value for value, _ in e.score_terms] for e in experiences]), weights


def _filled(
    experiences: Sequence[Experience], advantages_BT: Tensor, returns_BT: Tensor | None = None
) -> list[Experience]:
    return [
        e.replace(
            advantages=advantages_BT[i, : len(e)].clone(),
            returns=None if returns_BT is None else returns_BT[i, : len(e)].clone(),
        )
        for i, e in enumerate(experiences)
    ]


def mean_advantage(experience: Experience) -> float:
    """Over the sampled tokens; 0 when there are none."""
    assert experience.advantages is not None
    return float(experience.advantages.sum() / experience.loss_mask.sum().clamp(min=1))


def _per_turn(experiences: Sequence[Experience], rewards_BT: Tensor, mask_BT: Tensor, config: RLConfig) -> Tensor:
    """Time-index advantages [B, T]: each segment's rewards summed, compared over the group, given to its tokens."""
    segments = [e.segment if e.segment is not None else torch.zeros(len(e), dtype=torch.long) for e in experiences]
    counts_B = torch.tensor([int(s[-1]) + 1 for s in segments])
    groups = [e.group_id for e in experiences]
    normalisation = config.advantage_std, config.advantage_eps
    return time_index_on_tokens(rewards_BT, mask_BT, _padded(segments), counts_B, groups, *normalisation)


def _field(e: Experience, name: str) -> Tensor:
    stream = getattr(e, name)
    assert stream is not None, f"{name} of {e.name} is not filled in"
    return stream


def _padded(streams: Sequence[Tensor]) -> Tensor:
    if not streams:  # a rank without experiences still takes part in the sums over ranks
        return torch.zeros(0, 0)
    return pad_sequence(list(streams), batch_first=True)


def _mapped(score: Score, f: Callable[[float], float]) -> Score:
    segments, tokens = (None if v is None else tuple(map(f, v)) for v in (score.per_segment, score.per_token))
    return replace(score, total=f(score.total), per_segment=segments, per_token=tokens)


def _shifted(score: Score, by: float) -> Score:
    segments, tokens = ((*v[:-1], v[-1] + by) if v else v for v in (score.per_segment, score.per_token))
    return replace(score, total=score.total + by, per_segment=segments, per_token=tokens)

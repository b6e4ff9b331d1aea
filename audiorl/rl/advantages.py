"""Credit: from the rewards of a step's experiences to an advantage on every sampled token.

Shapes: B experiences, padded to T tokens here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiorl.algos.advantages import (
    gae,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reinforce_returns,
    remax,
    time_index_relative,
    whiten,
)
from audiorl.algos.kl import kl_estimate
from audiorl.config import RLConfig
from audiorl.train.batches import widened
from audiorl.types import Experience, Score

Reduce = Callable[[Tensor], Tensor]


def normalize_scores(scores: Sequence[Score], clip: float | None, normalize: bool) -> list[Score]:
    """Scores clipped to ± `clip`, then brought to mean 0 and standard deviation 1 over the step.

    Values per segment or token are clipped and scaled likewise; the shift to mean 0 goes onto the last of them, where
    an outcome belongs. Equal scores become 0. Parts stay as they are: they are for people.
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


def compute_advantages(
    experiences: Sequence[Experience], config: RLConfig, beta: float, reduce: Reduce | None = None
) -> list[Experience]:
    """The experiences with advantages (and, for `gae`, returns) [L], 0 where nothing was sampled.

    They carry token rewards and scores; with the KL in the reward also old and reference log-probs, and each sampled
    token then costs β·kl; for `gae` values. Groups are whole: no group is split over ranks. `reduce` sums over ranks.
    """
    mask = _padded([e.loss_mask for e in experiences])
    rewards = _padded([_of(e, "rewards") for e in experiences])
    scores = torch.tensor([e.score for e in experiences], dtype=torch.float32)
    if config.kl_in == "reward" and beta:
        old, ref = (_padded(widened([_of(e, n) for e in experiences])) for n in ("old_logprobs", "ref_logprobs"))
        kl = kl_estimate(old, ref, config.kl_kind)
        penalty = torch.where(mask, beta * (kl if kl.dim() == 2 else kl.sum(-1)), 0.0)
        rewards, scores = rewards - penalty, scores - penalty.sum(1)
    groups = [e.group_id for e in experiences]
    returns: Tensor | None = None
    kind = config.advantage
    if kind == "group":
        found = _per_rollout(group_relative(scores, groups, config.advantage_std, config.advantage_eps), mask)
    elif kind == "time-index":
        found = _per_turn(experiences, rewards, mask, config)
    elif kind == "leave-one-out":
        found = _per_rollout(leave_one_out(scores, groups), mask)
    elif kind == "remax":
        greedy = torch.tensor([e.greedy_score for e in experiences], dtype=torch.float32)
        found = _per_rollout(remax(scores, greedy), mask)
    elif kind == "reinforce":
        found = reinforce_returns(rewards, mask, config.gamma)
        found = whiten(found, mask, reduce) if config.whiten else found
    elif kind == "reinforce++":
        found = reinforce_plus_plus(rewards, mask, config.gamma, reduce)
    elif kind == "reinforce++-baseline":
        found = reinforce_plus_plus_baseline(scores, groups, mask, reduce)
    else:
        values = _padded([_of(e, "values") for e in experiences])
        found, returns = gae(rewards, values, mask, config.gamma, config.lam)
        found = whiten(found, mask, reduce) if config.whiten else found
    return [
        e.replace(
            advantages=found[i, : len(e)].clone(), returns=None if returns is None else returns[i, : len(e)].clone()
        )
        for i, e in enumerate(experiences)
    ]


def with_advantage(experience: Experience, advantage: float) -> Experience:
    """The experience with one advantage on every sampled token."""
    return experience.replace(advantages=torch.where(experience.loss_mask, advantage, 0.0))


def mean_advantage(experience: Experience) -> float:
    """Over the sampled tokens; 0 when there are none."""
    assert experience.advantages is not None
    return float(experience.advantages.sum() / experience.loss_mask.sum().clamp(min=1))


def _per_rollout(advantages: Tensor, mask: Tensor) -> Tensor:
    return advantages[:, None] * mask


def _per_turn(experiences: Sequence[Experience], rewards: Tensor, mask: Tensor, config: RLConfig) -> Tensor:
    """Time-index advantages [B, T]: each segment's rewards summed, compared over the group, given to its tokens."""
    segments = [e.segment if e.segment is not None else torch.zeros(len(e), dtype=torch.long) for e in experiences]
    counts = torch.tensor([int(s[-1]) + 1 for s in segments])
    index = _padded(segments)
    summed = rewards.new_zeros(len(index), int(counts.max())).scatter_add(1, index, torch.where(mask, rewards, 0.0))
    present = torch.arange(summed.shape[1]) < counts[:, None]
    groups = [e.group_id for e in experiences]
    found = time_index_relative(summed, present, groups, config.advantage_std, config.advantage_eps)
    return torch.where(mask, found.gather(1, index), 0.0)


def _of(e: Experience, name: str) -> Tensor:
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

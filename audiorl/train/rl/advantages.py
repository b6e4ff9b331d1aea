"""From the scores of a step's rollouts to an advantage on every sampled token.

The formulas are in `audiorl.algos`; here `RLConfig.advantage` chooses among them. Advantages are made in the trainers,
which have what some estimators need: log-probs for a KL in the reward, values, and sums over all ranks for whitening.
The rollouts of a prompt are never split over ranks.

Shapes: B experiences, padded to T tokens here and nowhere else; K terms of a weighted sum of rewards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiorl.algos.advantages import (
    LARGEST_REWARD,
    Reduce,
    all_equal,
    differ,
    gae,
    group_relative,
    identity,
    process_relative,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reinforce_returns,
    rloo,
    step_index_relative,
    time_index_on_tokens,
    whiten,
)
from audiorl.algos.experience import Experience
from audiorl.algos.experimental import gdpo, maxrl, remax
from audiorl.algos.losses import kl_estimate
from audiorl.config import EstimatorConfig, RLConfig
from audiorl.train.batches import widened
from audiorl.types import Rollout, Score
from audiorl.user_files import load_function


def normalize_scores(
    scores: Sequence[Score], clip: float | None, normalize: bool, by_step: bool = False
) -> list[Score]:
    """Return scores clipped to ± `clip`, then brought to mean 0 and standard deviation 1 over the step.

    Values per segment or token are clipped and scaled likewise; the shift to mean 0 goes onto the last of them, where
    an outcome belongs, or with `by_step` nowhere: where steps are compared with each other it would set last steps
    apart. Equal scores become 0. `parts` are logged, never normalised.
    """

    def changed(score: Score, f: Callable[[float], float], shift: float = 0.0) -> Score:
        segments, tokens = (
            None if v is None else tuple([*map(f, v[:-1]), *(f(x) + (0.0 if by_step else shift) for x in v[-1:])])
            for v in (score.per_segment, score.per_token)
        )
        return replace(score, total=f(score.total) + shift, per_segment=segments, per_token=tokens)

    out = list(scores)
    if clip is not None:
        out = [changed(s, lambda x: min(max(x, -clip), clip)) for s in out]
    if normalize and out:
        totals = [s.total for s in out]
        mean = statistics.fmean(totals)
        scale = 0.0 if all_equal(totals) else 1 / statistics.pstdev(totals)
        out = [changed(s, lambda x: x * scale, -mean * scale) for s in out]
    return out


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What an estimator may read: the experiences of whole groups. A KL in the reward is taken off already."""

    experiences: Sequence[Experience]
    scores_B: Tensor  # [B]: the total of each rollout's score
    rewards_BT: Tensor
    """[B, T]: the score placed on sampled tokens; they sum up to `scores_B` where credit is not finer."""
    mask_BT: Tensor  # [B, T] bool: the sampled tokens
    reduce: Reduce = identity  # Sums a tensor over all ranks, for statistics of the whole step

    @classmethod
    def of(cls, experiences: Sequence[Experience], reduce: Reduce = identity) -> AdvantageInputs:
        """Pad the experiences. Raises ValueError for a reward that is too large."""
        for e in experiences:
            largest = max(abs(e.score), float(_field(e, "rewards").abs().max()), *(abs(x) for x, _ in e.score_terms))
            if largest >= LARGEST_REWARD:
                raise ValueError(
                    f"{e.name}: a reward of {largest:g} is too large, float32 does not hold its square; keep rewards "
                    f"below {LARGEST_REWARD:g}, or set scores.clip"
                )
        scores_B = torch.tensor([e.score for e in experiences], dtype=torch.float32)
        rewards_BT = padded([_field(e, "rewards") for e in experiences])
        return cls(experiences, scores_B, rewards_BT, padded([e.loss_mask for e in experiences]), reduce)

    @property
    def groups(self) -> list[str]:
        """B labels, equal for rollouts of one prompt."""
        return [e.group_id for e in self.experiences]

    @cached_property
    def step_ends_BT(self) -> Tensor:
        """[B, T] int64: how many steps end on a token, see `Experience.step_ends`."""
        without = next((e.name for e in self.experiences if e.step_ends is None), None)
        if without is not None:
            raise ValueError(
                f"{without}: this advantage compares steps, but the reward gives credit per token without saying where "
                "steps end; give Score.step_ends"
            )
        return padded([e.step_ends for e in self.experiences if e.step_ends is not None])

    @cached_property
    def values_BT(self) -> Tensor:
        """[B, T]: the critic's values."""
        return padded([_field(e, "values") for e in self.experiences])


Estimator = Callable[[AdvantageInputs, EstimatorConfig], Tensor]
"""Returns advantages [B], one for all tokens of a rollout, or [B, T]."""


def _time_index(x: AdvantageInputs, c: EstimatorConfig) -> Tensor:
    """Compares a group's streams turn by turn: the steps are the segments of the rollouts."""
    segments = [e.segment if e.segment is not None else torch.zeros(len(e), dtype=torch.long) for e in x.experiences]
    counts_B = torch.tensor([int(s[-1]) + 1 for s in segments])
    return time_index_on_tokens(x.rewards_BT, x.mask_BT, padded(segments), counts_B, x.groups, c.std, c.eps)


def _gdpo(x: AdvantageInputs, c: EstimatorConfig) -> Tensor:
    # A rank without experiences joins the sums over ranks with no rows of one term.
    weights = [w for _, w in x.experiences[0].score_terms] if x.experiences else [1.0]
    for e in x.experiences:
        total = sum(value * w for value, w in e.score_terms)
        summed = math.isclose(total, e.score, rel_tol=1e-6, abs_tol=1e-9)  # not of a reward that changes it
        if not e.score_terms or not summed or [w for _, w in e.score_terms] != weights:
            raise ValueError(
                f"{e.name}: advantage 'gdpo' needs a reward that is a WeightedSum, the same for all rollouts"
            )
    terms = [[value for value, _ in e.score_terms] for e in x.experiences]
    terms_BK = torch.tensor(terms, dtype=torch.float32).reshape(len(terms), len(weights))
    return gdpo(terms_BK, weights, x.groups, c.eps, x.reduce)


def _whitened(advantages_BT: Tensor, x: AdvantageInputs, c: EstimatorConfig) -> Tensor:
    return whiten(advantages_BT, x.mask_BT, x.reduce) if c.whiten else advantages_BT


ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda x, c: group_relative(x.scores_B, x.groups, c.std, c.eps),
    "rloo": lambda x, c: rloo(x.scores_B, x.groups),
    "process": lambda x, c: process_relative(x.rewards_BT, x.mask_BT, x.step_ends_BT, x.groups, c.std, c.eps),
    "step-index": lambda x, c: step_index_relative(
        x.rewards_BT, x.mask_BT, x.step_ends_BT, x.groups, c.std, c.eps, c.step_gamma
    ),
    "time-index": _time_index,
    "gae": lambda x, c: _whitened(gae(x.rewards_BT, x.values_BT, x.mask_BT, c.gamma, c.lam)[0], x, c),
    "reinforce": lambda x, c: _whitened(reinforce_returns(x.rewards_BT, x.mask_BT, c.gamma), x, c),
    "reinforce++": lambda x, c: reinforce_plus_plus(x.rewards_BT, x.mask_BT, c.gamma, x.reduce),
    "reinforce++-baseline": lambda x, c: reinforce_plus_plus_baseline(x.scores_B, x.groups, x.mask_BT, x.reduce),
    "none": lambda x, c: torch.zeros_like(x.scores_B),
    "maxrl": lambda x, c: maxrl(x.scores_B, x.groups),
    "gdpo": _gdpo,
    "remax": lambda x, c: remax(x.scores_B, torch.tensor([e.greedy_score for e in x.experiences])),
}
"""`RLConfig.advantage` by name."""
FINER_THAN_TOTALS = ("process", "step-index", "time-index", "gdpo")
"""Estimators that compare more of a group than its totals: rollouts of equal totals may have advantages."""
SUMS_OVER_RANKS = ("gae", "reinforce", "reinforce++", "reinforce++-baseline", "gdpo")
"""Estimators whose collective sums a rank without experiences joins, too, as it does those of a user's estimator."""


def compute_advantages(
    experiences: Sequence[Experience], config: RLConfig, beta: float = 0.0, reduce: Reduce = identity
) -> list[Experience]:
    """Return experiences with `advantages` [L], 0 on observed tokens, and for `gae` with `returns` [L].

    With the KL in the reward each sampled token costs `beta`·KL, from old and reference log-probs; `gae` needs values.
    Experiences that all have advantages come back as they are. Raises ValueError for a reward that is too large.
    """
    if experiences and all(e.advantages is not None for e in experiences):
        return list(experiences)
    if not experiences and config.advantage in ESTIMATORS and config.advantage not in SUMS_OVER_RANKS:
        return []
    x = AdvantageInputs.of(experiences, reduce)
    mask_BT = x.mask_BT
    if config.kl.place == "reward" and beta:
        old, ref = (padded(widened([_field(e, n) for e in experiences])) for n in ("old_logprobs", "ref_logprobs"))
        kl = kl_estimate(old, ref, config.kl.kind)
        penalty_BT = torch.where(mask_BT, beta * (kl if kl.dim() == 2 else kl.sum(-1)), 0.0)
        x = replace(x, rewards_BT=x.rewards_BT - penalty_BT, scores_B=x.scores_B - penalty_BT.sum(1))
    estimator = ESTIMATORS.get(config.advantage)
    if estimator is None:
        path, _, function = config.advantage.rpartition(":")
        estimator = load_function(path, function, "advantage")
    advantages = estimator(x, config.estimator)
    if advantages.dim() == 1:
        advantages = advantages[:, None] * mask_BT
    made = [e.replace(advantages=advantages[i, : len(e)].clone()) for i, e in enumerate(experiences)]
    if config.advantage != "gae":
        return made
    _, returns_BT = gae(x.rewards_BT, x.values_BT, mask_BT, config.estimator.gamma, config.estimator.lam)
    return [e.replace(returns=returns_BT[i, : len(e)].clone()) for i, e in enumerate(made)]


def has_signal(group: Sequence[Rollout], config: RLConfig) -> bool:
    """Return whether the advantages of a scored group are not all 0 by what they compare: steps, turns, the terms of a
    sum, or else totals, which are also what dynamic sampling looks at where an estimator compares no groups.

    A KL in the reward does not count.
    """
    scores = normalize_scores([r.score for r in group if r.score], config.scores.clip, normalize=False)
    if config.advantage not in FINER_THAN_TOTALS:
        totals = [s.total for s in scores]
        return bool(differ(*torch.tensor([min(totals), max(totals)], dtype=torch.float32)))
    x = AdvantageInputs.of([Experience.from_rollout(r.with_score(s)) for r, s in zip(group, scores, strict=True)])
    return bool(ESTIMATORS[config.advantage](x, config.estimator).any())


def mean_advantage(experience: Experience) -> float:
    """Return the mean over the sampled tokens; 0 when there are none."""
    return float(_field(experience, "advantages").sum() / experience.loss_mask.sum().clamp(min=1))


def padded(streams: Sequence[Tensor]) -> Tensor:
    """Return streams [L] or [L, Q] as one tensor [B, T, …]; a rank without experiences has none of both."""
    return pad_sequence(list(streams), batch_first=True) if streams else torch.zeros(0, 0)


def _field(e: Experience, name: str) -> Tensor:
    stream = getattr(e, name)
    assert stream is not None, f"{name} of {e.name} is not filled in"
    return stream

"""One step's rollouts: ask, score, and where wanted drop groups without signal and ask others instead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from audiorl.config import RLConfig
from audiorl.data.schedule import batch_of_step
from audiorl.rewards.check import check_scores, scored_rollouts
from audiorl.types import Request, Reward, Rollout, Sample, Score


class Writer(Protocol):
    """What is asked of an engine here: see `RolloutEngine`."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]: ...


@dataclass(frozen=True)
class RolloutBatch:
    """Scored rollouts, group by group. `greedy`: per group the score of the greedy answer, where it was asked for.

    `dropped` and `refilled` count groups, `skipped` rollouts for which the reward returned None.
    """

    rollouts: list[Rollout]
    greedy: list[Score]
    dropped: int = 0
    refilled: int = 0
    skipped: int = 0


def collect(
    engine: Writer, samples: Sequence[Sample], reward: Reward, step: int, config: RLConfig, seed: int
) -> RolloutBatch:
    """`group_size` answers to each of `prompts_per_step` prompts.

    With dynamic sampling (DAPO, arXiv 2503.14476) a group whose scores are all equal is dropped, and in up to
    `dynamic_sampling` more rounds other prompts are asked for it. What is still missing then stays missing; only when
    no group at all has signal the first round's are kept, so that a step is never empty. Rollouts that the reward skips
    leave their group. Raises ValueError when it skips all of them.
    """
    kept: list[list[Rollout]] = []
    first: list[list[Rollout]] = []
    asked: list[Sample] = []
    dropped = refilled = skipped = 0
    for attempt in range(1 + config.dynamic_sampling):
        missing = config.prompts_per_step - len(kept)
        if attempt:
            known = {s.id for s in asked}
            new = [s for s in samples if s.id not in known]
            batch = random.Random(f"{seed}/{step}/refill {attempt}").sample(new, min(missing, len(new)))
        else:
            batch = batch_of_step(samples, step, missing, seed)
        if not batch:
            break
        groups = _ask(engine, batch, reward, config.group_size, seed * 1_000_003 + step, step, len(asked))
        asked += batch
        refilled += len(batch) if attempt else 0
        skipped += len(batch) * config.group_size - sum(map(len, groups))
        first = first or groups
        signal = [g for g in groups if _has_signal(g)] if config.dynamic_sampling else groups
        kept += signal
        dropped += len(groups) - len(signal)
        if len(kept) >= config.prompts_per_step:
            break
    kept = kept or first
    greedy: list[Score] = []
    if config.advantage == "remax":
        scores = _greedy(engine, [g[0] for g in kept], reward)
        skipped += sum(len(g) for g, s in zip(kept, scores, strict=True) if s is None)
        kept = [g for g, s in zip(kept, scores, strict=True) if s is not None]
        greedy = [s for s in scores if s is not None]
    if not kept:
        raise ValueError(f"step {step + 1}: the reward skipped all of {skipped} rollouts; return a Score for some")
    return RolloutBatch([r for group in kept for r in group], greedy, dropped, refilled, skipped)


def _ask(
    engine: Writer, batch: Sequence[Sample], reward: Reward, n: int, seed: int, step: int, first: int
) -> list[list[Rollout]]:
    requests = [Request(s, n, seed=seed, group_id=f"{step}/{i}") for i, s in enumerate(batch, first)]
    rollouts = engine.generate(requests)
    scored = scored_rollouts("reward", reward(rollouts), rollouts)
    return [list(group) for _, group in groupby(scored, key=lambda r: r.group_id)]


def _greedy(engine: Writer, heads: Sequence[Rollout], reward: Reward) -> list[Score | None]:
    rollouts = engine.generate([Request(r.sample, 1, group_id=r.group_id, greedy=True) for r in heads])
    return check_scores("reward", reward(rollouts), rollouts)


def _has_signal(group: Sequence[Rollout]) -> bool:
    totals = [r.score.total for r in group if r.score]
    return max(totals) - min(totals) > 1e-6

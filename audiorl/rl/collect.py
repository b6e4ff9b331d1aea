"""One step's rollouts: generate, score, and where wanted drop groups without signal and ask other prompts instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from audiorl.config import RLConfig
from audiorl.data.schedule import batch_of_step
from audiorl.rewards.check import score_rollouts, scored_rollouts
from audiorl.rl.weight_sync import GroupEngine
from audiorl.types import Request, Reward, Rollout, RolloutEngine, Sample, Score


@dataclass(frozen=True)
class RolloutBatch:
    """Scored rollouts, group by group, made by `collect`."""

    rollouts: list[Rollout]
    greedy: list[Score]
    """Per group the score of the greedy answer; only ReMax asks for it."""
    dropped: int = 0
    """Groups without signal that dynamic sampling left out."""
    refilled: int = 0
    """Groups that dynamic sampling asked for in their place."""
    skipped: int = 0
    """Rollouts that were left out because the reward returned None."""

    @property
    def num_sampled(self) -> int:
        """Tokens and frames."""
        return sum(r.num_sampled for r in self.rollouts)


class Collector:
    """The rollouts of every step of a phase, with `RLConfig.overlap` one step ahead of the trainers."""

    def __init__(self, engine: GroupEngine, samples: Sequence[Sample], reward: Reward, config: RLConfig, seed: int):
        self._engine, self._config = engine, config
        self._collect: Callable[[int], RolloutBatch] = lambda step: collect(engine, samples, reward, step, config, seed)
        self._next: RolloutBatch | None = None

    def collect(self, step: int) -> RolloutBatch:
        """The rollouts of `step`: those collected during the update before, else new ones."""
        batch, self._next = self._next, None
        return batch or self._collect(step)

    @contextmanager
    def collect_ahead(self, step: int, stopping: bool) -> Iterator[None]:
        """Around the update before `step`: with `RLConfig.overlap` collect the rollouts of `step` at the same time.

        Rollouts are not part of a checkpoint. The step after one is therefore collected after it, with the new weights,
        and a resumed run equals one that went through.
        """
        config = self._config
        if not config.overlap or stopping or step % config.save_every == 0 or step >= config.steps:
            yield
            return
        with self._engine.overlap(partial(self._collect, step)) as rollouts:
            yield
        self._next = rollouts()


def collect(
    engine: RolloutEngine, samples: Sequence[Sample], reward: Reward, step: int, config: RLConfig, seed: int
) -> RolloutBatch:
    """`group_size` answers to each of the prompts that the policy answers, see `RLConfig.sampled_prompts`.

    With dynamic sampling (DAPO, arXiv 2503.14476) a group whose scores are all equal is dropped, and in up to
    `dynamic_sampling` more rounds other prompts are asked in its place. Groups still missing then stay missing; only
    when no group at all has signal those of the first round are kept, so that a step is never empty. Rollouts that the
    reward skips leave their group; raises ValueError when it skips all of them.
    """
    groups: list[list[Rollout]] = []
    first_round: list[list[Rollout]] = []
    prompts: list[Sample] = []
    dropped = refilled = skipped = 0
    for attempt in range(1 + config.dynamic_sampling):
        missing = config.sampled_prompts - len(groups)
        if attempt:
            used = {s.id for s in prompts}
            unused = [s for s in samples if s.id not in used]
            batch = random.Random(f"{seed}/{step}/refill {attempt}").sample(unused, min(missing, len(unused)))
        else:
            batch = batch_of_step(samples, step, missing, seed)
        if not batch:
            break
        answered = _generate(engine, batch, reward, config.group_size, seed * 1_000_003 + step, step, len(prompts))
        prompts += batch
        refilled += len(batch) if attempt else 0
        skipped += len(batch) * config.group_size - sum(map(len, answered))
        first_round = first_round or answered
        with_signal = [g for g in answered if _has_signal(g)] if config.dynamic_sampling else answered
        groups += with_signal
        dropped += len(answered) - len(with_signal)
        if len(groups) >= config.sampled_prompts:
            break
    groups = groups or first_round
    greedy: list[Score] = []
    if config.advantage == "remax":
        scores = _greedy(engine, [g[0] for g in groups], reward)
        skipped += sum(len(g) for g, s in zip(groups, scores, strict=True) if s is None)
        groups = [g for g, s in zip(groups, scores, strict=True) if s is not None]
        greedy = [s for s in scores if s is not None]
    if not groups:
        raise ValueError(f"step {step + 1}: the reward skipped all of {skipped} rollouts; return a Score for some")
    return RolloutBatch([r for group in groups for r in group], greedy, dropped, refilled, skipped)


def _generate(
    engine: RolloutEngine, batch: Sequence[Sample], reward: Reward, n: int, seed: int, step: int, first: int
) -> list[list[Rollout]]:
    requests = [Request(s, n, seed=seed, group_id=f"{step}/{i}") for i, s in enumerate(batch, first)]
    rollouts = engine.generate(requests)
    scored = scored_rollouts(reward, rollouts)
    return [list(group) for _, group in groupby(scored, key=lambda r: r.group_id)]


def _greedy(engine: RolloutEngine, heads: Sequence[Rollout], reward: Reward) -> list[Score | None]:
    rollouts = engine.generate([Request(r.sample, 1, group_id=r.group_id, greedy=True) for r in heads])
    return score_rollouts(reward, rollouts)


def _has_signal(group: Sequence[Rollout]) -> bool:
    totals = [r.score.total for r in group if r.score]
    return max(totals) - min(totals) > 1e-6

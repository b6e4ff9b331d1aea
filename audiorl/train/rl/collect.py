"""One step's rollouts: generate, score, and where wanted drop groups without signal and ask other prompts instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from audiorl.algos.experience import Experience
from audiorl.config import RLConfig
from audiorl.data.schedule import batch_of_step
from audiorl.protocols import Request, Reward, RolloutEngine
from audiorl.rewards.combine import score_rollouts, scored_rollouts
from audiorl.rewards.concurrency import EarlyScores, begins_early
from audiorl.train.rl.advantages import normalize_scores
from audiorl.train.rl.engines import GroupEngine
from audiorl.train.rl.partial import UnfinishedGroup, save_unfinished, unfinished_file
from audiorl.types import Rollout, Sample, Score


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
    unfinished: list[UnfinishedGroup] = field(default_factory=list)
    """Groups that wait for the next step, see `GenerationConfig.partial_tokens`."""

    @property
    def num_sampled(self) -> int:
        """Tokens and frames."""
        return sum(r.num_sampled for r in self.rollouts)


class Collector:
    """The rollouts of every step of a phase, with `GenerationConfig.overlap` one step ahead of the trainers.

    unfinished: the groups that wait when the phase continues from a checkpoint.
    """

    def __init__(
        self,
        engine: GroupEngine,
        samples: Sequence[Sample],
        reward: Reward,
        config: RLConfig,
        seed: int,
        unfinished: Sequence[UnfinishedGroup] = (),
    ):
        self._engine, self._config = engine, config
        self._samples, self._reward, self._seed = samples, reward, seed
        self.unfinished = list(unfinished)
        """Groups that wait after the last step that was collected for."""
        self._next: RolloutBatch | None = None

    def collect(self, step: int) -> RolloutBatch:
        """Return the rollouts of `step`: those collected during the update before, else new ones."""
        batch = self._next or self._collect(step)
        self._next, self.unfinished = None, batch.unfinished
        return batch

    def _collect(self, step: int) -> RolloutBatch:
        return collect(self._engine, self._samples, self._reward, step, self._config, self._seed, self.unfinished)

    def save(self, done: int) -> Callable[[Path], None]:
        """Return a function that writes the groups that wait after `done` steps to the folder of the phase's
        checkpoints."""
        return lambda checkpoints: save_unfinished(unfinished_file(checkpoints, done), self.unfinished)

    @contextmanager
    def collect_ahead(self, step: int, stopping: bool) -> Iterator[None]:
        """Around the update before `step`: with `GenerationConfig.overlap` collect the rollouts of `step` meanwhile.

        Rollouts are not part of a checkpoint. The step after one is therefore collected after it, with the new weights,
        and a resumed run equals one that went through.
        """
        config = self._config
        if not config.generation.overlap or stopping or step % config.save_every == 0 or step >= config.steps:
            yield
            return
        with self._engine.overlap(partial(self._collect, step)) as rollouts:
            yield
        self._next = rollouts()


def collect(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    reward: Reward,
    step: int,
    config: RLConfig,
    seed: int,
    unfinished: Sequence[UnfinishedGroup] = (),
) -> RolloutBatch:
    """Return `group_size` answers to each of the prompts that the policy answers, see `RLConfig.sampled_prompts`.

    With dynamic sampling (DAPO, arXiv 2503.14476) a group whose scores are all equal is dropped, and in up to
    `dynamic_sampling` more rounds other prompts are asked in its place. Groups still missing then stay missing; only
    when no group at all has signal those of the first round are kept, so that a step is never empty. Rollouts that the
    reward skips leave their group; raises ValueError when it skips all of them.

    Groups in `unfinished` are continued. With `partial_tokens` the batch holds the groups that have ended, in the order
    in which they were asked; the last step ends all.
    """
    groups: list[list[Rollout]] = []
    first_round: list[list[Rollout]] = []
    prompts: list[Sample] = [g.request.sample for g in unfinished]
    waiting = list(unfinished)
    dropped = refilled = skipped = 0
    limit = config.generation.partial_tokens if step + 1 < config.steps else None
    for attempt in range(1 + config.dynamic_sampling):
        # Groups that wait were asked for by an earlier step, and take no place of this step's prompts.
        missing = config.sampled_prompts + len(unfinished) - len(groups) - len(waiting)
        if attempt:
            used = {s.id for s in prompts}
            unused = [s for s in samples if s.id not in used]
            batch = random.Random(f"{seed}/{step}/refill {attempt}").sample(unused, min(missing, len(unused)))
            refilled += len(batch)
        else:
            batch = batch_of_step(samples, step, missing, seed)
        if not batch:
            break
        first = len(prompts) - len(unfinished)
        requests = [
            Request(s, config.group_size, seed * 1_000_003 + step, f"{step}/{i}", token_limit=limit)
            for i, s in enumerate(batch, first)
        ]
        prompts += batch
        if attempt:
            answers = _answer(engine, [], requests, limit, reward)
            waiting += answers.paused
        else:
            answers = _answer_until_one_ends(engine, unfinished, requests, limit, reward)
            waiting = answers.paused
            first_round = answers.groups
        skipped += answers.skipped
        with_signal = [g for g in answers.groups if _has_signal(g)] if config.dynamic_sampling else answers.groups
        groups += with_signal
        dropped += len(answers.groups) - len(with_signal)
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
    return RolloutBatch([r for group in groups for r in group], greedy, dropped, refilled, skipped, waiting)


class _Answers(NamedTuple):
    groups: list[list[Rollout]]
    """The groups that have ended, scored, without the rollouts that the reward skips."""
    paused: list[UnfinishedGroup]
    """The groups with answers that have not."""
    skipped: int
    """Rollouts that the reward skipped."""


def _answer_until_one_ends(
    engine: RolloutEngine,
    unfinished: Sequence[UnfinishedGroup],
    requests: Sequence[Request],
    limit: int | None,
    reward: Reward,
) -> _Answers:
    """Continue groups and begin others until at least one has ended: a step needs something to train on.

    While none has, the older half of the paused groups is continued and the younger half waits.
    """
    continued: Sequence[UnfinishedGroup] = unfinished
    waiting: list[UnfinishedGroup] = []
    skipped = 0
    while True:
        answers = _answer(engine, continued, requests, limit, reward)
        skipped += answers.skipped
        if answers.groups or not answers.paused:
            return _Answers(answers.groups, [*answers.paused, *waiting], skipped)
        half = (len(answers.paused) + 1) // 2
        continued, waiting, requests = answers.paused[:half], [*answers.paused[half:], *waiting], []


def _answer(
    engine: RolloutEngine,
    continued: Sequence[UnfinishedGroup],
    requests: Sequence[Request],
    limit: int | None,
    reward: Reward,
) -> _Answers:
    """Continue groups and begin others. A reward that waits for something else begins as soon as a group has ended."""
    requested = [*(group.continuation(limit) for group in continued), *requests]
    groups = {g.request.group_id: g for g in continued}
    groups |= {r.group_id: UnfinishedGroup(replace(r, token_limit=None), ()) for r in requests}

    def completed(rollouts: Sequence[Rollout]) -> UnfinishedGroup:
        group = groups[rollouts[0].group_id]
        return group.with_continued(rollouts) if group.rollouts else replace(group, rollouts=rollouts)

    def ended(rollouts: Sequence[Rollout]) -> None:
        if (group := completed(rollouts)).has_ended:
            early.add(group.rollouts)

    with ExitStack() as stack:
        if begins_early(reward):
            early = stack.enter_context(EarlyScores(reward))
            rollouts, reward = engine.generate(requested, ended), early.reward
        else:
            rollouts = engine.generate(requested)
        several = [completed(list(group)) for _, group in groupby(rollouts, key=lambda r: r.group_id)]
        whole = [group.rollouts for group in several if group.has_ended]
        scored = _scored(reward, whole)
        skipped = sum(map(len, whole)) - sum(map(len, scored))
        return _Answers(scored, [g for g in several if not g.has_ended], skipped)


def _scored(reward: Reward, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
    """Return the groups with their scores; rollouts that the reward skips are left out."""
    scored = scored_rollouts(reward, [r for group in groups for r in group]) if groups else []
    return [list(group) for _, group in groupby(scored, key=lambda r: r.group_id)]


def _greedy(engine: RolloutEngine, heads: Sequence[Rollout], reward: Reward) -> list[Score | None]:
    rollouts = engine.generate([Request(r.sample, 1, group_id=r.group_id, greedy=True) for r in heads])
    return score_rollouts(reward, rollouts)


def _has_signal(group: Sequence[Rollout]) -> bool:
    totals = [r.score.total for r in group if r.score]
    return max(totals) - min(totals) > 1e-6


def scored_experiences(batch: RolloutBatch, config: RLConfig) -> list[Experience]:
    """Return the experiences of a step; their scores, and those of greedy answers, are clipped and normalised
    together."""
    scores = [r.score for r in batch.rollouts if r.score]
    normalized = normalize_scores([*scores, *batch.greedy], config.scores.clip, config.scores.normalize)
    out = [Experience.from_rollout(r.with_score(s)) for r, s in zip(batch.rollouts, normalized, strict=False)]
    if not batch.greedy:
        return out
    groups = list(dict.fromkeys(e.group_id for e in out))
    greedy = dict(zip(groups, (s.total for s in normalized[len(scores) :]), strict=True))
    return [e.replace(greedy_score=greedy[e.group_id]) for e in out]

"""One step's rollouts: generate, score, and where wanted drop groups without signal and ask other prompts instead.

With `GenerationConfig.partial_tokens` an answer samples at most so many tokens in one step (Kimi k1.5, arXiv
2501.12599, section 2.6). A group with an answer that has not ended waits for the next step, which samples the rest with
its own weights. Tokens keep the log-probs and the version of the weights that sampled them; `tis_cap` corrects each.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from audiorl.algos.experience import Experience
from audiorl.config import RLConfig
from audiorl.data.schedule import batch_of_step
from audiorl.data.sets import SET
from audiorl.models import AudioPolicy, TrainedPolicy
from audiorl.protocols import Request, Reward, RolloutEngine
from audiorl.rewards.combine import StandardisedSum, score_rollouts, scored_rollouts
from audiorl.rewards.concurrency import EarlyScores, begins_early
from audiorl.rollout.hf import AnswerState, build_rollout, token_versions
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.train.rl.advantages import has_signal, normalize_scores
from audiorl.train.rl.processes import GroupEngine
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that waits for its paused answers."""

    request: Request  # As it was first asked
    rollouts: Sequence[Rollout]  # All answers of the group: those that have ended, and the paused ones

    def continuation(self, token_limit: int | None) -> Request:
        """Return the request that goes on with the paused answers."""
        paused = tuple(r for r in self.rollouts if _is_paused(r))
        return replace(self.request, n=len(paused), token_limit=token_limit, paused=paused)

    def with_answers(self, answers: Sequence[Rollout]) -> UnfinishedGroup:
        """Return the group with its first answers, or with those to `continuation` in place of the paused ones."""
        by_index = {r.index: r for r in answers}
        return replace(self, rollouts=[by_index.get(r.index, r) for r in self.rollouts or answers])

    @property
    def has_ended(self) -> bool:
        return not any(map(_is_paused, self.rollouts))


def _is_paused(rollout: Rollout) -> bool:
    return rollout.segments[-1].stop_reason == "paused"


@dataclass(frozen=True)
class RolloutBatch:
    """Scored rollouts, group by group, made by `collect`."""

    rollouts: list[Rollout]
    greedy: list[Score]  # Per group the score of the greedy answer; only ReMax asks for it
    dropped: int = 0  # Groups without signal that dynamic sampling left out
    refilled: int = 0  # Groups that dynamic sampling asked for in their place
    skipped: int = 0  # Rollouts that were left out because the reward returned None
    reward_seconds: float = 0.0  # For which scores were waited for after the answers
    unfinished: list[UnfinishedGroup] = field(default_factory=list)  # Groups that wait for the next step
    totals: Sequence[float] = ()  # Of all scores, those of dropped groups too

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
        self.reward_seconds = 0.0
        """For which the last step waited for its scores."""
        self._next: RolloutBatch | None = None

    def collect(self, step: int) -> RolloutBatch:
        """Return the rollouts of `step`: those collected during the update before, else new ones."""
        batch = self._next or self._collect(step)
        self.reward_seconds = 0.0 if self._next else batch.reward_seconds
        self._next, self.unfinished = None, batch.unfinished
        return batch

    def prompts_of(self, step: int) -> Sequence[Sample]:
        """Return the prompts that `step` asks first."""
        return batch_of_step(self._samples, step, self._config.sampled_prompts, self._seed)

    def _collect(self, step: int) -> RolloutBatch:
        return collect(self._engine, self._samples, self._reward, step, self._config, self._seed, self.unfinished)

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

    With dynamic sampling (DAPO, arXiv 2503.14476) a group without signal (`has_signal`) is dropped, and in up to
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
    totals: list[float] = []
    reward_seconds = 0.0
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
        prompts += batch
        asked, times = [], Counter[str]()
        for i, s in enumerate(batch, first):  # a prompt that is asked twice would be answered alike with one seed
            of_group = seed * 1_000_003 + step + (times[s.id] << 48)
            asked.append(UnfinishedGroup(Request(s, config.group_size, of_group, f"{step}/{i}"), ()))
            times[s.id] += 1
        continued, left = ([], waiting) if attempt else (waiting, [])
        while True:
            try:
                ended, paused, left_out, seconds = _answer(engine, continued, asked, limit, reward)
            except FloatingPointError as error:
                raise FloatingPointError(f"step {step + 1}: {error}; resume from before, with a smaller lr") from error
            skipped, reward_seconds = skipped + left_out, reward_seconds + seconds
            if attempt or ended or not paused:
                break
            # A step needs something to train on: the older half of the paused groups goes on, the younger half waits.
            half = (len(paused) + 1) // 2
            continued, asked, left = paused[:half], [], [*paused[half:], *left]
        waiting = [*left, *paused] if attempt else [*paused, *left]
        first_round = first_round if attempt else ended
        totals += [r.score.total for group in ended for r in group if r.score]
        with_signal = [g for g in ended if has_signal(g, config)] if config.dynamic_sampling else ended
        groups += with_signal
        dropped += len(ended) - len(with_signal)
        if len(groups) >= config.sampled_prompts:
            break
    groups = groups or first_round
    answers: list[Rollout] = []
    if config.advantage == "remax":
        requests = [Request(g[0].sample, 1, group_id=g[0].group_id, greedy=True) for g in groups]
        answers, began = engine.generate(requests), time.monotonic()
        scores = score_rollouts(reward, answers)
        reward_seconds += time.monotonic() - began
        skipped += sum(len(g) for g, s in zip(groups, scores, strict=True) if s is None)
        groups = [g for g, s in zip(groups, scores, strict=True) if s is not None]
        answers = [a.with_score(s) for a, s in zip(answers, scores, strict=True) if s is not None]
    if not groups:
        raise ValueError(f"step {step + 1}: the reward skipped all of {skipped} rollouts; return a Score for some")
    rollouts = [r for group in groups for r in group]
    if isinstance(reward, StandardisedSum) and (refilled or answers):
        # Each call of the reward standardised over rollouts of its own, which do not compare with the others.
        together = reward.as_one_batch([*rollouts, *answers])
        rollouts, answers = together[: len(rollouts)], together[len(rollouts) :]
    greedy = [a.score for a in answers if a.score is not None]
    return RolloutBatch(rollouts, greedy, dropped, refilled, skipped, reward_seconds, waiting, totals)


def _answer(
    engine: RolloutEngine,
    continued: Sequence[UnfinishedGroup],
    asked: Sequence[UnfinishedGroup],
    limit: int | None,
    reward: Reward,
) -> tuple[list[list[Rollout]], list[UnfinishedGroup], int, float]:
    """Continue groups and begin others. A reward that waits for something else begins as soon as a group has ended.

    Returns the groups that have ended, scored, without the rollouts that the reward skips; the others; how many
    rollouts it skipped; and the seconds for which their scores were waited for.
    """
    requests = [*(g.continuation(limit) for g in continued), *(replace(g.request, token_limit=limit) for g in asked)]
    by_id = {g.request.group_id: g for g in (*continued, *asked)}

    def ended(rollouts: Sequence[Rollout]) -> None:
        if (group := by_id[rollouts[0].group_id].with_answers(rollouts)).has_ended:
            early.add(group.rollouts)

    with ExitStack() as stack:
        if begins_early(reward):
            early = stack.enter_context(EarlyScores(reward))
            rollouts, reward = engine.generate(requests, ended), early.reward
        else:
            rollouts = engine.generate(requests)
        groups = [by_id[id].with_answers(list(group)) for id, group in groupby(rollouts, key=lambda r: r.group_id)]
        whole, began = [r for group in groups if group.has_ended for r in group.rollouts], time.monotonic()
        scored = scored_rollouts(reward, whole) if whole else []
        seconds = time.monotonic() - began
    by_group = [list(group) for _, group in groupby(scored, key=lambda r: r.group_id)]
    return by_group, [g for g in groups if not g.has_ended], len(whole) - len(scored), seconds


def scored_experiences(batch: RolloutBatch, config: RLConfig) -> list[Experience]:
    """Return the experiences of a step; their scores, and those of greedy answers, are clipped and normalised
    together."""
    scores = [r.score for r in batch.rollouts if r.score]
    by_step = config.advantage in ("process", "step-index", "time-index")
    normalized = normalize_scores([*scores, *batch.greedy], config.scores.clip, config.scores.normalize, by_step)
    out = [Experience.from_rollout(r.with_score(s)) for r, s in zip(batch.rollouts, normalized, strict=False)]
    if not batch.greedy:
        return out
    groups = list(dict.fromkeys(e.group_id for e in out))
    greedy = dict(zip(groups, (s.total for s in normalized[len(scores) :]), strict=True))
    return [e.replace(greedy_score=greedy[e.group_id]) for e in out]


# -- metrics -----------------------------------------------------------------------------------------------------------


def step_metrics(batch: RolloutBatch, step: int, config: RLConfig) -> dict[str, float]:
    """Return what the rollouts of a step scored, how long they are, and how old their weights; see docs/metrics.

    `rollout/staleness` is the mean over segments of a segment's mean over its tokens.
    """
    rollouts = batch.rollouts
    scores = [r.score for r in rollouts if r.score]
    totals = np.array([s.total for s in scores])
    out = {"reward/mean": float(totals.mean()), "reward/std": float(totals.std())}
    for name in dict.fromkeys(name for s in scores for name in s.parts):
        out[f"reward/{name}"] = _mean([s.parts[name] for s in scores if name in s.parts])
    groups: dict[str, list[Rollout]] = defaultdict(list)
    sets: dict[str, list[float]] = defaultdict(list)
    for r, total in zip(rollouts, totals.tolist(), strict=True):
        groups[r.group_id].append(r)
        if SET in r.sample.metadata:
            sets[str(r.sample.metadata[SET])].append(total)
    if rollouts[0].segments[0].flow is None:  # a flow samples a few steps, always as many
        out["response/length"] = _mean([r.num_sampled for r in rollouts])
        out["response/cut"] = _mean([s.stop_reason == "length" for r in rollouts for s in r.segments])
    if config.compares_groups:
        out["group/without_signal"] = _mean([not has_signal(group, config) for group in groups.values()])
    for name, values in sets.items():
        out |= {f"data/{name}/share": len(values) / len(totals), f"data/{name}/reward": _mean(values)}
    if batch.skipped:
        out["reward/skipped"] = batch.skipped / (batch.skipped + len(rollouts))
    # A sound that is noised again has no log-probs.
    sampled = [s for r in rollouts for s in r.segments if s.flow is None or s.flow.noise != "none"]
    unknown = sum(int(s.logprobs[:, None].flatten(1).isnan().any(1).sum()) for s in sampled)
    if unknown:
        out["rollout/unknown_logprobs"] = unknown
    if config.dynamic_sampling:
        out["reward/all"] = _mean(batch.totals)
        out |= {"group/dropped": batch.dropped, "group/refilled": batch.refilled, "group/trained": len(groups)}
    versions = [token_versions(s) for r in rollouts for s in r.segments if len(s.ids)]
    out["rollout/staleness"] = _mean([step - float(v.double().mean()) for v in versions])
    if config.generation.partial_tokens is not None:  # of text: one segment each
        older = sum(int((v < v[-1]).sum()) for v in versions)
        out |= {
            "rollout/partial": _mean([r.segments[-1].policy_versions is not None for r in rollouts]),
            "rollout/partial_tokens": older / max(sum(map(len, versions)), 1),
            "rollout/paused": float(sum(_is_paused(r) for group in batch.unfinished for r in group.rollouts)),
            "rollout/staleness_max": float(max((step - int(v.min()) for v in versions), default=0)),
        }
    return out


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values)) / max(len(values), 1)


# -- paused answers in the run folder ----------------------------------------------------------------------------------


def check_can_pause(policy: TrainedPolicy, samples: Sequence[Sample], config: RLConfig) -> None:
    """Raise ValueError where `partial_tokens` is set for anything but answers of text."""
    if config.generation.partial_tokens is None:
        return
    if policy.speech is not None:
        raise ValueError("partial_tokens: answers of a model that speaks cannot be paused; leave the option out")
    stream = next((s for s in samples if s.turns), None)
    if stream is not None:
        raise ValueError(f"partial_tokens: sample {stream.id!r} is a stream, whose turns are short; leave it out")


def save_unfinished(checkpoints: Path, step: int, groups: Sequence[UnfinishedGroup]) -> None:
    """Write the groups that wait after `step` steps below the folder of a phase's checkpoints, a line each.

    Files whose checkpoint has been removed are removed too.
    """
    path = _unfinished_file(checkpoints, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    for older in path.parent.glob("step_*.jsonl"):
        if not (checkpoints / older.stem).is_dir():
            older.unlink()
    with path.with_suffix(".tmp").open("w", encoding="utf-8") as file:
        for group in groups:
            request = group.request
            rollouts = [
                {
                    "index": r.index,
                    "ids": s.ids.tolist(),
                    "logprobs": s.logprobs.tolist(),
                    "stop_reason": s.stop_reason,
                    "version": s.policy_version,
                    "versions": None if s.policy_versions is None else s.policy_versions.tolist(),
                }
                for r in group.rollouts
                for s in r.segments
            ]
            row = {"sample": request.sample.id, "seed": request.seed, "group_id": request.group_id}
            file.write(json.dumps({**row, "rollouts": rollouts}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)


def load_unfinished(
    checkpoints: Path, step: int, policy: TrainedPolicy, samples: Sequence[Sample]
) -> list[UnfinishedGroup]:
    """Return the groups that `save_unfinished` wrote. Raises ValueError for a file or a sample that is missing."""
    path = _unfinished_file(checkpoints, step)
    if not path.is_file():
        raise ValueError(f"{path} is missing: it holds the answers that wait; start the run again")
    assert isinstance(policy, AudioPolicy), "sounds are not paused"
    by_id = {s.id: s for s in samples}
    groups = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row: Mapping[str, Any] = json.loads(line)
        if row["sample"] not in by_id:
            raise ValueError(
                f"{path}: sample {row['sample']!r} is not in the data; resume with the data that the run began with"
            )
        sample = by_id[row["sample"]]
        request = Request(sample, len(row["rollouts"]), seed=row["seed"], group_id=row["group_id"])
        rollouts = []
        for answer in row["rollouts"]:
            buffer = SegmentBuffer(answer["ids"], answer["logprobs"])
            state = AnswerState(request, answer["index"], policy.prompt(sample))
            rollout = build_rollout(policy, state, buffer, answer["stop_reason"], answer["version"])
            if answer["versions"] is not None:
                segment = replace(rollout.segments[0], policy_versions=torch.tensor(answer["versions"]))
                rollout = replace(rollout, segments=(segment,))
            rollouts.append(rollout)
        groups.append(UnfinishedGroup(request, rollouts))
    return groups


def _unfinished_file(checkpoints: Path, step: int) -> Path:
    return checkpoints / "unfinished" / f"step_{step:06d}.jsonl"

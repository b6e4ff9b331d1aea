"""The reinforcement learning loop: sync, sample, generate, score, shape, train.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost. With
`RLConfig.overlap` the next step's rollouts are written beside the update, with the weights before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from audiorl.algos.packing import balance
from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import batch_of_step
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.reference import Reference
from audiorl.rl.advantages import normalize_scores
from audiorl.rl.collect import RolloutBatch, collect
from audiorl.rl.trainer import TrainBatch, in_order
from audiorl.rl.workers import actors
from audiorl.run.folder import Run
from audiorl.run.phase import checkpoint, pull, restore
from audiorl.run.progress import Progress
from audiorl.runtime.local import Group
from audiorl.types import Experience, Reward, Rollout, Sample, SpeechDecoder

Evaluate = Callable[[], Mapping[str, float]]
"""Held-out metrics of the policy as it is now."""


def train_rl(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    reward: Reward,
    run: Run,
    *,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    seed: int = 0,
    phase: str = "rl",
    evaluate: Evaluate | None = None,
    supervised: Sequence[Example] = (),
    reference: Reference | None = None,
    speech_decoder: SpeechDecoder | None = None,
) -> None:
    """Policy gradient training of `policy` in place, from its last checkpoint on. See `RLConfig` for the estimators.

    `supervised`: the examples of the ptx term. `reference`: what the KL is measured from, if not the policy as it
    begins: a second phase may still be held to the start of the first. `speech_decoder`: of a policy that
    speaks, so that the speech of recorded rollouts is saved with them.
    """
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    if config.ptx_coef and not supervised:
        raise ValueError("ptx_coef is set, but there are no supervised examples for it")
    # Reference and critic begin as the policy does, so the workers are made before weights are restored.
    trainers, engine, references = actors(run, phase, policy, config, optim, sampling, reference)
    start = restore(run, phase, policy, trainers)
    ahead: RolloutBatch | None = None
    with run.interruptible(), Progress(phase, config.steps, start) as progress:
        for step in range(start, config.steps):
            began = time.monotonic()
            engine.sync(version=step)
            found = ahead or collect(engine, samples, reward, step, config, seed)
            generated = time.monotonic()
            experiences = with_reference(scored_experiences(found, config), references)
            beside = [
                experience(policy, example)
                for example in (batch_of_step(supervised, step, config.ptx_batch, seed) if config.ptx_coef else [])
            ]
            ranks = split_groups(experiences, trainers.size)
            parts = in_order(len(experiences), config.mini_batches)
            shards = [
                TrainBatch([experiences[i] for i in own], beside[r :: len(ranks)], [parts[i] for i in own])
                for r, own in enumerate(ranks)
            ]
            engine.free_gpus()
            train = partial(trainers.each, "train", shards)
            if written_ahead(step + 1, config) and not run.asked_to_stop:
                results, ahead = engine.overlap(
                    train, partial(collect, engine, samples, reward, step + 1, config, seed)
                )
            else:
                results, ahead = train(), None
            ended = time.monotonic()

            advantages = [0.0] * len(experiences)
            for own, result in zip(ranks, results, strict=True):
                for i, value in zip(own, result.advantages, strict=True):
                    advantages[i] = value
            metrics = means([r.metrics for r in results]) | rollout_metrics(found, config)
            metrics |= {
                "rollout/staleness": staleness(found, step),
                "time/rollout": generated - began,
                "time/train": ended - generated,
                "tokens_per_s": sum(r.num_sampled for r in found.rollouts) / (ended - began),
            }
            done = step + 1
            if evaluate and config.eval_every and done % config.eval_every == 0 and done < config.steps:
                pull(policy, trainers)
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            if done % config.rollouts_every == 0 or done in (1, config.steps):
                run.write_rollouts(done, found.rollouts, advantages, speech_decoder)
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, ended - began)
            checkpoint(run, phase, done, config.steps, config.save_every, policy, trainers)
    beta = trainers.first("beta")
    if config.ema_decay is not None:
        kept = {name: tensor.clone() for name, tensor in policy.weights().items()}
        policy.load_weights(trainers.first("averaged"))
        run.save_model(phase, "ema", policy)
        policy.load_weights(kept)
    trainers.all("close")
    engine.close()
    run.finish(phase, {"steps": config.steps, "seconds": run.seconds(phase), "kl_beta": beta})


def written_ahead(step: int, config: RLConfig) -> bool:
    """Whether a step's rollouts are written before the update of the step before it."""
    return config.overlap and step % config.save_every != 0 and step < config.steps


def staleness(found: RolloutBatch, step: int) -> float:
    """By how many steps the weights that wrote a segment are older than those that are trained with it, on average."""
    return _mean([step - s.policy_version for r in found.rollouts for s in r.segments if len(s.ids)])


def scored_experiences(found: RolloutBatch, config: RLConfig) -> list[Experience]:
    """The experiences of a step with their shaped scores; the greedy answers' scores are shaped with them."""
    own = [r.score for r in found.rollouts if r.score]
    shaped = normalize_scores([*own, *found.greedy], config.score_clip, config.score_normalize)
    out = [Experience.from_rollout(r.with_score(s)) for r, s in zip(found.rollouts, shaped, strict=False)]
    if not found.greedy:
        return out
    groups = list(dict.fromkeys(e.group_id for e in out))
    greedy = dict(zip(groups, (s.total for s in shaped[len(own) :]), strict=True))
    return [e.replace(greedy_score=greedy[e.group_id]) for e in out]


def with_reference(experiences: Sequence[Experience], references: Group | None) -> list[Experience]:
    """The experiences with `ref_logprobs`, of which each process that holds the reference computes a part."""
    found = list(experiences)
    if references is None:
        return found  # trainers do it
    shares = split_groups(found, references.size)
    answers = references.each("logprobs", [[found[i] for i in share] for share in shares])
    for share, logprobs in zip(shares, answers, strict=True):
        for i, each in zip(share, logprobs, strict=True):
            found[i] = found[i].replace(ref_logprobs=each)
    return found


def split_groups(experiences: Sequence[Experience], ranks: int) -> list[list[int]]:
    """Indices of experiences by rank: whole groups, about equally many tokens each."""
    groups: dict[str, list[int]] = {}
    for i, e in enumerate(experiences):
        groups.setdefault(e.group_id, []).append(i)
    members = list(groups.values())
    shares = balance([sum(len(experiences[i]) for i in group) for group in members], ranks)
    return [[i for g in share for i in members[g]] for share in shares]


def rollout_metrics(found: RolloutBatch, config: RLConfig) -> dict[str, float]:
    """Means over the rollouts of a step: reward/mean, reward/std, reward/PART, response/*, group/*."""
    scores = [r.score for r in found.rollouts if r.score]
    totals = np.array([s.total for s in scores])
    out = {"reward/mean": float(totals.mean()), "reward/std": float(totals.std())}
    for name in scores[0].parts:
        out[f"reward/{name}"] = _mean([s.parts[name] for s in scores if name in s.parts])
    groups: dict[str, list[float]] = {}
    for r, total in zip(found.rollouts, totals.tolist(), strict=True):
        groups.setdefault(r.group_id, []).append(total)
    out["response/length"] = _mean([r.num_sampled for r in found.rollouts])
    out["response/cut"] = _mean([_cut(r) for r in found.rollouts])
    out["group/without_signal"] = _mean([max(values) - min(values) < 1e-6 for values in groups.values()])
    if found.skipped:
        out["reward/skipped"] = found.skipped / (found.skipped + len(found.rollouts))
    if config.dynamic_sampling:
        out |= {"group/dropped": found.dropped, "group/refilled": found.refilled, "group/trained": len(groups)}
    return out


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every metric over the ranks."""
    return {name: _mean([row[name] for row in rows]) for name in rows[0]}


def _cut(rollout: Rollout) -> bool:
    return rollout.segments[-1].stop_reason == "length"


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values)) / max(len(values), 1)

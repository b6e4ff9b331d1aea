"""The training loops: sample, generate, score, advantage, update, sync.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from audiorl.algos.advantages import group_relative, leave_one_out
from audiorl.config import GRPOConfig, OptimConfig, SamplingConfig, SFTConfig
from audiorl.models import AudioPolicy
from audiorl.rollout.hf import HFEngine
from audiorl.runtime.local import LocalGroup
from audiorl.train.logging import Progress
from audiorl.train.run import Interrupted, Run
from audiorl.train.sft import Example, SFTWorker
from audiorl.train.worker import GRPOWorker
from audiorl.types import Experience, Request, Reward, Rollout, Sample

Evaluate = Callable[[], Mapping[str, float]]
"""Held-out metrics of the policy as it is now."""


def grpo(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    reward: Reward,
    run: Run,
    *,
    config: GRPOConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    seed: int = 0,
    phase: str = "grpo",
    evaluate: Evaluate | None = None,
) -> None:
    """Group relative policy optimisation (arXiv 2402.03300) of `policy` in place, from its last checkpoint on."""
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    # The reference is the policy at the start of the phase, so the worker is made before weights are restored.
    trainers = LocalGroup([GRPOWorker(policy, config, optim, sampling.temperature, sampling.max_new_tokens)])
    engine = HFEngine(policy, sampling)
    start = _restore(run, phase, policy, trainers)
    engine.update_weights(trainers.all("weights")[0], version=start)
    with run.interruptible(), Progress(phase, config.steps, start) as progress:
        for step in range(start, config.steps):
            began = time.monotonic()
            batch = batch_of_step(samples, step, config.prompts_per_step, seed)
            requests = [
                Request(sample, config.group_size, seed=seed * 1_000_003 + step, group_id=f"{step}/{i}")
                for i, sample in enumerate(batch)
            ]
            rollouts = engine.generate(requests)
            generated = time.monotonic()
            rollouts = [r.with_score(s) for r, s in zip(rollouts, reward(rollouts), strict=True)]
            scored = time.monotonic()
            advantages = _advantages(rollouts, config)
            experiences = [with_advantage(r, float(a)) for r, a in zip(rollouts, advantages, strict=True)]
            (metrics,) = trainers.each("train", [experiences])
            engine.update_weights(trainers.all("weights")[0], version=step + 1)
            ended = time.monotonic()

            tokens = sum(r.num_sampled for r in rollouts)
            metrics |= rollout_metrics(rollouts, advantages.tolist()) | {
                "time/rollout": generated - began,
                "time/reward": scored - generated,
                "time/train": ended - scored,
                "tokens_per_s": tokens / (ended - began),
            }
            done = step + 1
            if evaluate and config.eval_every and done % config.eval_every == 0 and done < config.steps:
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            if done % config.rollouts_every == 0 or done in (1, config.steps):
                run.write_rollouts(done, rollouts, advantages.tolist())
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, ended - began)
            _checkpoint(run, phase, done, config.steps, config.save_every, policy, trainers)
    run.finish(phase, {"steps": config.steps, "seconds": run.seconds(phase)})


def sft(
    policy: AudioPolicy,
    examples: Sequence[Example],
    run: Run,
    *,
    config: SFTConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "sft",
    max_seconds: float | None = None,
) -> None:
    """Supervised fine-tuning of `policy` in place. `max_seconds` of training end it before its last step."""
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    trainers = LocalGroup([SFTWorker(policy, config, optim)])
    start = _restore(run, phase, policy, trainers)
    step = start
    left = None if max_seconds is None else max_seconds - run.seconds(phase)
    with run.interruptible(), Progress(phase, config.steps, start, max_seconds=left) as progress:
        while step < config.steps and (max_seconds is None or run.seconds(phase) < max_seconds):
            began = time.monotonic()
            batch = batch_of_step(examples, step, config.batch_size, seed)
            (metrics,) = trainers.each("train", [batch])
            ended = time.monotonic()
            step += 1
            run.add_seconds(phase, ended - began)
            metrics |= {"time/train": ended - began}
            run.log(phase, step, metrics)
            progress.update(step, metrics)
            over = max_seconds is not None and run.seconds(phase) >= max_seconds
            _checkpoint(run, phase, step, step if over else config.steps, config.save_every, policy, trainers)
    run.finish(phase, {"steps": step, "seconds": run.seconds(phase)})


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> list[Any]:
    """The items of one step: passes over a new shuffle each epoch, a function of (seed, step) alone."""
    if not items:
        raise ValueError("nothing to train on: the data is empty")
    batch = []
    for k in range(step * size, (step + 1) * size):
        epoch, place = divmod(k, len(items))
        batch.append(items[_shuffled(len(items), seed, epoch)[place]])
    return batch


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _advantages(rollouts: Sequence[Rollout], config: GRPOConfig) -> torch.Tensor:
    """One advantage a rollout, [B]."""
    rewards = torch.tensor([r.score.total for r in rollouts if r.score])
    groups = [r.group_id for r in rollouts]
    if config.advantage == "leave-one-out":
        return leave_one_out(rewards, groups)
    return group_relative(rewards, groups, std=config.advantage_std, eps=config.advantage_eps)


def with_advantage(rollout: Rollout, advantage: float) -> Experience:
    """The experience of a rollout, its advantage on every sampled token."""
    e = Experience.from_rollout(rollout)
    return e.replace(advantages=torch.where(e.loss_mask, advantage, 0.0))


def rollout_metrics(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> dict[str, float]:
    """Means over the rollouts of a step: reward/mean, reward/std, reward/PART, response/* and group/without_signal."""
    scores = [r.score for r in rollouts if r.score]
    totals = np.array([s.total for s in scores])
    out = {"reward/mean": float(totals.mean()), "reward/std": float(totals.std())}
    for name in scores[0].parts:
        out[f"reward/{name}"] = _mean([s.parts[name] for s in scores])
    groups: dict[str, list[float]] = {}
    for r, a in zip(rollouts, advantages, strict=True):
        groups.setdefault(r.group_id, []).append(abs(a))
    out["response/length"] = _mean([r.num_sampled for r in rollouts])
    out["response/cut"] = _mean([r.segments[-1].stop_reason == "length" for r in rollouts])
    out["group/without_signal"] = _mean([max(values) < 1e-6 for values in groups.values()])
    return out


def _restore(run: Run, phase: str, policy: AudioPolicy, trainers: LocalGroup) -> int:
    start, state = run.restore(phase, policy)
    if state is not None:
        trainers.all("load", state, str(run.checkpoint(phase)))
    return start


def _checkpoint(
    run: Run, phase: str, done: int, steps: int, every: int, policy: AudioPolicy, trainers: LocalGroup
) -> None:
    """Save when due; when the run was asked to stop, save and leave."""
    if done % every == 0 or done == steps or run.asked_to_stop:
        run.save(phase, done, policy, trainers.all("state")[0])
    if run.asked_to_stop:
        raise Interrupted(f"stopped after {phase} step {done}; continue with 'audiorl resume {run.dir}'")


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / max(len(values), 1)

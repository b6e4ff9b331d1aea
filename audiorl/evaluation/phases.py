"""Held-out evaluation: greedy answers, scored by the same rewards that train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from audiorl.config import SamplingConfig
from audiorl.evaluation.summaries import summarize, summarize_answers
from audiorl.models import AudioPolicy
from audiorl.rewards.check import scored_rollouts
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.types import Request, Reward, Rollout, Sample


def answer(policy: AudioPolicy, samples: Sequence[Sample], reward: Reward, max_new_tokens: int) -> list[Rollout]:
    """One greedy, scored rollout per sample, but for those that the reward skips."""
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens, max_batch_tokens=16_384)
    rollouts = HFEngine(policy, sampling).generate([Request(s) for s in samples])
    return scored_rollouts("reward", reward(rollouts), rollouts)


def evaluate_phase(
    run: Run,
    name: str,
    policy: AudioPolicy,
    samples: Sequence[Sample],
    reward: Reward,
    max_new_tokens: int,
    metric: str = "accuracy",
) -> dict[str, Any]:
    """Evaluate once, as a phase of the run: eval/NAME.jsonl and the entry NAME of eval.json."""
    if not run.finished(name):
        rollouts = answer(policy, samples, reward, max_new_tokens)
        results = summarize_answers(rollouts, metric)
        run.write_eval(name, results, rollouts, metric)
        run.finish(name, {metric: results[metric], "n": results["n"]})
    result: dict[str, Any] = run.result(name)
    print(f"{name}: {metric} {result[metric]:.3f} on {result['n']} held-out samples", flush=True)
    return result


def measure_phase(run: Run, name: str, hits: Callable[[], Sequence[bool]]) -> None:
    """The share of `hits` once, as a phase of the run: the entry NAME of eval.json, with its 95% bootstrap interval."""
    if not run.finished(name):
        result = summarize([float(hit) for hit in hits()], "accuracy")
        run.write_result(name, result)
        run.finish(name, result)
    result = run.result(name)
    print(f"{name}: accuracy {result['accuracy']:.3f} on {result['n']}", flush=True)


def probe(
    policy: AudioPolicy, samples: Sequence[Sample], reward: Reward, max_new_tokens: int, metric: str = "accuracy"
) -> Callable[[], dict[str, float]]:
    """A function for the training loop that measures the policy as it is at the moment."""

    def now() -> dict[str, float]:
        return {metric: float(summarize_answers(answer(policy, samples, reward, max_new_tokens), metric)[metric])}

    return now

"""Held-out evaluation: greedy answers, scored by the rewards that train and by measures that no phase optimises."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.config import SamplingConfig
from audiorl.data.text import TextQuestion
from audiorl.eval._common import paired_changes, progress_display, read_rows, summarize, summarize_outside
from audiorl.eval.text import measure_text_phase
from audiorl.models import AudioPolicy
from audiorl.protocols import Request, Reward, RolloutEngine
from audiorl.rewards import StandardisedSum, WeightedSum
from audiorl.rewards.combine import check_scores, scored_rollouts
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.types import Rollout, Sample

AT_ONCE = 64
"""Samples that are answered between two movements of the progress bar."""


def answer(
    policy: AudioPolicy, samples: Sequence[Sample], reward: Reward, max_new_tokens: int, title: str = ""
) -> list[Rollout]:
    """Return one greedy, scored rollout per sample, but for those that the reward skips.

    With a `title` a progress bar is shown, where stderr is a terminal.
    """
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens, max_batch_tokens=16_384)
    with progress_display(bool(title) and sys.stderr.isatty()) as display:
        bar = display.add_task(title, total=len(samples))
        rollouts = greedy_answers(
            HFEngine(policy, sampling), samples, AT_ONCE, lambda done: display.update(bar, completed=done)
        )
    return scored_rollouts(reward, rollouts)


def greedy_answers(
    engine: RolloutEngine, samples: Sequence[Sample], several: int, moved: Callable[[int], None]
) -> list[Rollout]:
    """Return one greedy rollout per sample, `several` at a time; `moved` is told how many there are."""
    rollouts: list[Rollout] = []
    for start in range(0, len(samples), several):
        rollouts += engine.generate([Request(s, greedy=True) for s in samples[start : start + several]])
        moved(len(rollouts))
    return rollouts


@dataclass(frozen=True)
class Evaluation:
    """What a run measures before, during and after its training, on which samples.

    The entries of eval.json are called before, after, control, …; those of a set NAME are NAME_before, NAME_after, ….
    Every later entry holds the paired change since its `before`.

    Raises ValueError for an outside measure that the reward optimises.
    """

    reward: Reward
    """What training optimises; its part `metric` is the headline."""
    held_out: Sequence[Sample]
    """Samples of the kind that is trained on."""
    max_new_tokens: int
    """Most tokens of a greedy answer."""
    sets: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    """Other sets by name; `UNSEEN` are speakers that no phase trains on."""
    outside: WeightedSum | None = None
    """Measures, higher is better, that no phase optimises; the sum's weights do not matter."""
    metric: str = "accuracy"
    """The reward's part that tables begin with."""
    passages: Sequence[str] = ()
    """Text without audio whose perplexity is measured, as the set `text`."""
    questions: Sequence[TextQuestion] = ()
    """Questions without audio, in the same set."""

    def __post_init__(self) -> None:
        optimised = self.reward.terms if isinstance(self.reward, WeightedSum | StandardisedSum) else ()
        for term in self.outside.terms if self.outside else ():
            if any(term.reward == other.reward for other in optimised):
                raise ValueError(f"outside measure {term.name!r}: the reward optimises it; give another")

    def measure(self, run: Run, when: str, policy: AudioPolicy) -> None:
        """Measure every set once, as phases of the run, into eval/NAME.jsonl and eval.json; the held-out data last."""
        if self.passages or self.questions:
            measure_text_phase(run, f"text_{when}", policy, self.passages, self.questions, "text_before")
        for prefix, samples in [*((f"{name}_", samples) for name, samples in self.sets.items()), ("", self.held_out)]:
            name, baseline = prefix + when, f"{prefix}before"
            if not run.finished(name):
                rollouts = answer(policy, samples, self.reward, self.max_new_tokens, name)
                outside: list[dict[str, float]] = [{} for _ in rollouts]
                if self.outside:
                    scores = check_scores("outside", self.outside(rollouts), rollouts)
                    outside = [{} if score is None else dict(score.parts) for score in scores]
                results = summarize_answers(rollouts, self.metric) | summarize_outside(outside)
                run.write_eval(name, results, rollouts, self.metric, outside)
                earlier, later = (run.dir / "eval" / f"{phase}.jsonl" for phase in (baseline, name))
                if name != baseline and earlier.exists():
                    results |= {"changes": paired_changes(measures_of(earlier), measures_of(later))}
                    run.write_result(name, results)
                run.finish(name, {self.metric: results[self.metric], "n": results["n"]})
            result = run.result(name)
            print(f"{name}: {self.metric} {result[self.metric]:.3f} on {result['n']} samples", flush=True)

    def probe(self, policy: AudioPolicy) -> Probe:
        """Return what the training loop calls to measure the held-out data with the policy as it is at the moment."""
        return Probe(self, policy)


@dataclass(frozen=True)
class Probe:
    """The headline of an evaluation on the held-out data: by the policy itself, or by an engine with its weights."""

    evaluation: Evaluation
    policy: AudioPolicy

    @property
    def max_new_tokens(self) -> int:
        return self.evaluation.max_new_tokens

    def __call__(self) -> dict[str, float]:
        e = self.evaluation
        return self._measured(answer(self.policy, e.held_out, e.reward, e.max_new_tokens))

    def by_engine(self, engine: RolloutEngine, several: int, note: Callable[[str], None]) -> dict[str, float]:
        samples = self.evaluation.held_out
        rollouts = greedy_answers(engine, samples, several, lambda done: note(f"held-out {done}/{len(samples)}"))
        return self._measured(scored_rollouts(self.evaluation.reward, rollouts))

    def _measured(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        metric = self.evaluation.metric
        return {metric: float(summarize_answers(rollouts, metric)[metric])}


def summarize_answers(rollouts: Sequence[Rollout], metric: str = "accuracy") -> dict[str, Any]:
    """Return `summarize` of the reward's part `metric`, means of its other parts, and by_task: {task: {metric, n}}."""
    parts = [dict(r.score.parts) for r in rollouts if r.score]
    if parts and metric not in parts[0]:
        raise ValueError(f"the reward has no part {metric!r}; it has {', '.join(sorted(parts[0]))}")
    values = [p[metric] for p in parts]
    others = {name: [p[name] for p in parts] for name in (parts[0] if parts else ()) if name != metric}
    by_task: dict[str, list[float]] = {}
    for r, value in zip(rollouts, values, strict=True):
        by_task.setdefault(r.sample.task or "all", []).append(value)
    tasks = {task: {metric: float(np.mean(v)), "n": len(v)} for task, v in sorted(by_task.items())}
    return summarize(values, metric, others) | {"by_task": tasks}


def measures_of(path: Path) -> dict[str, dict[str, float]]:
    """Read a file of `Run.write_eval`: by sample the parts of the reward and the outside measures."""
    return {row["id"]: row["parts"] | row.get("outside", {}) for row in read_rows(path)}


def measure_phase(run: Run, name: str, hits: Callable[[], Sequence[bool]]) -> None:
    """Measure the share of `hits` once, as a phase of the run: the entry NAME of eval.json, with its interval."""
    if not run.finished(name):
        result = summarize([float(hit) for hit in hits()], "accuracy")
        run.write_result(name, result)
        run.finish(name, result)
    result = run.result(name)
    print(f"{name}: accuracy {result['accuracy']:.3f} on {result['n']}", flush=True)

"""Held-out evaluation during reinforcement learning: by the engines of the run, where they answer as it wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from audiorl.config import SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.protocols import RolloutEngine
from audiorl.run.progress import Progress
from audiorl.run.saving import pull
from audiorl.train.rl.processes import Workers

Evaluate = Callable[[], Mapping[str, float]]
"""Held-out metrics of the policy as it is now."""


@runtime_checkable
class EvaluateByEngine(Protocol):
    """An `Evaluate` that can also ask an engine for its greedy answers, which no stop string ends."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of an answer."""
        ...

    def __call__(self) -> Mapping[str, float]: ...

    def by_engine(self, engine: RolloutEngine, several: int, note: Callable[[str], None]) -> Mapping[str, float]:
        """The same metrics. Asks for `several` answers at a time; `note` shows how far it is."""
        ...


def held_out_metrics(
    evaluate: Evaluate,
    workers: Workers,
    policy: AudioPolicy,
    sampling: SamplingConfig,
    version: int,
    progress: Progress,
) -> dict[str, float]:
    """eval/*: by the run's engines with the weights after `version` steps, else by the driver's policy with them."""
    if isinstance(evaluate, EvaluateByEngine) and answers_alike(evaluate, sampling):
        engine = workers.engine
        engine.sync(version)
        metrics = evaluate.by_engine(engine, AT_ONCE * engine.size, progress.note)
        engine.free_gpus()
    else:
        pull(policy, workers.trainers)
        progress.note("evaluating")
        with workers.driver_on_gpu(policy):
            metrics = evaluate()
    progress.note("")
    return {f"eval/{name}": value for name, value in metrics.items()}


AT_ONCE = 64
"""Samples that each engine is asked between two movements of the display."""


def answers_alike(evaluate: EvaluateByEngine, sampling: SamplingConfig) -> bool:
    """Whether a greedy answer of the run's engines may be as long as the evaluation's and ends where that one does."""
    return sampling.max_new_tokens == evaluate.max_new_tokens and not sampling.stop

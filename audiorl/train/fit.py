"""The training loop over a fixed data set: SFT, preferences, reward models, the codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from audiorl.data.schedule import batch_of_step, sorted_batch_of_step
from audiorl.distributed.local import Group
from audiorl.run.checkpoint import Saved
from audiorl.run.folder import ComputeTime, Run
from audiorl.run.phase import checkpoint, completing_saves, pull, pull_last, restore
from audiorl.run.progress import Progress, StepClock

T = TypeVar("T")


class FitWorker(Protocol):
    """The methods that the loop calls of every worker."""

    def train(self, batch: Sequence[Any]) -> dict[str, float]:
        """Update the model from this rank's share of a batch. Returns the metrics of all ranks."""
        ...

    def close(self) -> None:
        """End after the last update."""
        ...


class FitConfig(Protocol):
    """The fields that the loop reads of a trainer's config."""

    @property
    def steps(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    @property
    def sort(self) -> bool: ...


def fit(
    trainers: Group,
    model: Saved,
    items: Sequence[T],
    run: Run,
    config: FitConfig,
    *,
    phase: str,
    seed: int,
    length: Callable[[T], int],
    limit: ComputeTime | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    eval_every: int = 0,
) -> None:
    """Call `train` of every worker with its share of each step's batch, from the phase's last checkpoint on.

    Saves `model`, which the first worker trains, and logs the first worker's metrics. With `config.sort` batches hold
    items of similar `length`. Training ends early once it has taken the time `limit`.
    """
    step = restore(run, phase, trainers)
    lengths = tuple(length(item) for item in items) if config.sort else ()

    def spent() -> float | None:
        if limit is None:
            return None
        so_far = run.compute_time(phase)
        seconds = so_far.seconds if so_far.unit == limit.unit else run.seconds(phase)
        return seconds / limit.seconds if limit.seconds else 1.0

    with (
        run.interruptible(),
        completing_saves(run, trainers),
        Progress(phase, config.steps, step, spent=spent()) as progress,
    ):
        while step < config.steps and (spent() or 0.0) < 1:
            clock = StepClock(trainers)
            if config.sort:
                batch = sorted_batch_of_step(items, lengths, step, config.batch_size, seed)
            else:
                batch = batch_of_step(items, step, config.batch_size, seed)
            metrics = trainers.each(FitWorker.train, [batch[r :: trainers.size] for r in range(trainers.size)])[0]
            clock.lap("train")
            step += 1
            run.add_seconds(phase, clock.seconds, clock.cpu_seconds)
            metrics |= clock.laps
            if evaluate and eval_every and step % eval_every == 0 and step < config.steps:
                pull(model, trainers)
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            run.log(phase, step, metrics)
            progress.update(step, metrics, spent())
            over = (spent() or 0.0) >= 1
            checkpoint(run, phase, step, step if over else config.steps, config.save_every, trainers)
    pull_last(run, phase, model, trainers)
    trainers.all(FitWorker.close)
    run.finish(phase, {"steps": step, "seconds": run.seconds(phase)})


def seen(items: Sequence[T], config: FitConfig, seed: int) -> list[int]:
    """Ascending indices of the items that the phase will train on."""
    if config.sort or config.steps * config.batch_size >= len(items):
        return list(range(len(items)))
    indices = range(len(items))
    return sorted({i for step in range(config.steps) for i in batch_of_step(indices, step, config.batch_size, seed)})

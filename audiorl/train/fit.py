"""Training on a fixed data set: the worker that updates one model, and the loop around it.

SFT, preference losses and reward models differ in one function, their `BatchLoss`: how a batch is cut into packs, and
what the loss of a pack is. The codec brings workers of its own to the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import OptimConfig
from audiorl.config.checks import pass_tokens
from audiorl.config.supervised import FitConfig
from audiorl.data.schedule import batch_of_step, sorted_batch_of_step
from audiorl.distributed import trainer_group
from audiorl.distributed.local import Group, World, changes_worker, gpu_seconds, gpu_work
from audiorl.models import AudioPolicy, TrainedPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import Saved
from audiorl.run.folder import ComputeTime, Run
from audiorl.run.progress import Progress, StepClock
from audiorl.run.saving import (
    CheckpointedWorker,
    CheckpointWriter,
    ModelFile,
    checkpoint,
    completing_saves,
    pull,
    pull_last,
    restore,
)
from audiorl.train.batches import PassMetrics, counts, group_packs, idle_batch
from audiorl.train.optim.steps import (
    backward,
    idle_passes,
    optimizer_for,
    with_pass_tokens,
    within_memory,
)

T = TypeVar("T")


class FitWorker(Protocol):
    """The method that the loop calls of every worker."""

    def train(self, batch: Sequence[Any]) -> dict[str, float]:
        """Update the model from this rank's share of a batch. Returns the metrics of all ranks."""
        ...


class Batches(Protocol):
    """The fields that the loop reads of a trainer's config."""

    @property
    def steps(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def save_every(self) -> int: ...


PackLoss = Callable[[list[int]], tuple[Sequence[Experience], Tensor, Mapping[str, Tensor], Tensor | None]]
"""From the indices of items: their experiences; their loss, as its share of the mean over the batches of all ranks; its
metrics, scalars that are added up over packs and ranks; and the log-probs of all sampled tokens."""
BatchLoss = Callable[..., tuple[list[list[int]], PackLoss]]
"""(learner, config, this rank's items) to (the packs, each the indices of its items; the loss of a pack). A function of
a module or a `partial` of one: other processes unpickle it."""


class Learner(CheckpointedWorker):
    """Updates one model from its share of every batch.

    The learners of one world together do what one would do alone: their losses and metrics are parts of one sum, with
    weights from the counts of all ranks.
    """

    def __init__(
        self,
        batch_loss: BatchLoss,
        model: TrainedPolicy | ValueModel,
        config: Any,
        optim: OptimConfig,
        world: World | None = None,
    ):
        self.model, self.world = model, world or World()
        # The loss of a flow knows that it is one; all others are of speech models.
        self.policy = cast(AudioPolicy, model.trunk if isinstance(model, ValueModel) else model)
        self.given, self.config = config, with_pass_tokens(config, self.policy, optim)
        self._batch_loss = batch_loss
        self._writer = CheckpointWriter(model, self.world)
        self.optimizer = optimizer_for(model, optim, config.steps, self.world)

    @changes_worker
    def train(self, items: Sequence[Any]) -> dict[str, float]:
        """Update once from the mean loss over the items of all ranks. Returns its metrics."""
        sums, norm = within_memory(self, lambda: self._passes(items))
        with gpu_work():
            update = self.world.add_up(sums) | self.optimizer.step(norm)
        self.model.weights_changed()
        return update if (busy := gpu_seconds()) is None else update | {"time/gpu_busy": busy}

    def _passes(self, items: Sequence[Any]) -> tuple[dict[str, float], float]:
        """Run all forward and backward passes. Returns sums of metrics, and the norm of the gradients."""
        passes = PassMetrics()
        with self.policy.audio.once():
            packs, pack_loss = self._batch_loss(self, self.config, items)
            self.optimizer.zero_grad()
            idle = idle_passes(len(packs), self.world, self.optimizer)
            for pack in packs:
                with gpu_work():
                    experiences, loss, metrics, logprobs = pack_loss(pack)
                    backward(loss, self.optimizer)
                passes.add(experiences, loss, metrics, logprobs)
            for _ in range(idle):  # ZeRO and FSDP need equally many passes on every rank
                backward(0 * self._idle_pass().sum(), self.optimizer)
        self.optimizer.gather_gradients()
        sums, (norm,) = passes.read(self.optimizer.clip())
        return sums, norm

    def _idle_pass(self) -> Tensor:
        batch = idle_batch(self.policy)
        return self.model.scores(batch) if isinstance(self.model, ValueModel) else self.model.forward(batch).logprobs

    @torch.no_grad()
    def logprobs(self, groups: Sequence[tuple[Example, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the log-probs [n] of the tokens of each group's answers, which share a prompt; on the CPU."""
        tokens = [[experience(self.policy, e, str(k)) for e in group] for k, group in enumerate(groups)]
        logprobs: list[tuple[Tensor, ...]] = [()] * len(groups)
        for indices in group_packs(tokens, pass_tokens(self.config)):
            part = [e for i in indices for e in tokens[i]]
            answers = iter(self.policy.forward(pack_experiences(part)).logprobs.split(counts(part)))
            for i in indices:
                logprobs[i] = tuple(next(answers).float().cpu() for _ in tokens[i])
        return logprobs


def learners(
    run: Run,
    phase: str,
    batch_loss: BatchLoss,
    model: TrainedPolicy | ValueModel,
    config: FitConfig,
    optim: OptimConfig,
) -> Group:
    """Make the learners of a phase, one on each rank."""
    return trainer_group(
        lambda world: Learner(batch_loss, model, config, optim, world),
        lambda: (_learner, ModelFile.save(run, phase, "start", model), batch_loss, config, optim),
    )


def _learner(start: ModelFile[Any], batch_loss: BatchLoss, config: FitConfig, optim: OptimConfig) -> Learner:
    return Learner(batch_loss, start.load(), config, optim, World.of_process_group())


def train_on(
    batch_loss: BatchLoss,
    model: TrainedPolicy | ValueModel,
    items: Sequence[T],
    run: Run,
    config: FitConfig,
    optim: OptimConfig,
    *,
    phase: str,
    seed: int,
    lengths: tuple[int, ...] = (),
    limit: ComputeTime | None = None,
) -> None:
    """Train `model` in place by `batch_loss`, see `fit`; load the result of a phase that has finished."""
    if run.finished(phase):
        run.load_result(phase, model)
        return
    trainers = learners(run, phase, batch_loss, model, config, optim)
    fit(trainers, model, items, run, config, phase=phase, seed=seed, lengths=lengths, limit=limit)


def fit(
    trainers: Group,
    model: Saved,
    items: Sequence[T],
    run: Run,
    config: Batches,
    *,
    phase: str,
    seed: int,
    lengths: tuple[int, ...] = (),
    limit: ComputeTime | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    eval_every: int = 0,
) -> None:
    """Call `train` of every worker with its share of each step's batch, from the phase's last checkpoint on.

    Saves `model`, which the first worker trains, and logs the first worker's metrics. With the items' `lengths` batches
    hold items of similar length. Training ends early once it has taken the time `limit`.
    """
    step = restore(run, phase, trainers)

    def spent() -> float | None:
        """Return the used fraction of the limit."""
        if limit is None:
            return None
        so_far = run.compute_time(phase)
        # CPU seconds do not show what a GPU computes: then the limit, whatever its unit, is one of wall-clock seconds.
        seconds = so_far.seconds if so_far.unit == limit.unit else run.seconds(phase)
        return seconds / limit.seconds if limit.seconds else 1.0

    with (
        run.interruptible(),
        completing_saves(run, trainers),
        Progress(phase, config.steps, step, spent=spent()) as progress,
    ):
        clock = StepClock(trainers)
        while step < config.steps and (spent() or 0.0) < 1:
            clock.begin()
            if lengths:
                batch = sorted_batch_of_step(items, lengths, step, config.batch_size, seed)
            else:
                batch = batch_of_step(items, step, config.batch_size, seed)
            clock.lap("batch")
            metrics = trainers.each(FitWorker.train, [batch[r :: trainers.size] for r in range(trainers.size)])[0]
            clock.lap("train")
            step += 1
            run.add_seconds(phase, clock.seconds, clock.cpu_seconds)
            if evaluate and eval_every and step % eval_every == 0 and step < config.steps:
                pull(model, trainers)
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            clock.lap("hooks", counts=False)
            metrics |= clock.times()
            run.log(phase, step, metrics)
            progress.update(step, metrics, spent())
            over = (spent() or 0.0) >= 1
            checkpoint(run, phase, step, step if over else config.steps, config.save_every, trainers)
    pull_last(run, phase, model, trainers)
    trainers.all(CheckpointedWorker.close)
    run.finish(phase, {"steps": step, "seconds": run.seconds(phase)})


def training_indices(items: Sequence[T], config: Batches, seed: int) -> list[int]:
    """Return the ascending indices of the items that a phase will train on."""
    if config.steps * config.batch_size >= len(items):
        return list(range(len(items)))
    indices = range(len(items))
    return sorted({i for step in range(config.steps) for i in batch_of_step(indices, step, config.batch_size, seed)})

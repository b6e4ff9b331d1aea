"""The workers of a phase as one object, which divides a step's experiences among them and puts answers together.

A phase with several processes first saves its model to `checkpoints/PHASE/start`; every process loads its own copy from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import balance
from audiorl.config import DistillConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.distributed import current
from audiorl.distributed import check_engine, separate_group, trainer_group
from audiorl.distributed.local import Group, Groups, World
from audiorl.distributed.torchrun import local_device
from audiorl.models import AudioPolicy
from audiorl.models.policy import Reference
from audiorl.run.folder import Run
from audiorl.run.saving import ModelFile
from audiorl.train.rl.critic import CriticWorker, make_critic
from audiorl.train.rl.engines import GroupEngine
from audiorl.train.rl.minibatch import TrainBatch, in_order
from audiorl.train.rl.token_record import TokenNumbers
from audiorl.train.rl.trainer import Trainer
from audiorl.train.rl.workers import (
    Actor,
    ReferenceSource,
    ReferenceWorker,
    engine_lora,
    free_cached,
    make_actor,
    make_engine,
    make_reference,
    make_vllm,
)

T = TypeVar("T")


@dataclass(frozen=True)
class StepBatch:
    """What the driver gives the trainers for one step."""

    experiences: Sequence[Experience]
    supervised: Sequence[Experience] = ()
    """Examples of the ptx term."""
    answers: Sequence[Experience] = ()
    """Reference answers, for the off-policy share of distillation."""
    record_tokens: bool = False
    """Return numbers of every token, for recorded rollouts."""


@dataclass(frozen=True)
class StepResult:
    """What all trainers made of a step."""

    metrics: dict[str, float]
    advantages: list[float]
    """The mean advantage of each experience, in order."""
    tokens: list[TokenNumbers]
    """The numbers of each experience's tokens; empty where they were not asked for."""


@dataclass(frozen=True)
class Workers:
    """The processes of a phase. Made by `start_workers`."""

    config: RLConfig
    trainers: Group
    """One on each rank; they generate, too, where there are no separate engines."""
    engine: GroupEngine
    references: Group | None = None
    """Processes that hold the reference and the teacher; None: the trainers do."""
    critics: Group | None = None
    """Processes that hold the critic; None: the trainers do."""

    @property
    def checkpointed(self) -> Group | Groups:
        """The workers that write and read checkpoints."""
        return self.trainers if self.critics is None else Groups(self.trainers, self.critics)

    @property
    def groups(self) -> list[Group]:
        """All groups that have processes."""
        groups = (self.trainers, self.engine.engines, self.references, self.critics)
        return [group for group in groups if group is not None]

    def fill_in(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return experiences with what separate processes know of them: `ref_logprobs`, `teacher`, `values`."""
        out = self.fill_in_references(experiences)
        if self.critics is not None:
            values = _divided(self.critics, CriticWorker.values, out)
            out = [e.replace(values=stream) for e, stream in zip(out, values, strict=True)]
        return out

    def fill_in_references(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return experiences with `ref_logprobs` and `teacher` where separate processes hold these models."""
        out = list(experiences)
        if self.references is not None and self.config.kl_beta > 0:
            logprobs = _divided(self.references, ReferenceWorker.ref_logprobs, out)
            out = [e.replace(ref_logprobs=stream) for e, stream in zip(out, logprobs, strict=True)]
        if self.references is not None and self.config.distill.from_reference_process:
            outputs = _divided(self.references, ReferenceWorker.teacher_outputs, out)
            out = [e.replace(teacher=output) for e, output in zip(out, outputs, strict=True)]
        return out

    def step(self, batch: StepBatch) -> StepResult:
        """Update the policy, and then critics in processes of their own towards the trainers' returns."""
        shares = split_groups(batch.experiences, self.trainers.size)
        outputs = self.trainers.each(Trainer.step, _train_batches(batch, shares, self.config))
        metrics = {name: sum(output.metrics[name] for output in outputs) / len(outputs) for name in outputs[0].metrics}
        if self.critics is not None:
            returns = _in_order([output.returns for output in outputs], shares)
            returned = [e.replace(returns=r) for e, r in zip(batch.experiences, returns, strict=True)]
            batches = _train_batches(StepBatch(returned), split_groups(returned, self.critics.size), self.config)
            metrics |= self.critics.each(CriticWorker.update, batches)[0]
        return StepResult(
            metrics,
            _in_order([output.advantages for output in outputs], shares),
            _in_order([output.tokens for output in outputs], shares) if batch.record_tokens else [],
        )

    def kl_beta(self) -> float:
        """Return the KL coefficient as it is now."""
        return self.trainers.first(Trainer.beta)

    def averaged(self) -> Mapping[str, Tensor]:
        """Return the moving average of the weights."""
        return self.trainers.first(Trainer.averaged)

    @contextmanager
    def driver_on_cpu(self, policy: AudioPolicy) -> Iterator[None]:
        """Keep the driver's model in CPU memory, unless the first trainer trains this object.

        On a node with GPUs the driver would otherwise hold a copy on one that a trainer was given.
        """
        with self._moved(policy, "cpu"):
            yield

    @contextmanager
    def driver_on_gpu(self, policy: AudioPolicy) -> Iterator[None]:
        """Inside `driver_on_cpu`: hold the model on the device of its config while the driver computes with it."""
        with self._moved(policy, local_device(policy.config.device)):
            yield

    @contextmanager
    def _moved(self, policy: AudioPolicy, device: str) -> Iterator[None]:
        before = policy.device
        if self.trainers.shared or before.type == torch.device(device).type:
            yield
            return
        policy.model.to(torch.device(device))
        free_cached()
        try:
            yield
        finally:
            policy.model.to(before)
            free_cached()

    def close(self) -> None:
        """End all workers after the last step."""
        self.trainers.all(Actor.close)
        self.engine.close()
        if self.critics is not None:
            self.critics.all(CriticWorker.close)


def start_workers(
    run: Run,
    phase: str,
    policy: AudioPolicy,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: Reference | None,
) -> Workers:
    """Start the trainers of a phase, one on each rank, its engines, and separate references and critics, if any."""

    def start() -> ModelFile[AudioPolicy]:
        return ModelFile.save(run, phase, "start", policy)

    def reference_source() -> ReferenceSource:
        if reference is None:
            return None
        return "base" if reference.is_base else ModelFile.save(run, phase, "reference", reference.runs_on)

    def trainer() -> tuple[Any, ...]:
        return make_actor, start(), config, optim, sampling, None if current().references else reference_source()

    def local_trainer(world: World) -> Actor:
        if current().engine != "vllm" or current().engines:
            return Actor(policy, config, optim, sampling, reference, world)
        lora = engine_lora(start(), warn=True)
        vllm = make_vllm(start(), sampling)
        if vllm.can_sleep:
            vllm.sleep()
        return Actor(policy, config, optim, sampling, reference, world, vllm, lora)

    check_engine()
    if current().references:
        check_separate_teacher(config.distill)
    if current().critics:
        config.check_separate_critic(current().critics)
    trainers = trainer_group(local_trainer, trainer)
    engines = separate_group("engine", lambda: (make_engine, start(), sampling))
    references = None
    if config.kl_beta > 0 or config.distill.from_reference_process:
        references = separate_group(
            "reference", lambda: (make_reference, start(), config, sampling, reference_source())
        )
    critics = separate_group("critic", lambda: (make_critic, start(), config))
    colocated = engines is not None and current().shares_gpus
    return Workers(
        config, trainers, GroupEngine(trainers, engines, config.generation.overlap, colocated), references, critics
    )


def check_separate_teacher(config: DistillConfig) -> None:
    """Raise ValueError for a divergence whose teacher cannot be a process of its own."""
    whole = config.loss_kind is not None and (not config.top_k or config.top_k_of == "student")
    if config.from_reference_process and whole:
        raise ValueError(
            "runtime.references: this distill.divergence needs the teacher's hidden states and head in the trainer; "
            "from a process of its own it can send its top tokens (distill.top_k 64, top_k_of teacher) or log-probs "
            "(distill.divergence sampled)"
        )


def split_groups(experiences: Sequence[Experience], ranks: int) -> list[list[int]]:
    """Return indices of experiences by rank: whole groups, about equally many tokens each."""
    groups: dict[str, list[int]] = {}
    for i, e in enumerate(experiences):
        groups.setdefault(e.group_id, []).append(i)
    members = list(groups.values())
    shares = balance([sum(len(experiences[i]) for i in group) for group in members], ranks)
    return [[i for g in share for i in members[g]] for share in shares]


def _train_batches(batch: StepBatch, shares: Sequence[Sequence[int]], config: RLConfig) -> list[TrainBatch]:
    """Return a batch for each rank. Mini-batches are those of the whole step."""
    mini_batches, ranks = in_order(len(batch.experiences), config.mini_batches), len(shares)
    return [
        TrainBatch(
            [batch.experiences[i] for i in share],
            batch.supervised[rank::ranks],
            [mini_batches[i] for i in share],
            batch.answers[rank::ranks],
            batch.record_tokens,
        )
        for rank, share in enumerate(shares)
    ]


def _divided(
    group: Group, method: Callable[[Any, Sequence[Experience]], list[T]], experiences: Sequence[Experience]
) -> list[T]:
    """Ask every worker for its share of the experiences. Returns the answers in their order."""
    shares = split_groups(experiences, group.size)
    return _in_order(group.each(method, [[experiences[i] for i in share] for share in shares]), shares)


def _in_order(values: Sequence[Sequence[T]], shares: Sequence[Sequence[int]]) -> list[T]:
    by_index = {
        i: value for part, share in zip(values, shares, strict=True) for i, value in zip(share, part, strict=True)
    }
    return [by_index[i] for i in range(len(by_index))]

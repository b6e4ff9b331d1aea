"""The workers of a phase as one object, which divides a step's experiences among them and puts answers together; and
its generation engines as one engine.

A phase with several processes first saves its model to `checkpoints/PHASE/start`; every process loads its own copy from
there. The engines are the trainers' own models, or workers with processes and weights of their own. The first trainer
sends its weights to all separate engines at once (`rollout.weight_transfer`); the connection is opened again when one
end was replaced. A replaced engine holds the weights that the phase began with: asked for another version it generates
nothing, then all engines are sent the weights again, and are asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import balance
from audiorl.config import DistillConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.distributed import current
from audiorl.data.schedule import rough_length
from audiorl.distributed import check_engine, separate_group, trainer_group
from audiorl.distributed.local import Group, Groups, LocalGroup, World
from audiorl.distributed.ray_group import RayGroup
from audiorl.distributed.torchrun import local_device
from audiorl.errors import RankError
from audiorl.models import FlowPolicy, TrainedPolicy
from audiorl.models.policy import Reference
from audiorl.protocols import Ended, Request
from audiorl.run.folder import Run
from audiorl.run.saving import ModelFile
from audiorl.train.rl.critic import CriticWorker, make_critic
from audiorl.train.rl.minibatch import TrainBatch, mini_batch_numbers
from audiorl.train.rl.trainer import Trainer, TrainOutput
from audiorl.train.rl.workers import (
    Actor,
    EngineWorker,
    ReferenceSource,
    ReferenceWorker,
    Sampling,
    engine_lora,
    free_cached,
    make_actor,
    make_engine,
    make_reference,
    make_vllm,
)
from audiorl.types import Rollout

T = TypeVar("T")
ATTEMPTS = 5  # How many times weights are sent when they do not arrive, before the run stops


# -- all workers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workers:
    """The processes of a phase. Made by `start_workers`."""

    config: RLConfig
    trainers: Group  # One on each rank; they generate, too, where there are no separate engines
    engine: GroupEngine
    references: Group | None = None  # Processes that hold the reference and the teacher; None: the trainers do
    critics: Group | None = None  # Processes that hold the critic; None: the trainers do

    @property
    def checkpointed(self) -> Group | Groups:
        """The workers that write and read checkpoints."""
        return self.trainers if self.critics is None else Groups(self.trainers, self.critics)

    @property
    def groups(self) -> list[Group]:
        """All groups that have processes."""
        groups = (self.trainers, self.engine.engines, self.references, self.critics)
        return [group for group in groups if group is not None]

    def fill_in(self, experiences: Sequence[Experience], values: bool = True) -> list[Experience]:
        """Return experiences with what separate processes know of them: `ref_logprobs`, `teacher`, and `values`."""
        out = list(experiences)
        if self.references is not None and self.config.kl_beta > 0:
            logprobs = _divided(self.references, ReferenceWorker.ref_logprobs, out)
            out = [e.replace(ref_logprobs=stream) for e, stream in zip(out, logprobs, strict=True)]
        if self.references is not None and self.config.distill.from_reference_process:
            outputs = _divided(self.references, ReferenceWorker.teacher_outputs, out)
            out = [e.replace(teacher=output) for e, output in zip(out, outputs, strict=True)]
        if self.critics is not None and values:
            streams = _divided(self.critics, CriticWorker.values, out)
            out = [e.replace(values=stream) for e, stream in zip(out, streams, strict=True)]
        return out

    def step(self, batch: TrainBatch) -> TrainOutput:
        """Update the policy, and then critics in processes of their own towards the trainers' returns."""
        shares = split_groups(batch.experiences, self.trainers.size)
        outputs = self.trainers.each(Trainer.step, _train_batches(batch, shares, self.config))
        names = dict.fromkeys(name for output in outputs for name in output.metrics)
        # Not every rank has all of them: one without work for its GPU has no `time/gpu_busy`.
        metrics = {name: sum(output.metrics.get(name, 0.0) for output in outputs) / len(outputs) for name in names}
        if self.critics is not None:
            returns = _in_order([output.returns for output in outputs], shares)
            returned = [e.replace(returns=r) for e, r in zip(batch.experiences, returns, strict=True)]
            batches = _train_batches(TrainBatch(returned), split_groups(returned, self.critics.size), self.config)
            metrics |= self.critics.each(CriticWorker.update, batches)[0]
        advantages = _in_order([output.advantages for output in outputs], shares)
        tokens = _in_order([output.tokens for output in outputs], shares) if batch.record_tokens else []
        prepared = max(output.prepare_seconds for output in outputs)
        return TrainOutput(metrics, advantages, tokens, prepare_seconds=prepared)

    @contextmanager
    def driver_on_cpu(self, policy: TrainedPolicy) -> Iterator[None]:
        """Keep the driver's model in CPU memory, unless the first trainer trains this object.

        On a node with GPUs the driver would otherwise hold a copy on one that a trainer was given.
        """
        with self._moved(policy, "cpu"):
            yield

    @contextmanager
    def driver_on_gpu(self, policy: TrainedPolicy) -> Iterator[None]:
        """Inside `driver_on_cpu`: hold the model on the device of its config while the driver computes with it."""
        with self._moved(policy, local_device(policy.config.device)):
            yield

    @contextmanager
    def _moved(self, policy: TrainedPolicy, device: str) -> Iterator[None]:
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

    def finish(self, policy: TrainedPolicy, run: Run, phase: str) -> dict[str, float]:
        """After the last step save the moving average, if one is kept, and end all workers. Returns the results."""
        if self.config.ema_decay is not None:
            weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
            policy.load_weights(self.trainers.first(Trainer.averaged))
            run.save_model(phase, "ema", policy)
            policy.load_weights(weights)
        beta = self.trainers.first(Trainer.beta)
        self.trainers.all(Actor.close)
        self.engine.close()
        if self.critics is not None:
            self.critics.all(CriticWorker.close)
        return {"steps": self.config.steps, "seconds": run.seconds(phase), "kl_beta": beta}


def start_workers(
    run: Run,
    phase: str,
    policy: TrainedPolicy,
    config: RLConfig,
    optim: OptimConfig,
    sampling: Sampling,
    reference: Reference | None,
) -> Workers:
    """Start the trainers of a phase, one on each rank, its engines, and separate references and critics, if any."""

    def start() -> ModelFile[Any]:
        return ModelFile.save(run, phase, "start", policy)

    def reference_source() -> ReferenceSource:
        if reference is None:
            return None
        return "base" if reference.is_base else ModelFile.save(run, phase, "reference", reference.runs_on)

    def trainer() -> tuple[Any, ...]:
        return make_actor, start(), config, optim, sampling, None if current().references else reference_source()

    def local_trainer(world: World) -> Actor:
        if current().engine != "vllm" or current().engines or not isinstance(sampling, SamplingConfig):
            return Actor(policy, config, optim, sampling, reference, world)
        lora = engine_lora(start(), warn=True)
        vllm = make_vllm(start(), sampling)
        if vllm.can_sleep:
            vllm.sleep()
        return Actor(policy, config, optim, sampling, reference, world, vllm, lora)

    check_engine()
    if isinstance(policy, FlowPolicy) and (current().engine == "vllm" or current().references):
        raise ValueError("runtime.engine vllm and runtime.references: flows sample and hold their reference themselves")
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
    engine = GroupEngine(trainers, engines, config.generation.overlap, colocated)
    return Workers(config, trainers, engine, references, critics)


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
    shares = balance([sum(experiences[i].rows for i in group) for group in members], ranks)
    return [[i for g in share for i in members[g]] for share in shares]


def _train_batches(batch: TrainBatch, shares: Sequence[Sequence[int]], config: RLConfig) -> list[TrainBatch]:
    """Return a batch for each rank. Mini-batches are those of the whole step."""
    mini_batches, ranks = mini_batch_numbers(config, batch.experiences), len(shares)
    return [
        TrainBatch(
            [batch.experiences[i] for i in share],
            [examples[rank::ranks] for examples in batch.supervised],
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
    pairs = (zip(share, part, strict=True) for part, share in zip(values, shares, strict=True))
    by_index = {i: value for part in pairs for i, value in part}
    return [by_index[i] for i in range(len(by_index))]


# -- the engines -------------------------------------------------------------------------------------------------------


class StaleWeights(Exception):
    """A replaced engine has other weights than the version that was asked for."""


class GroupEngine:
    """The engines of a phase as one engine: the requests are divided by their expected lengths.

    `engines`: workers with their own weights; None: the trainers generate. `overlap`: the next step's rollouts are
    generated during an update, so the weights of before must be kept. `colocated`: the engines share the trainers'
    GPUs, where only one of the two may use memory at a time.
    """

    def __init__(self, trainers: Group, engines: Group | None = None, overlap: bool = False, colocated: bool = False):
        if overlap and colocated:
            raise ValueError(
                "overlap: engines generate while trainers train, but with runtime.placement colocated they take turns "
                "on one GPU; use --runtime.placement dedicated, or switch overlap off"
            )
        self.trainers, self.engines, self._snapshots, self._colocated = trainers, engines, overlap, colocated
        self._version = 0
        self._synced: int | None = None
        self._training = False

    @property
    def size(self) -> int:
        """Return how many engines there are."""
        return (self.trainers if self.engines is None else self.engines).size

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Return rollouts in the order of the requests.

        `ended` is called with those of a request when all of them have ended; with engines in processes of Ray, when
        all requests of a process have.
        """
        shares = balance([r.n * rough_length(r.sample) for r in requests], self.size)
        generated = self._generate([[requests[i] for i in share] for share in shares], ended)
        by_request: dict[int, list[Rollout]] = {}
        for share, rollouts in zip(shares, generated, strict=True):
            start = 0
            for i in share:
                by_request[i] = rollouts[start : start + requests[i].n]
                start += requests[i].n
        return [rollout for i in range(len(requests)) for rollout in by_request[i]]

    def _generate(self, shards: Sequence[Sequence[Request]], ended: Ended | None) -> list[list[Rollout]]:
        if self.engines is None and isinstance(self.trainers, LocalGroup):  # reported request by request
            return [w.generate(shard, ended) for w, shard in zip(self.trainers.workers, shards, strict=True)]

        def arrived(rollouts: list[Rollout] | None) -> None:
            for _, several in groupby(rollouts or (), key=lambda r: r.group_id):
                assert ended is not None
                ended(list(several))

        def ask(group: Group, method: Callable[[Any, Any], Any], shards: Sequence[Any]) -> list[Any]:
            if ended is not None and isinstance(group, RayGroup):
                return group.each(method, shards, arrived)
            return group.each(method, shards)

        if self.engines is None:
            return ask(self.trainers, Actor.generate, shards)
        for _ in range(ATTEMPTS):
            answers = ask(self.engines, EngineWorker.generate, [(self._version, shard) for shard in shards])
            if all(answer is not None for answer in answers):
                return answers
            if self._training:
                raise StaleWeights
            self._send(self.engines)
        raise RankError("engines died again and again while they generated; resume from the last checkpoint")

    def sync(self, version: int) -> None:
        """Send the trainers' current weights, those after `version` steps, to the engines that do not have them."""
        if self.engines is None:
            return
        if self._colocated:
            self.trainers.all(Actor.free_memory)
        if version == self._synced:
            return
        self._version = version
        if self._snapshots:
            self.trainers.all(Actor.snapshot)
        self._send(self.engines)
        self._synced = version

    def free_gpus(self) -> None:
        """Let colocated engines sleep, before trainers update."""
        if self.engines is not None and self._colocated:
            self.engines.all(EngineWorker.sleep)

    @contextmanager
    def overlap(self, generate: Callable[[], T]) -> Iterator[Callable[[], T]]:
        """Generate with the weights as they are while the block trains; the given function then returns the result.

        At the same time where engines have their own processes, else before the block. `generate` must not call the
        trainers.
        """
        if self.engines is None:
            rollouts = generate()
            yield lambda: rollouts
            return
        engines = self.engines

        def result() -> T:
            try:
                return future.result()
            except StaleWeights:  # an engine was replaced meanwhile and has other weights
                self._send(engines)
                return generate()

        self._training = True
        try:
            with _in_background(generate) as future:
                yield result
        finally:
            self._training = False

    def close(self) -> None:
        """End after the phase."""
        if self.engines is not None:
            self.engines.all(EngineWorker.close)

    def _send(self, engines: Group) -> None:
        """Send the weights until all engines have them. The groups count the processes that die meanwhile."""
        for _ in range(ATTEMPTS):
            self._connect(engines)
            with _in_background(lambda: engines.all(EngineWorker.receive, self._version)) as received:
                sent = self.trainers.all(Actor.send)
            reasons = [reason for reason in [*received.result(), *sent] if reason]
            if not reasons:
                return
        raise RankError(f"weights did not reach the engines: {reasons[0]}; resume the run from the last checkpoint")

    def _connect(self, engines: Group) -> None:
        """Connect all engines to the trainers that send. When one end is new, all connections are opened again."""
        for restart in (False, True):
            sources = self.trainers.all(Actor.weight_source, engines.size, restart)
            senders = [source for source in sources if source is not None]
            if len(senders) == 1:
                senders = [senders[0]._replace(number=k) for k in range(engines.size)]
            if all(engines.each(EngineWorker.connect, senders)):
                return


@contextmanager
def _in_background(function: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `function` in a thread, which has ended when the block has. Ctrl-C does not wait for the thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield future
    except Exception:
        thread.join()
        raise
    thread.join()

"""The workers of a policy gradient phase: trainers with their engines, separate engines, separate references.

A phase with several processes first saves its model to `checkpoints/PHASE/start`; every process loads its own copy from
there. A worker in the driver's process shares the driver's model instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from audiorl.config import DistillConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.models.reference import Reference
from audiorl.models.weights import Weights, named
from audiorl.rl.distill import Teacher, load_teacher
from audiorl.rl.trainer import State, Trainer, with_logprobs
from audiorl.rl.weight_sync import EngineWorker, GroupEngine, WeightSource, free_cached, node_address
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMConfig, VLLMEngine, served_weights
from audiorl.rollout.weight_transfer import SyncError, WeightSender
from audiorl.run.folder import Run
from audiorl.run.model_file import ModelFile
from audiorl.runtime.config import current
from audiorl.runtime.local import Group, changes_worker
from audiorl.runtime.placement import check_engine, separate_group, trainer_group
from audiorl.runtime.world import World
from audiorl.types import Experience, Request, Rollout, TeacherOutput


class Actor(Trainer):
    """A trainer that also generates: with its own model, or with a colocated vLLM engine that copies its weights."""

    def __init__(
        self,
        policy: AudioPolicy,
        config: RLConfig,
        optim: OptimConfig,
        sampling: SamplingConfig,
        reference: Reference | Literal["separate"] | None = None,
        world: World | None = None,
        colocated_engine: VLLMEngine | None = None,
    ):
        max_rows = sampling.max_new_tokens if policy.speech is None else sampling.max_new_tokens + sampling.max_frames
        super().__init__(
            policy, config, optim, sampling.temperature, max_rows, reference, sampling.audio_temperature, world
        )
        self.engine = HFEngine(policy, sampling)
        self._colocated_engine = colocated_engine
        self._engine_version = -1
        self._sender: WeightSender | None = None
        self._snapshot: dict[str, Tensor] | None = None

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        if self._colocated_engine is not None:
            return self._generate_colocated(self._colocated_engine, requests)
        self.engine.policy_version = self.steps
        return self.engine.generate(requests)

    def _generate_colocated(self, engine: VLLMEngine, requests: Sequence[Request]) -> list[Rollout]:
        if engine.can_sleep:
            free_cached()  # vLLM allocates what the trainer does not use
            engine.wake()
        if self._engine_version != self.steps:
            engine.update_weights(self._weights_for_engines(), self.steps)
            self._engine_version = self.steps
        rollouts = engine.generate(requests)
        if engine.can_sleep:
            engine.sleep()
        return rollouts

    def _weights_for_engines(self) -> Weights:
        return served_weights(self.policy) if current().engine == "vllm" else self.policy.weights()

    def load(self, state: State, where: str) -> None:
        super().load(state, where)
        self._engine_version = -1

    def close(self) -> None:
        super().close()
        if self._colocated_engine is not None:
            self._colocated_engine.close()
        if self._sender is not None:
            self._sender.close("the phase has ended")

    # -- separate engines: the first trainer sends them its weights ----------------------------------------------------

    def free_memory(self) -> None:
        """Return unused GPU memory before a colocated engine wakes."""
        free_cached()

    def weight_source(self, receivers: int, restart: bool) -> WeightSource | None:
        """Where engines receive the weights; None except on the first rank. `restart`: open a new connection."""
        if self.world.rank:
            return None
        # NCCL does not connect two processes on one GPU.
        between_gpus = torch.cuda.is_available() and not current().shares_gpus
        backend: Literal["gloo", "nccl"] = "nccl" if between_gpus else "gloo"
        if self._sender is not None and (restart or not self._sender.is_open):
            self._sender.close("another connection was made")
            self._sender = None
        if self._sender is None:
            self._sender = WeightSender(receivers, host=node_address(), backend=backend)
        return WeightSource(self._sender.address, backend, receivers)

    @changes_worker
    def snapshot(self) -> None:
        """Copy the weights to CPU memory; later `send` calls send the copy."""
        if not self.world.rank:
            weights = named(self._weights_for_engines())
            self._snapshot = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}

    def send(self) -> str | None:
        """Send the weights to all engines. Returns None, or why they did not arrive."""
        if self.world.rank:
            return None
        if self._sender is None:
            return "the first trainer has no connection for weights"
        try:
            self._sender.send(self._weights_for_engines() if self._snapshot is None else self._snapshot)
        except SyncError as error:
            return str(error)
        return None


class ReferenceWorker:
    """Holds the reference model of the KL, and the teacher of distillation, for trainers that do not. They share no
    weights with the trained policy. Methods are named like the fields of `Experience` that they fill in."""

    def __init__(
        self,
        model: AudioPolicy | Reference,
        config: RLConfig,
        sampling: SamplingConfig,
        teacher: Teacher | None = None,
    ):
        self._model, self._config, self._sampling, self._teacher = model, config, sampling, teacher

    def teacher(self, experiences: Sequence[Experience]) -> list[TeacherOutput]:
        """The outputs of the teacher, see `Teacher.outputs`."""
        assert self._teacher is not None
        return self._teacher.outputs(experiences)

    def ref_logprobs(self, experiences: Sequence[Experience]) -> list[Tensor]:
        """Of each experience [L], or [L, Q] where it holds codec frames."""
        temperatures = self._sampling.temperature, self._sampling.audio_temperature
        scored = with_logprobs(experiences, "ref_logprobs", self._model, self._config, *temperatures)
        return [e.ref_logprobs for e in scored if e.ref_logprobs is not None]


ReferenceSource = ModelFile[AudioPolicy] | Literal["base", "separate"] | None
"""Where a trainer's reference comes from: a folder, the model below its adapter, another process, or (None) the policy
that the phase begins with."""


def start_workers(
    run: Run,
    phase: str,
    policy: AudioPolicy,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: Reference | None,
) -> tuple[Group, GroupEngine, Group | None]:
    """The trainers of a phase, one on each rank, its engines, and the separate processes of its reference, if any."""

    def start() -> ModelFile[AudioPolicy]:
        return ModelFile.save(run, phase, "start", policy)

    def reference_source() -> ReferenceSource:
        if reference is None:
            return None
        return "base" if reference.is_base else ModelFile.save(run, phase, "reference", reference.policy)

    def trainer() -> tuple[Any, ...]:
        return _actor, start(), config, optim, sampling, "separate" if current().references else reference_source()

    def local_trainer(world: World) -> Actor:
        vllm = _vllm(start(), sampling) if current().engine == "vllm" and not current().engines else None
        if vllm is not None and vllm.can_sleep:
            vllm.sleep()
        return Actor(policy, config, optim, sampling, reference, world, vllm)

    check_engine()
    if current().references:
        check_separate_teacher(config.distill)
    trainers = trainer_group(local_trainer, trainer)
    engines = separate_group("engine", lambda: (_engine, start(), sampling))
    colocated = engines is not None and current().shares_gpus
    references = None
    if config.kl_beta > 0 or config.distill.from_reference_process:
        references = separate_group("reference", lambda: (_reference, start(), config, sampling, reference_source()))
    return trainers, GroupEngine(trainers, engines, config.overlap, colocated), references


def _actor(
    start: ModelFile[AudioPolicy],
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: ReferenceSource,
) -> Actor:
    policy = start.load()
    frozen: Reference | Literal["separate"] | None = None
    if isinstance(reference, ModelFile):
        frozen = reference.load().reference()
    elif reference is not None:
        frozen = "separate" if reference == "separate" else Reference(policy, base=True)
    return Actor(policy, config, optim, sampling, frozen, World.of_process_group())


def _reference(
    start: ModelFile[AudioPolicy], config: RLConfig, sampling: SamplingConfig, source: ReferenceSource
) -> ReferenceWorker:
    policy = source.load() if isinstance(source, ModelFile) else start.load()
    reference = Reference(policy, base=True) if source == "base" else policy
    teacher = None
    if config.distill.from_reference_process:
        name = config.distill.teacher
        model = reference if name == "reference" else load_teacher(name, policy)
        teacher = Teacher(model, policy, config, sampling.temperature or 1.0)
    return ReferenceWorker(reference, config, sampling, teacher)


def check_separate_teacher(config: DistillConfig) -> None:
    """Raise ValueError for a divergence whose teacher cannot be a process of its own."""
    whole = config.loss_kind is not None and (not config.top_k or config.top_k_of == "student")
    if config.from_reference_process and whole:
        raise ValueError(
            "runtime.references: this distill.divergence needs the teacher's hidden states and head in the trainer; "
            "from a process of its own it can send its top tokens (distill.top_k 64, top_k_of teacher) or log-probs "
            "(distill.divergence sampled)"
        )


def _engine(start: ModelFile[AudioPolicy], sampling: SamplingConfig) -> EngineWorker:
    engine = EngineWorker(_vllm(start, sampling) if current().engine == "vllm" else HFEngine(start.load(), sampling))
    if current().shares_gpus:
        engine.sleep()
    return engine


def _vllm(start: ModelFile[AudioPolicy], sampling: SamplingConfig) -> VLLMEngine:
    """vLLM with the weights that the phase begins with; it can sleep where it shares a trainer's GPU."""
    runtime, gpu = current(), torch.cuda.is_available()
    config = VLLMConfig(
        dtype="bfloat16" if start.config.autocast else "auto",
        gpu_memory_utilization=runtime.engine_gpu_fraction,
        tensor_parallel_size=runtime.engine_gpus if runtime.engines else 1,
        sleep=gpu and runtime.shares_gpus,
    )
    return VLLMEngine(start.folder, sampling, config)

"""The workers of a policy gradient phase, one object in each process: trainers that also generate, engines, references.

Every process loads its own copy of the model that the phase begins with; a worker in the driver's process shares the
driver's model instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, TeacherOutput
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.distributed import current
from audiorl.config.flow import FlowConfig
from audiorl.distributed.local import World, changes_worker
from audiorl.distributed.ray_cluster import import_ray
from audiorl.models import AudioPolicy, FlowPolicy, TrainedPolicy, load_policy
from audiorl.models.lora import is_adapter
from audiorl.models.policy import Reference
from audiorl.models.weights import Weights, named
from audiorl.protocols import Ended, Request, Sleep
from audiorl.rollout.flow import FlowEngine
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMConfig, VLLMEngine
from audiorl.rollout.vllm_weights import Lora, adapter_obstacle, served_weights
from audiorl.rollout.weight_transfer import Backend, SyncError, WeightReceiver, WeightSender
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter, ModelFile
from audiorl.train.optim.steps import with_pass_tokens
from audiorl.train.rl.distill import Teacher, load_teacher
from audiorl.train.rl.trainer import Separate, State, Trainer, with_logprobs
from audiorl.types import Rollout

_log = logging.getLogger(__name__)


class WeightSource(NamedTuple):
    """The sender that engine `number` of `receivers` receives weights from; `address` is HOST:PORT."""

    address: str
    backend: Backend
    receivers: int
    number: int = 0


Sampling = SamplingConfig | FlowConfig
"""How the rollouts of a phase are sampled: of a flow by a `FlowConfig`."""


def engine_of(policy: TrainedPolicy, sampling: Sampling) -> HFEngine | FlowEngine:
    """Return the engine that samples with the policy itself."""
    if isinstance(policy, FlowPolicy):
        assert isinstance(sampling, FlowConfig)
        return FlowEngine(policy, sampling)
    assert isinstance(sampling, SamplingConfig)
    return HFEngine(policy, sampling)


def most_sampled(policy: TrainedPolicy, sampling: Sampling) -> int:
    """Return the most tokens, frames and noisy steps that a rollout samples."""
    if isinstance(sampling, FlowConfig):
        return sampling.steps
    return sampling.max_new_tokens + (0 if policy.speech is None else sampling.max_frames)


class Actor(Trainer, CheckpointedWorker):
    """A trainer that also generates: with its own model, or with a colocated vLLM engine that copies its weights.

    engine_lora: how vLLM engines run the policy's adapter.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        config: RLConfig,
        optim: OptimConfig,
        sampling: Sampling,
        reference: Reference | None = None,
        world: World | None = None,
        colocated_engine: VLLMEngine | None = None,
        engine_lora: Lora = "merged",
        separate: Separate | None = None,
    ):
        max_rows = most_sampled(policy, sampling)
        self._writer = CheckpointWriter(policy, world)
        temperatures = sampling.training_temperatures
        super().__init__(policy, config, optim, temperatures[0], max_rows, reference, temperatures[1], world, separate)
        self.engine = engine_of(policy, sampling)
        self._colocated_engine = colocated_engine
        self._engine_lora = engine_lora
        self._engine_version = -1
        self._sender: WeightSender | None = None
        self._snapshot: dict[str, Tensor] = {}
        self._snapshot_version: int | None = None

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        engine = self._colocated_engine
        if engine is None:
            self.engine.policy_version = self.steps
            return self.engine.generate(requests, ended)
        if engine.can_sleep:
            free_cached()  # vLLM allocates what the trainer does not use
            engine.wake()
        if self._engine_version != self.steps:
            engine.update_weights(self._weights_for_engines(), self.steps)
            self._engine_version = self.steps
        rollouts = engine.generate(requests, ended)
        if engine.can_sleep:
            engine.sleep()
        return rollouts

    def _weights_for_engines(self) -> Weights:
        served = current().engine == "vllm"
        if served and isinstance(self.policy, AudioPolicy):
            return served_weights(self.policy, self._engine_lora)
        return self.policy.weights()

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

    def weight_source(self, engines: int, restart: bool) -> WeightSource | None:
        """Return where engines receive the weights; None on ranks that send to none. `restart`: connect anew.

        The first rank sends to all engines; colocated ones read their own trainer's memory.
        """
        colocated = current().shares_gpus
        if self.world.rank >= (engines if colocated else 1):
            return None
        receivers = 1 if colocated else engines * current().engine_gpus
        backend: Backend = "ipc" if colocated else "nccl" if torch.cuda.is_available() else "gloo"
        if self._sender is not None and (restart or not self._sender.is_open):
            self._sender.close("another connection was made")
            self._sender = None
        if self._sender is None:
            timeout = current().sync_timeout
            self._sender = WeightSender(receivers, host=node_address(), backend=backend, timeout=timeout)
        return WeightSource(self._sender.address, backend, receivers)

    @changes_worker
    def snapshot(self) -> None:
        """Copy the weights to CPU memory, the same memory each time. After the next update `send` sends the copy."""
        if self.world.rank:
            return
        for name, tensor in named(self._weights_for_engines()):
            if name not in self._snapshot:
                self._snapshot[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            # Pinned memory: the GPU copies while the weights are sent, and before the next update changes them.
            self._snapshot[name].copy_(tensor.detach(), non_blocking=True)
        self._snapshot_version = self.steps

    def send(self) -> str | None:
        """Send the weights to the engines. Returns None, or why they did not arrive."""
        if self._sender is None:
            return None if self.world.rank else "the first trainer has no connection for weights"
        try:
            if self._snapshot_version in (None, self.steps):
                self._sender.send(self._weights_for_engines())
            else:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self._sender.send(self._snapshot)
        except SyncError as error:
            return str(error)
        return None


class EngineWorker:
    """A worker that generates rollouts with its own copy of the weights. It wakes its engine when it is called."""

    def __init__(self, engine: HFEngine | FlowEngine | VLLMEngine):
        self._engine = engine
        self._asleep = False
        self._source: WeightSource | None = None
        self._receiver: WeightReceiver | None = None
        self._workers_connected = False

    def connect(self, source: WeightSource) -> bool:
        """Connect to a sender of weights, each of vLLM's workers where there are several. Returns whether it was."""
        if (self._receiver is not None or self._workers_connected) and source == self._source:
            return True
        self._disconnect("another connection was made")
        self._source = source
        timeout = current().sync_timeout
        options: dict[str, Any] = {"host": node_address(), "timeout": timeout, "backend": source.backend}
        workers = current().engine_gpus
        if isinstance(self._engine, VLLMEngine) and workers > 1:
            first = source.number * workers
            self._workers_connected = self._engine.connect(source.address, first, source.receivers, options) is None
            return False
        try:
            self._receiver = WeightReceiver(source.address, source.number, source.receivers, **options)
        except SyncError:
            self._receiver = None  # the sender has ended; `receive` reports it
        return False

    def receive(self, version: int) -> str | None:
        """Load the weights that are sent next. Returns None, or why they did not arrive."""
        self._wake()
        if self._workers_connected and isinstance(self._engine, VLLMEngine):
            reason = self._engine.receive(version)
            if reason is not None:
                self._disconnect(reason)
            return reason
        if self._receiver is None:
            return "an engine has no connection for weights"
        try:
            self._receiver.update(self._engine.update_weights, version)
        except SyncError as error:
            self._disconnect(str(error))
            return str(error)
        return None

    def generate(self, version_and_requests: tuple[int, Sequence[Request]]) -> list[Rollout] | None:
        """Rollouts of the requests; None where the engine's weights are of another version."""
        version, requests = version_and_requests
        if self._engine.policy_version != version:
            return None
        self._wake()
        return self._engine.generate(requests)

    def sleep(self) -> None:
        """Free GPU memory for a colocated trainer, if the engine can."""
        if isinstance(self._engine, Sleep) and self._engine.can_sleep and not self._asleep:
            self._engine.sleep()
            self._asleep = True
        free_cached()

    def _wake(self) -> None:
        if self._asleep and isinstance(self._engine, Sleep):
            self._engine.wake()
        self._asleep = False

    def close(self) -> None:
        self._disconnect("the phase has ended")
        if isinstance(self._engine, VLLMEngine):
            self._engine.close()

    def _disconnect(self, reason: str) -> None:
        if self._receiver is not None:
            self._receiver.close(reason)
        self._receiver = None
        if self._workers_connected and isinstance(self._engine, VLLMEngine):
            self._engine.disconnect(reason)
        self._workers_connected = False


class ReferenceWorker:
    """Holds the reference model of the KL, and the teacher of distillation, for trainers that do not. It shares no
    weights with the trained policy."""

    def __init__(
        self, model: AudioPolicy | Reference, config: RLConfig, sampling: SamplingConfig, teacher: Teacher | None = None
    ):
        runs_on = model.runs_on if isinstance(model, Reference) else model
        self._model, self._teacher = model, teacher
        self._config = with_pass_tokens(config, runs_on, OptimConfig(), sampling.max_new_tokens)
        self._temperatures = sampling.training_temperatures

    def teacher_outputs(self, experiences: Sequence[Experience]) -> list[TeacherOutput]:
        """Return the outputs of the teacher, see `Teacher.outputs`."""
        assert self._teacher is not None
        return self._teacher.outputs(experiences)

    def ref_logprobs(self, experiences: Sequence[Experience]) -> list[Tensor]:
        """Return for each experience [L], or [L, Q] where it holds codec frames."""
        scored = with_logprobs(experiences, "ref_logprobs", self._model, self._config, self._temperatures)
        return [e.ref_logprobs for e in scored if e.ref_logprobs is not None]


ReferenceSource = ModelFile[AudioPolicy] | Literal["base"] | None
"""Where a trainer's reference comes from: a folder, the model below its adapter, or (None) the policy
that the phase begins with."""


def make_actor(
    start: ModelFile[Any],
    config: RLConfig,
    optim: OptimConfig,
    sampling: Sampling,
    reference: ReferenceSource,
) -> Actor:
    policy = start.load()
    separate = Separate(reference=current().references > 0, critic=current().critics > 0)
    frozen: Reference | None = None
    if isinstance(reference, ModelFile) and not separate.reference:
        frozen = reference.load().reference()
    elif reference == "base":
        frozen = Reference(policy, base=True)
    world = World.of_process_group()
    lora = engine_lora(start, warn=world.rank == 0)
    return Actor(policy, config, optim, sampling, frozen, world, engine_lora=lora, separate=separate)


def make_reference(
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


def make_engine(start: ModelFile[Any], sampling: Sampling) -> EngineWorker:
    if current().engine == "vllm" and isinstance(sampling, SamplingConfig):
        engine = EngineWorker(make_vllm(start, sampling))
    else:
        engine = EngineWorker(engine_of(start.load(), sampling))
    if current().shares_gpus:
        engine.sleep()
    return engine


def make_vllm(start: ModelFile[AudioPolicy], sampling: SamplingConfig) -> VLLMEngine:
    """vLLM with the weights that the phase begins with; it can sleep where it shares a trainer's GPU."""
    runtime, gpu = current(), torch.cuda.is_available()
    config = VLLMConfig(
        dtype=_vllm_dtype(start),
        lora=engine_lora(start),
        gpu_memory_utilization=runtime.engine_gpu_fraction,
        tensor_parallel_size=runtime.engine_gpus if runtime.engines else 1,
        sleep=gpu and runtime.shares_gpus,
    )
    return VLLMEngine(start.folder, sampling, config)


def _vllm_dtype(start: ModelFile[AudioPolicy]) -> Literal["auto", "bfloat16"]:
    return "bfloat16" if start.config.autocast else "auto"


def engine_lora(start: ModelFile[AudioPolicy], warn: bool = False) -> Lora:
    """Return how vLLM runs the adapter of this folder; trainers and engines each find the same. `warn`: if not as an
    adapter.

    Raises ValueError where `runtime.engine_lora` is adapter and vLLM cannot run it.
    """
    wanted = current().engine_lora
    if current().engine != "vllm" or wanted == "merged" or not is_adapter(start.folder):
        return "merged"
    reason = adapter_obstacle(load_policy(start.folder, ModelConfig(device="meta")), _vllm_dtype(start))
    if reason is None:
        return "adapter"
    if wanted == "adapter":
        raise ValueError(f"runtime.engine_lora adapter: vLLM cannot run it: {reason}; take auto or merged")
    if warn:
        _log.warning("vLLM is sent merged weights at every step, not the adapter: %s", reason)
    return "merged"


def free_cached() -> None:
    """Return torch's cached but unused GPU memory, so that other processes can use it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def node_address() -> str:
    """This node's address in the Ray cluster."""
    address: Any = import_ray().util.get_node_ip_address()
    return str(address)

"""Workers as groups have them: made in any process, from what can travel there.

A phase that several processes train begins with its model on disk, `checkpoints/PHASE/start`, from which every process
makes its own. The driver shares its objects with a worker in its own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.models.policy import Reference, Weights, named
from audiorl.rl.trainer import State, Trainer, with_logprobs
from audiorl.rl.weight_sync import EngineApart, GroupEngine, Source, free_cached, node_address
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMConfig, VLLMEngine, served_weights
from audiorl.rollout.weight_transfer import SyncError, WeightSender
from audiorl.run.folder import Run
from audiorl.run.model_file import ModelFile
from audiorl.runtime.config import current
from audiorl.runtime.local import Group
from audiorl.runtime.placement import apart, check_engine, team
from audiorl.runtime.world import World
from audiorl.types import Experience, Request, Rollout


class Actor(Trainer):
    """A trainer with an engine: on the same weights, or vLLM beside it, which takes them before it writes."""

    def __init__(
        self,
        policy: AudioPolicy,
        config: RLConfig,
        optim: OptimConfig,
        sampling: SamplingConfig,
        reference: Reference | Literal["apart"] | None = None,
        world: World | None = None,
        beside: VLLMEngine | None = None,
    ):
        most = sampling.max_new_tokens if policy.speech is None else sampling.max_new_tokens + sampling.max_frames
        super().__init__(
            policy, config, optim, sampling.temperature, most, reference, sampling.audio_temperature, world
        )
        self.engine = HFEngine(policy, sampling)
        self._beside = beside
        self._served = -1
        self._sender: WeightSender | None = None
        self._kept: dict[str, Tensor] | None = None

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        if self._beside is not None:
            return self._generate_beside(self._beside, requests)
        self.engine.policy_version = self.steps
        return self.engine.generate(requests)

    def _generate_beside(self, engine: VLLMEngine, requests: Sequence[Request]) -> list[Rollout]:
        if engine.can_sleep:
            free_cached()  # what the trainer does not use is vLLM's now
            engine.wake()
        if self._served != self.steps:
            engine.update_weights(self._weights_for_engines(), self.steps)
            self._served = self.steps
        rollouts = engine.generate(requests)
        if engine.can_sleep:
            engine.sleep()
        return rollouts

    def _weights_for_engines(self) -> Weights:
        return served_weights(self.policy) if current().engine == "vllm" else self.policy.weights()

    def load(self, state: State, where: str) -> None:
        super().load(state, where)
        self._served = -1

    def close(self) -> None:
        super().close()
        if self._beside is not None:
            self._beside.close()
        if self._sender is not None:
            self._sender.close("the phase has ended")

    # -- engines apart: the first trainer sends them its weights -----------------------------------------------------

    def make_room(self) -> None:
        """For an engine on the same GPU: leave what is not in use."""
        free_cached()

    def source(self, receivers: int, anew: bool) -> Source | None:
        """Where engines find the weights; `anew`: not where they were."""
        if self.world.rank:
            return None
        # NCCL knows no two processes on one GPU.
        between_gpus = torch.cuda.is_available() and not current().shares_gpus
        backend: Literal["gloo", "nccl"] = "nccl" if between_gpus else "gloo"
        if self._sender is not None and (anew or not self._sender.is_open):
            self._sender.close("another connection was made")
            self._sender = None
        if self._sender is None:
            self._sender = WeightSender(receivers, host=node_address(), backend=backend)
        return Source(self._sender.address, backend, receivers)

    def keep(self) -> None:
        """From here on `send` gives the weights of now, in the machine's memory, whatever becomes of them."""
        if not self.world.rank:
            weights = named(self._weights_for_engines())
            self._kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}

    def send(self) -> str | None:
        """Give all engines the weights; what went wrong if they did not arrive."""
        if self.world.rank:
            return None
        if self._sender is None:
            return "the first trainer has no connection for weights"
        try:
            self._sender.send(self._weights_for_engines() if self._kept is None else self._kept)
        except SyncError as error:
            return str(error)
        return None


class ReferenceApart:
    """The reference of the KL, for trainers that do not hold it. It shares nothing with the policy that learns."""

    def __init__(self, model: AudioPolicy | Reference, config: RLConfig, sampling: SamplingConfig):
        self._model, self._config, self._sampling = model, config, sampling

    def logprobs(self, experiences: Sequence[Experience]) -> list[Tensor]:
        """`ref_logprobs` of each."""
        at = self._sampling.temperature, self._sampling.audio_temperature
        found = with_logprobs(experiences, "ref_logprobs", self._model, self._config, *at)
        return [e.ref_logprobs for e in found if e.ref_logprobs is not None]


Held = ModelFile[AudioPolicy] | Literal["base", "apart"] | None
"""Where a trainer's reference comes from: a folder, the model below its adapter, another process, or its own start."""


def actors(
    run: Run,
    phase: str,
    policy: AudioPolicy,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: Reference | None,
) -> tuple[Group, GroupEngine, Group | None]:
    """The trainers of a phase, one on each rank, its engines, and the processes of its reference if it has its own."""

    def start() -> ModelFile[AudioPolicy]:
        return ModelFile.save(run, phase, "start", policy)

    def held() -> Held:
        if reference is None:
            return None
        return "base" if reference.is_base else ModelFile.save(run, phase, "reference", reference.policy)

    def trainer() -> tuple[Any, ...]:
        return _actor, start(), config, optim, sampling, "apart" if current().references else held()

    def own(world: World) -> Actor:
        beside = _vllm(start(), sampling) if current().engine == "vllm" and not current().engines else None
        if beside is not None and beside.can_sleep:
            beside.sleep()
        return Actor(policy, config, optim, sampling, reference, world, beside)

    check_engine()
    trainers = team(own, trainer)
    engines = apart("engine", lambda: (_engine, start(), sampling))
    together = engines is not None and current().shares_gpus
    references = None
    if config.kl_beta > 0:
        references = apart("reference", lambda: (_reference, start(), config, sampling, held()))
    return trainers, GroupEngine(trainers, engines, config.overlap, together), references


def _actor(
    start: ModelFile[AudioPolicy],
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: Held,
) -> Actor:
    policy = start.load()
    frozen: Reference | Literal["apart"] | None = None
    if isinstance(reference, ModelFile):
        frozen = reference.load().reference()
    elif reference is not None:
        frozen = "apart" if reference == "apart" else Reference(policy, base=True)
    return Actor(policy, config, optim, sampling, frozen, World.of_process_group())


def _reference(start: ModelFile[AudioPolicy], config: RLConfig, sampling: SamplingConfig, held: Held) -> ReferenceApart:
    policy = held.load() if isinstance(held, ModelFile) else start.load()
    return ReferenceApart(Reference(policy, base=True) if held == "base" else policy, config, sampling)


def _engine(start: ModelFile[AudioPolicy], sampling: SamplingConfig) -> EngineApart:
    engine = EngineApart(_vllm(start, sampling) if current().engine == "vllm" else HFEngine(start.load(), sampling))
    if current().shares_gpus:
        engine.sleep()
    return engine


def _vllm(start: ModelFile[AudioPolicy], sampling: SamplingConfig) -> VLLMEngine:
    """Of what the phase begins with, and able to leave a GPU that it shares with a trainer."""
    runtime, gpu = current(), torch.cuda.is_available()
    config = VLLMConfig(
        dtype="bfloat16" if start.config.autocast else "auto",
        gpu_memory_utilization=runtime.gpu_fraction or (0.4 if runtime.shares_gpus else 0.9),
        tensor_parallel_size=runtime.engine_gpus if runtime.engines else 1,
        sleep=gpu and runtime.shares_gpus,
    )
    return VLLMEngine(start.folder, sampling, config)

"""Workers as groups have them: made in any process, from what can travel there.

A phase that several processes train begins with its policy on disk, `checkpoints/PHASE/start`, from which every process
makes its own. The driver shares its objects with a worker in its own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from audiorl.algos.packing import balance
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import rough_length
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.policy import Reference
from audiorl.rollout.hf import HFEngine
from audiorl.runtime.cluster import RayGroup
from audiorl.runtime.local import Group
from audiorl.runtime.ranks import local_device
from audiorl.runtime.team import engines_apart, team
from audiorl.runtime.world import World
from audiorl.train.rl import RLWorker
from audiorl.train.run import Run
from audiorl.types import Request, Rollout
from tokenizers_audio import AudioTokenizer


@dataclass(frozen=True)
class PolicyFile:
    """A policy in a folder, and how to hold it."""

    folder: str
    config: ModelConfig
    codec: AudioTokenizer | None

    @classmethod
    def save(cls, run: Run, phase: str, name: str, policy: AudioPolicy) -> PolicyFile:
        """checkpoints/PHASE/NAME of the run, written unless it is there."""
        return cls(run.keep_model(phase, name, policy), policy.config, policy.codec)

    def load(self) -> AudioPolicy:
        return load_policy(self.folder, replace(self.config, device=local_device(self.config.device)), self.codec)


class Actor(RLWorker):
    """A trainer with an engine on the same weights."""

    def __init__(
        self,
        policy: AudioPolicy,
        config: RLConfig,
        optim: OptimConfig,
        sampling: SamplingConfig,
        reference: Reference | None = None,
        world: World | None = None,
    ):
        most = sampling.max_new_tokens if policy.speech is None else sampling.max_new_tokens + sampling.max_frames
        super().__init__(
            policy, config, optim, sampling.temperature, most, reference, sampling.audio_temperature, world
        )
        self.engine = HFEngine(policy, sampling)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self.engine.policy_version = self.steps
        return self.engine.generate(requests)


class GroupEngine:
    """The engines of a phase as one: each gets a part of the requests, about equally much to write.

    They are the trainers' own, or those of the group `apart`, which have weights of their own.
    """

    def __init__(self, trainers: Group, apart: Group | None = None):
        self.trainers, self.apart = trainers, apart

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        group = self.trainers if self.apart is None else self.apart
        shares = balance([r.n * rough_length(r.sample) for r in requests], group.size)
        written = group.each("generate", [[requests[i] for i in share] for share in shares])
        by_request: dict[int, list[Rollout]] = {}
        for share, rollouts in zip(shares, written, strict=True):
            at = 0
            for i in share:
                by_request[i] = rollouts[at : at + requests[i].n]
                at += requests[i].n
        return [rollout for i in range(len(requests)) for rollout in by_request[i]]

    def sync(self, version: int) -> None:
        """Write with the weights that the trainers have after `version` steps from here on."""
        if self.apart is not None:
            send_weights(self.trainers, self.apart, version)


def send_weights(trainers: Group, engines: Group, version: int) -> None:
    """From the first trainer to every engine, through Ray's object store."""
    assert isinstance(trainers, RayGroup)
    engines.all("update_weights", trainers.refer("weights"), version)


def actors(
    run: Run,
    phase: str,
    policy: AudioPolicy,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: Reference | None,
) -> tuple[Group, GroupEngine]:
    """The trainers of a phase, one on each rank, and its engines."""

    def start() -> PolicyFile:
        return PolicyFile.save(run, phase, "start", policy)

    def trainer() -> tuple[Any, ...]:
        other: PolicyFile | Literal["base"] | None = None
        if reference is not None:
            other = "base" if reference.is_base else PolicyFile.save(run, phase, "reference", reference.policy)
        return _actor, start(), config, optim, sampling, other

    trainers = team(lambda world: Actor(policy, config, optim, sampling, reference, world), trainer)
    return trainers, GroupEngine(trainers, engines_apart(lambda: (_engine, start(), sampling)))


def _actor(
    start: PolicyFile,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: PolicyFile | Literal["base"] | None,
) -> Actor:
    policy = start.load()
    frozen = None
    if reference is not None:
        frozen = Reference(policy, base=True) if reference == "base" else reference.load().reference()
    return Actor(policy, config, optim, sampling, frozen, World.of_process_group())


def _engine(start: PolicyFile, sampling: SamplingConfig) -> HFEngine:
    return HFEngine(start.load(), sampling)

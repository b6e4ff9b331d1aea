"""Workers as groups have them: made in any process, from what can travel there.

A phase that several processes train begins with its policy on disk, `checkpoints/PHASE/start`, from which every process
makes its own. The driver shares its objects with a worker in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from audiorl.algos.packing import balance
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import rough_length
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.policy import Reference
from audiorl.rollout.hf import HFEngine
from audiorl.runtime.local import Group, LocalGroup
from audiorl.runtime.ranks import RanksGroup, local_device, ranks
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
        return self.engine.generate(requests)

    def now_at(self, version: int) -> None:
        """The weights that rollouts come from are those of so many updates."""
        self.engine.policy_version = version


class GroupEngine:
    """`RolloutEngine` over the engines of a group: each gets a part of the requests, about equally much to write."""

    def __init__(self, group: Group):
        self.group = group
        self.policy_version = 0

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        shares = balance([r.n * rough_length(r.sample) for r in requests], self.group.size)
        written = self.group.each("generate", [[requests[i] for i in share] for share in shares])
        by_request: dict[int, list[Rollout]] = {}
        for share, rollouts in zip(shares, written, strict=True):
            at = 0
            for i in share:
                by_request[i] = rollouts[at : at + requests[i].n]
                at += requests[i].n
        return [rollout for i in range(len(requests)) for rollout in by_request[i]]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """The engines share their trainers' weights; only the version is new."""
        self.group.all("now_at", version)
        self.policy_version = version


def actors(
    run: Run,
    phase: str,
    policy: AudioPolicy,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    reference: Reference | None,
) -> Group:
    """The trainers and engines of a phase, one on each rank."""

    def own(world: World | None = None) -> Actor:
        return Actor(policy, config, optim, sampling, reference, world)

    if ranks() == 1:
        return LocalGroup([own()])
    start = PolicyFile.save(run, phase, "start", policy)
    other: PolicyFile | Literal["base"] | None = None
    if reference is not None:
        other = "base" if reference.is_base else PolicyFile.save(run, phase, "reference", reference.policy)
    return RanksGroup(lambda: own(World.of_process_group()), _actor, start, config, optim, sampling, other)


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


def alone(make: Callable[[], Any], phase: str) -> Group:
    """One worker, for a phase that more processes cannot train."""
    if ranks() > 1:
        raise ValueError(f"{phase}: this kind of training runs in one process; start it without torchrun")
    return LocalGroup([make()])

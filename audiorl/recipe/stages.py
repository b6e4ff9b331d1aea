"""The stages of segmented PPO, each measured (two-stage training of Seed LiveInterpret 2.0, arXiv 2507.17527)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.evaluation.streams import probe_streams
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.rl.train import train_rl
from audiorl.run.folder import Run
from audiorl.simulst.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.types import Reward, SpeechDecoder

Name = Literal["stage1", "stage2"]


@dataclass(frozen=True)
class Stage:
    """A phase of the run, its reward, and the name of the evaluation after it."""

    name: Name
    reward: Reward
    config: RLConfig
    measured_as: str


def train_stages(
    policy: AudioPolicy,
    streams: Sequence[Stream],
    held_out: Sequence[Stream],
    run: Run,
    stages: Sequence[Stage],
    *,
    chunks: ChunkConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    measure: Callable[[str], None],
    seed: int = 0,
    supervised: Sequence[Example] = (),
    speech_decoder: SpeechDecoder | None = None,
) -> None:
    """Train `policy` in place, stage after stage.

    The KL of all stages is measured from the policy as it is now, and an adaptive β starts at its last value of the
    stage before. `supervised`: the examples of the ptx term. `speech_decoder`: of a policy that speaks.
    """
    start = policy.reference()
    beta: float | None = None
    samples = [interpretation_sample(s, chunks) for s in streams]
    for number, stage in enumerate(stages):
        config = stage.config
        if beta is not None and config.kl_control != "fixed":
            config = replace(config, kl_beta=beta)
        train_rl(
            policy,
            samples,
            stage.reward,
            run,
            config=config,
            optim=optim,
            sampling=sampling,
            seed=seed + number,
            phase=stage.name,
            evaluate=probe_streams(policy, held_out, chunks, sampling),
            supervised=supervised,
            reference=start,
            speech_decoder=speech_decoder,
        )
        beta = run.result(stage.name)["kl_beta"]
        measure(stage.measured_as)

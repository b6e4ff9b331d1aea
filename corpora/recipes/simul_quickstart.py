"""A small interpreter learns to speak in time: segmented PPO on real speech, in half an hour on two cores.

English prompts, recorded by a person, are laid out as streams of 6 to 12 s. The model, a Qwen2.5-Omni thinker of 11 M
parameters whose audio encoder is that of Whisper tiny.en, gets them in chunks of 960 ms. After each one it waits or
writes a piece of Spanish. From Spanish or French into English, unseen speakers say the same prompts.

  sft      supervised start on interpreted streams, each unit said as soon as it can be: mostly robot voices, which say
           all prompts, and a person, who says those of the training split. An interpreter whose lag varies (`--lag 3`)
           is a far worse teacher (docs/experiments.md)
  late     with `--late-steps 150`: more of it on an interpreter who is late, as people are; a start that translates and
           has something to learn about time. `--late-by phrase`: who waits for the end of each phrase
  stage1   PPO on the same streams with the rewards of single turns: listening, initiative, quality, format
  stage2   PPO with those and the latency and the quality of the whole stream
  wait-k   a baseline of its own: the same start trained on wait-k schedules for random k, then decoded by them

Each is measured on streams of prompts of which training had no human recording, and with `--unseen` the first three on
streams of speakers that no phase trains on.

    audiorl train simul-quickstart --out runs/simul
    audiorl train simul-quickstart --source es --target en --unseen unseen_speakers --out runs/simul-es
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from audiorl.config import (
    CriticConfig,
    EstimatorConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    RLConfig,
    SamplingConfig,
    SFTConfig,
)
from audiorl.eval._streams import measure_streams
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models.examples import Example
from audiorl.protocols import Schedule
from audiorl.recipes._common import passes_on_cpu, random_policy, with_voice
from audiorl.recipes._simul import SimulStage, StreamRewards, train_stages
from audiorl.report import write_report
from audiorl.run.folder import Run
from audiorl.tasks.simul.formats import write_streams
from audiorl.tasks.simul.schedules import Offline, WaitK, delay_references, words_per_chunk
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample, phrase_lags, random_lags
from audiorl.train.sft import sft
from corpora.recipes._streams import StreamOptions, streams_of

PPO = RLConfig(
    steps=30,
    prompts_per_step=12,
    group_size=2,
    advantage="gae",
    estimator=EstimatorConfig(gamma=0.95, lam=0.95),
    epochs=1,
    mini_batches=2,
    aggregation="token-mean",
    kl=KLConfig(place="reward", kind="k1", control="log-space", target=0.55, gain=0.5),
    kl_beta=0.15,
    critic=CriticConfig(warmup_steps=3, optim=OptimConfig(lr=3e-4)),
    eval_every=10,
    save_every=10,
)


WEIGHTS = {
    "quality": 2.0,
    "stream_quality": 2.0,
    "latency": 0.5,
    "detection": 1.0,
    "initiative": 1.0,
    "format": 1.0,
}
"""Weights by name, which options change: `--rewards.weights.initiative 0`."""


@dataclass(frozen=True)
class SimulQuickstartConfig(StreamOptions):
    chunks: ChunkConfig = ChunkConfig()
    """How streams are cut into chunks of audio."""
    lag: int = 0
    """The supervised interpreter says a unit `least_lag` to `lag` chunks after it could be said."""
    least_lag: int = 0
    """See `lag`; as much as it, every unit is as late as every other."""
    late_by: Literal["chunks", "phrase"] = "chunks"
    """How late the interpreter of the phase `late` is: in a stream 0 to `late_lag` chunks throughout, or until the end
    of each phrase in the share `late_share` of the streams, as where references are known by the sentence."""
    late_lag: int = 3
    """See `late_by`."""
    late_share: float = 0.7
    """See `late_by`. In the other streams every unit is on time: what never occurs, PPO cannot sample."""
    codec: str | None = None
    """A codec's folder, such as `runs/tts/codec`: the interpreter speaks what it writes, in the recordings' voice."""
    ks: tuple[int, ...] = (1, 2, 3, 5, 8)
    """k of the wait-k baselines; none leaves them out."""
    model: ModelConfig = ModelConfig(audio="projector")
    """How the model is held, and what of it is trained."""
    vocabulary: int = 700
    """Size of the tokenizer's vocabulary."""
    sft: SFTConfig = SFTConfig(steps=500, batch_size=8, save_every=50)
    """The supervised start."""
    sft_optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=20, schedule="cosine")
    """The optimizer of the supervised start."""
    late_steps: int = 0
    """After the supervised start as many steps more of it, on an interpreter who is late, as people are."""
    late_optim: OptimConfig = OptimConfig(lr=5e-4, warmup_steps=20, schedule="cosine")
    """The optimizer of the phase `late`."""
    wait_k: SFTConfig = SFTConfig(steps=200, batch_size=8, save_every=50)
    """Training of the wait-k baselines, from the supervised start on."""
    wait_k_optim: OptimConfig = OptimConfig(lr=5e-4, warmup_steps=20, schedule="cosine")
    """The optimizer of the baselines."""
    stages: tuple[Literal["stage1", "stage2"], ...] = ("stage1", "stage2")
    """For ablations: one of them alone."""
    rewards: StreamRewards = field(
        default_factory=lambda: StreamRewards(longest_wait=0.0, waits="available", weights=WEIGHTS)
    )
    """Rewards of the stages. Each is standardised, and detection and initiative ask for speed already."""
    stage1: RLConfig = PPO
    """PPO with the rewards of single turns."""
    stage2: RLConfig = PPO
    """PPO with the rewards of single turns and of the whole stream."""
    optim: OptimConfig = OptimConfig(lr=1e-4, warmup_steps=3)
    """The policy's optimizer in both stages."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=24, max_frames=100, max_batch_tokens=60_000)
    """How the interpreter is sampled after each chunk; held-out streams are interpreted greedily."""

    def __post_init__(self) -> None:
        if not 0 <= self.least_lag <= self.lag:
            raise ValueError(f"need 0 <= least_lag <= lag, got --least-lag {self.least_lag} and --lag {self.lag}")
        if min(self.late_lag, self.late_steps) < 0:
            raise ValueError(f"need 0 or more, got --late-lag {self.late_lag} and --late-steps {self.late_steps}")
        if not 0 <= self.late_share <= 1:
            raise ValueError(f"need 0 <= late_share <= 1, got --late-share {self.late_share}")


def tiny() -> SimulQuickstartConfig:
    critic = replace(PPO.critic, warmup_steps=1)
    step = replace(PPO, steps=2, prompts_per_step=2, mini_batches=1, eval_every=1, save_every=1, critic=critic)
    return SimulQuickstartConfig(
        seconds=(2.0, 5.0),
        voices=1,
        robot_streams=4,
        human_streams=4,
        test_streams=2,
        ks=(2,),
        vocabulary=400,
        sft=SFTConfig(steps=2, batch_size=2, save_every=1),
        wait_k=SFTConfig(steps=1, batch_size=2, save_every=1),
        stage1=step,
        stage2=step,
        sampling=SamplingConfig(max_new_tokens=4, max_frames=8),
    )


def main(config: SimulQuickstartConfig, run: Run) -> None:
    torch.set_num_threads(config.threads)
    source = streams_of(config)
    policy = random_policy(config.model, source.target_texts(), vocab_size=config.vocabulary, seed=config.seed)
    config = passes_on_cpu(config, policy.device, sft=4000, wait_k=4000, stage1=4000, stage2=4000)
    speech_decoder = with_voice(policy, config.codec, config.seed) if config.codec else None
    rewards = replace(config.rewards, time=config.rewards.time or speech_decoder is not None)
    single, both = rewards.of_stages(speech_decoder.codec.frame_rate if speech_decoder else None)
    train = on_disk(run, source.people("train"), "train")
    test = on_disk(run, source.people("test"), "test")
    unseen = on_disk(run, source.unseen(), UNSEEN) if config.unseen else []
    measure = partial(
        measure_streams,
        run,
        policy=policy,
        chunks=config.chunks,
        sampling=config.sampling,
        reward=both,
        speech_decoder=speech_decoder,
        optimised=rewards.quality,
    )

    def measured(name: str, schedule: Schedule | None = None, baseline: str = "before") -> None:
        if unseen and schedule is None:
            measure(f"{UNSEEN}_{name}", streams=unseen, baseline=f"{UNSEEN}_{baseline}")
        measure(name, streams=test, schedule=schedule, baseline=baseline)

    streams = [*on_disk(run, source.robots(), "robots"), *train]
    references = supervised(streams, config)
    sft(policy, references, run, config=config.sft, optim=config.sft_optim, seed=config.seed)
    if config.late_steps:
        measured("on time", baseline="on time")
        late = replace(config.sft, steps=config.late_steps)
        references = supervised(streams, config, late=True)
        sft(policy, references, run, config=late, optim=config.late_optim, seed=config.seed, phase="late")
    measured("before")

    stages = {
        "stage1": SimulStage("stage1", single, config.stage1, "after stage1"),
        "stage2": SimulStage("stage2", both, config.stage2, "after"),
    }
    train_stages(
        policy,
        streams,
        test,
        run,
        [stages[name] for name in config.stages],
        chunks=config.chunks,
        optim=config.optim,
        sampling=config.sampling,
        measure=measured,
        seed=config.seed,
        supervised=references,
        speech_decoder=speech_decoder,
    )

    if config.ks:
        run.load_result(start_of(config), policy)
        rng = random.Random(config.seed)
        rate = words_per_chunk(train, config.chunks.seconds)
        waiting = [
            Example(replace(s, turns=delay_references(s.turns, WaitK(rng.choice(config.ks), rate, config.target))))
            for s in (interpretation_sample(s, config.chunks) for s in streams)
        ]
        optim, phase = config.wait_k_optim, "control_wait_k"
        sft(policy, waiting, run, config=config.wait_k, optim=optim, seed=config.seed, phase=phase)
        for k in config.ks:
            measured(f"wait-{k}", WaitK(k, rate, config.target))
        measured("offline", Offline(config.target))
    print(write_report(run.dir))


def start_of(config: SimulQuickstartConfig) -> Literal["sft", "late"]:
    """Return the phase that PPO starts from."""
    return "late" if config.late_steps else "sft"


def supervised(streams: Sequence[Stream], config: SimulQuickstartConfig, late: bool = False) -> list[Example]:
    """Return the streams with the references of the phase `sft` or `late`."""
    rng = random.Random(config.seed)
    examples = []
    for s in streams:
        if late and config.late_by == "phrase":
            lags = phrase_lags(s, config.chunks) if rng.random() < config.late_share else []
        elif late:
            lags = random_lags(s, rng, config.late_lag, per="stream")
        else:
            lags = random_lags(s, rng, config.lag, config.least_lag)
        examples.append(Example(interpretation_sample(s, config.chunks, lags)))
    return examples


def on_disk(run: Run, streams: list[Stream], split: str) -> list[Stream]:
    """Return the streams with their audio in the run's folder, where the report finds it."""
    return write_streams(run.dir / "streams" / split, streams)

"""Segmented PPO for simultaneous interpretation, in two stages, on your own model and streams.

    audiorl train simul-ppo --out runs/simul --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data train.jsonl --held-out dev.jsonl --target-language es

After each chunk of audio the model waits or writes a piece of translation. Stage 1 rewards single turns, stage 2
also the latency and quality of the whole stream (Seed LiveInterpret 2.0, arXiv 2507.17527); the KL to the start is
held near its target by a controller in log space. A model that has never seen such streams starts with `--sft-epochs`
of supervised interpretation, `--lag` chunks late at most. Streams: audiorl's jsonl, RealSI, MuST-C's YAML, or pairs
with word times (`audiorl.tasks.simul.formats`). `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

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
from audiorl.config.recipe import PtxOptions, RecipeConfig, RewardOptions
from audiorl.data.schema import FieldError
from audiorl.eval._streams import measure_streams
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.recipes._common import (
    RowCheck,
    policy_from,
    ptx_examples,
    read_split,
    with_user_reward,
    with_voice,
)
from audiorl.recipes._simul import SimulStage, StreamRewards, train_stages
from audiorl.report import write_report
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample, random_lags
from audiorl.train.sft import sft
from audiorl.types import Sample

PPO = RLConfig(
    steps=200,
    prompts_per_step=64,
    group_size=1,
    mini_batches=4,
    advantage="gae",
    estimator=EstimatorConfig(gamma=0.95),
    aggregation="token-mean",
    kl=KLConfig(place="reward", kind="k1", control="log-space", target=0.05),
    kl_beta=0.1,
    critic=CriticConfig(warmup_steps=10, optim=OptimConfig(lr=5e-6)),
    eval_every=50,
    save_every=25,
)


@dataclass(frozen=True)
class SimulPPOConfig(PtxOptions, RewardOptions, RecipeConfig):
    counts_steps = ("stage1", "stage2")
    held_out_count: int | None = 50
    """Streams held out of `data` where no `held_out` is given, drawn from every set and language in proportion."""
    source_language: str = ""
    """Code of the streams' language, where their file does not name it."""
    target_language: str = ""
    """Code of the language to translate into, where the streams' file does not name it or has several."""
    codec: str | None = None
    """A codec's folder or hub id: the interpreter also speaks. A model that writes text only is dualized for it."""
    chunks: ChunkConfig = ChunkConfig()
    """How streams are cut into chunks of audio."""
    max_seconds: float = 60.0
    """Longer streams are cut between units."""
    max_steps: int | None = None
    """Most steps of each stage, whatever `stage1.steps` and `stage2.steps` give; None: no limit."""
    sft_epochs: float = 0.0
    """Passes over the streams in the supervised start; 0: none."""
    lag: int = 0
    """The supervised interpreter says a unit 0 to `lag` chunks after it could be said. Lags that vary are learned far
    worse (docs/experiments.md)."""
    sft: SFTConfig = SFTConfig(batch_size=16, save_every=50)
    """The supervised start. Its steps follow from `sft_epochs`."""
    sft_optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")
    """The optimizer of the supervised start."""
    rewards: StreamRewards = StreamRewards()
    """Rewards of the stages. `reward_file` adds to both stages, standardised over the batch like the others."""
    stage1: RLConfig = PPO
    """PPO with the rewards of single turns."""
    stage2: RLConfig = replace(PPO, estimator=EstimatorConfig(gamma=1.0))
    """PPO with the rewards of single turns and of the whole stream, which would not outlive a discount per token."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The policy's optimizer in both stages."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=48, max_frames=250)
    """How the interpreter is sampled after each chunk; held-out streams are interpreted greedily."""


def tiny() -> SimulPPOConfig:
    critic = CriticConfig(warmup_steps=1)
    step = replace(PPO, steps=2, prompts_per_step=2, mini_batches=1, critic=critic, eval_every=1, save_every=1)
    return SimulPPOConfig(
        path="tiny",
        data=("bundled",),
        target_language="es",
        held_out_count=2,
        max_seconds=6.0,
        sft_epochs=1.0,
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1),
        stage1=step,
        stage2=replace(step, estimator=SimulPPOConfig.stage2.estimator),
        sampling=SamplingConfig(max_new_tokens=4, max_frames=8),
    )


def main(config: SimulPPOConfig, run: Run) -> None:
    if config.epochs != 1:
        raise ValueError("--epochs: the stages count steps; set --stage1.steps, --stage2.steps or --sft-epochs")
    config.rewards.refuse_unused(SimulPPOConfig.rewards)

    @cache
    def parts() -> tuple[AudioPolicy, CodecSpeechDecoder | None]:
        policy = policy_from(config)
        return policy, with_voice(policy, config.codec, config.seed) if config.codec else None

    def uses(stream: Stream) -> list[Sample | Example]:
        if not stream.units:
            what = f"stream {stream.id!r} has no units: without references there is nothing to reward"
            raise FieldError("units", f"{what}; give them, or leave it out")
        if not stream.reference.strip():
            what = f"stream {stream.id!r}: no unit has a translation, so there is nothing to reward"
            raise FieldError("units", f"{what}; give targets, or leave it out")
        sample = interpretation_sample(stream, config.chunks)
        return [sample, *([Example(sample)] if config.sft_epochs else [])]

    check = RowCheck(lambda: parts()[0], trained=uses, measured=lambda stream: uses(stream)[:1])
    train, held_out = read(config, check)
    policy, speech_decoder = parts()
    frame_rate = speech_decoder.codec.frame_rate if speech_decoder else None
    single, both = (with_user_reward(config, reward) for reward in config.rewards.of_stages(frame_rate))
    measure = partial(
        measure_streams,
        run,
        policy=policy,
        streams=held_out,
        chunks=config.chunks,
        sampling=config.sampling,
        reward=both,
        speech_decoder=speech_decoder,
        optimised=config.rewards.quality,
    )
    stages = config.stage1, config.stage2
    if config.sft_epochs:
        rng = random.Random(config.seed)
        examples = [Example(interpretation_sample(s, config.chunks, random_lags(s, rng, config.lag))) for s in train]
        training = replace(config, epochs=config.sft_epochs, max_steps=None).with_steps_for(config.sft, len(train))
        sft(policy, examples, run, config=training, optim=config.sft_optim, seed=config.seed)
    supervised = ptx_examples(config, config.ptx_data, *stages, check=check)
    measure("before")
    first, second = (replace(s, steps=min(s.steps, config.max_steps or s.steps)) for s in stages)
    train_stages(
        policy,
        train,
        held_out,
        run,
        (SimulStage("stage1", single, first, "after stage1"), SimulStage("stage2", both, second, "after")),
        chunks=config.chunks,
        optim=config.optim,
        sampling=config.sampling,
        measure=measure,
        seed=config.seed,
        supervised=supervised,
        speech_decoder=speech_decoder,
    )
    print(write_report(run.dir))


def read(config: SimulPPOConfig, check: RowCheck) -> tuple[list[Stream], list[Stream]]:
    """Return (training, held-out) streams, all with references."""

    def bundled(name: str) -> list[Stream]:
        if name != "bundled":
            raise ValueError(f"no bundled streams are called {name!r}; give bundled")
        return bundled_streams("train", config.target_language or "es", count=8, seconds=(3.0, config.max_seconds))

    languages: dict[str, Any] = {"source_language": config.source_language, "target_language": config.target_language}
    return read_split(config, bundled, read_streams, check=check, max_seconds=config.max_seconds, **languages)

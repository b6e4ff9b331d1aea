"""Segmented PPO for simultaneous interpretation, in two stages, on your own model and streams.

    audiorl train recipes/simul_ppo.py --out runs/simul --path Qwen/Qwen2.5-Omni-3B --model.device cuda \
        --model.dtype bfloat16 --data train.jsonl --held-out dev.jsonl --target-language es

After each chunk of audio the model listens on or writes a piece of translation. Stage 1 rewards single turns, stage 2
the latency and quality of the whole stream besides (Seed LiveInterpret 2.0, arXiv 2507.17527); the KL to the start is
held near its target by a controller in log space. A model that has never seen such streams starts with `--sft-epochs`
of supervised interpretation, `--lag` chunks late at most. Streams: audiorl's jsonl, RealSI, MuST-C's YAML, or pairs
with word times (`audiorl.simulst.formats`). `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from audiorl.config import CriticConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.evaluation.streams import measure_streams
from audiorl.models.examples import Example
from audiorl.recipe.common import RecipeConfig, policy_from, split_held_out, with_voice
from audiorl.recipe.stages import Stage, train_stages
from audiorl.report import write_report
from audiorl.rewards.similarity import Metric
from audiorl.rewards.simul import TimeCompliance, multi_turn, single_turn
from audiorl.run.folder import Run
from audiorl.simulst.bundled import bundled_streams
from audiorl.simulst.formats import read_streams
from audiorl.simulst.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.train.sft import sft

PPO = RLConfig(
    steps=200,
    prompts_per_step=64,
    group_size=1,
    mini_batches=4,
    advantage="gae",
    gamma=0.95,
    aggregation="token-mean",
    kl_in="reward",
    kl_kind="k1",
    kl_beta=0.1,
    kl_control="log-space",
    kl_target=0.05,
    critic=CriticConfig(warmup_steps=10, optim=OptimConfig(lr=5e-6)),
    eval_every=50,
    save_every=25,
)


@dataclass(frozen=True)
class RewardOptions:
    """What the two stages reward; see `audiorl.rewards.simul`."""

    quality: Metric = "chrf"
    time: bool = False
    """Time compliance: the translation should last as long as its reference does when spoken."""
    longest_wait: float = 1.0
    """Acceptable wait of a translation, in chunks."""
    weights: dict[str, float] = field(default_factory=dict)
    """Of rewards by name, where not 1."""


@dataclass(frozen=True)
class Config(RecipeConfig):
    held_out_count: int = 50
    source_language: str = ""
    """Of the streams, where their file does not say it."""
    target_language: str = ""
    codec: str | None = None
    """A codec's folder or hub id: the interpreter also speaks. A model that writes text only is dualized for it."""
    chunks: ChunkConfig = ChunkConfig()
    max_seconds: float = 60.0
    """Longer streams are cut between units."""
    sft_epochs: float = 0.0
    lag: int = 2
    """The supervised interpreter says a unit 0 to `lag` chunks after it could be said."""
    sft: SFTConfig = SFTConfig(batch_size=16, save_every=50)
    sft_optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")
    rewards: RewardOptions = RewardOptions()
    stage1: RLConfig = PPO
    stage2: RLConfig = PPO
    optim: OptimConfig = OptimConfig(lr=1e-6)
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=48, max_frames=250)


def tiny() -> Config:
    step = replace(
        PPO,
        steps=2,
        prompts_per_step=2,
        mini_batches=1,
        critic=CriticConfig(warmup_steps=1),
        eval_every=1,
        save_every=1,
    )
    return Config(
        path="tiny",
        data=("bundled",),
        target_language="es",
        held_out_count=2,
        max_seconds=6.0,
        sft_epochs=1.0,
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1),
        stage1=step,
        stage2=step,
        sampling=SamplingConfig(max_new_tokens=4, max_frames=8),
    )


def main(config: Config, run: Run) -> None:
    if not config.data:
        raise ValueError("name the streams to train on: --data FILE … (or --data bundled)")
    train, held_out = split_held_out(read(config.data, config), read(config.held_out, config), config.held_out_count)
    for stream in (*train, *held_out):
        if not stream.units:
            raise ValueError(f"stream {stream.id!r} has no units: without references there is nothing to reward")
    policy = policy_from(config)
    speech_decoder = with_voice(policy, config.codec, config.seed) if config.codec else None
    options = config.rewards
    time: bool | TimeCompliance = options.time
    if time and speech_decoder is not None:
        time = TimeCompliance(speech_decoder.codec.frame_rate)
    of_turns = {name: w for name, w in options.weights.items() if name not in ("latency", "stream_quality")}
    single = single_turn(options.quality, time, of_turns)
    both = multi_turn(options.quality, time, options.longest_wait, options.weights)

    def measured(name: str) -> None:
        measure_streams(run, name, policy, held_out, config.chunks, config.sampling, both, None, speech_decoder)

    if config.sft_epochs:
        rng = random.Random(config.seed)
        examples = [
            Example(interpretation_sample(s, config.chunks, [rng.randint(0, config.lag) for _ in s.units]))
            for s in train
        ]
        steps = max(round(config.sft_epochs * len(train) / config.sft.batch_size), 1)
        settings = replace(config.sft, steps=steps)
        sft(policy, examples, run, config=settings, optim=config.sft_optim, seed=config.seed)
    measured("before")
    train_stages(
        policy,
        train,
        held_out,
        run,
        (Stage("stage1", single, config.stage1, "after stage1"), Stage("stage2", both, config.stage2, "after")),
        chunks=config.chunks,
        optim=config.optim,
        sampling=config.sampling,
        measure=measured,
        seed=config.seed,
        speech_decoder=speech_decoder,
    )
    print(write_report(run.dir))


def read(paths: Sequence[str], config: Config) -> list[Stream]:
    streams: list[Stream] = []
    for path in paths:
        if path == "bundled":
            language = config.target_language or "es"
            streams += bundled_streams("train", language, count=8, seconds=(3.0, config.max_seconds))
            continue
        loaded = read_streams(
            path,
            source_language=config.source_language,
            target_language=config.target_language,
            audio_root=config.audio_root,
            on_error=config.on_error,
            check_audio=config.check_audio,
            max_seconds=config.max_seconds,
        )
        print(loaded.summary(), flush=True)
        if loaded.skipped:
            print(loaded.listing(), flush=True)
        streams += loaded.samples
    return streams


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

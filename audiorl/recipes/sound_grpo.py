"""Reinforcement learning of a flow on how its sounds score: Fast-GRPO, Flow-GRPO, MixGRPO, DiffusionNFT, CRPO or RAFT.

    audiorl train sound-grpo --out runs/sound-rl --path runs/sound \\
        --data scenes/train.jsonl --held-out scenes/test.jsonl --tagger tagger

The loop is that of every policy: groups of sounds for a prompt, advantages, clipped ratios, the exact KL to the start.
What is sampled are the noisy steps on the way to a sound (`--sampling.noisy branch|window|all`, `--sampling.noise
sde|cps|dance`); evaluation follows the ODE without noise. The reward sees each sound as `rollout.spoken_audio` and
what the row asks for as `rollout.sample.metadata`, such as `events`; without a file it is the sum of `--parts`.
Log-probs are means over all numbers of a sound, so that clips are tiny. Other losses by option: `--rl.loss guard`,
`gspo`, `reinforce`, …; with `--sampling.noisy none` those of sounds that the ODE made, `--rl.loss nft`, `crpo` or
`raft`. `--tiny` tries the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from audiorl.config import OptimConfig, RLConfig
from audiorl.config.flow import FlowSFTConfig
from audiorl.recipes._common import with_user_reward
from audiorl.recipes._sound import (
    SPEECH,
    TINY,
    SoundConfig,
    SoundRewards,
    begin_flow,
    flow_from,
    measure_sounds,
    probe_sounds,
    sound_reward,
    sounds_of,
)
from audiorl.recipes._speech import check_judge, tiny_part
from audiorl.report import write_report
from audiorl.rewards import Term, WeightedSum
from audiorl.rewards.asr import references_of
from audiorl.rewards.llm_judge import RecordedSpeech
from audiorl.run.folder import Run
from audiorl.tasks.tts.rewards import SignalToDistortion, SpeechRewards, speech_reward
from audiorl.train.rl.train import train_rl
from audiorl.types import Sample


@dataclass(frozen=True)
class SoundGRPOConfig(SoundRewards, SoundConfig):
    speech: SpeechRewards = SpeechRewards()
    """Rewards in the tasks enhance and tts, as in tts-grpo, in place of `parts`."""
    sdr_weight: float = 1.0
    """Weight of SI-SDR in the task enhance, as the share of the sound's power that is the clean recording."""
    rl: RLConfig = RLConfig(
        prompts_per_step=8,
        group_size=8,
        clip_low=1e-4,
        clip_high=1e-4,
        kl_beta=0.04,
        eval_every=50,
        save_every=25,
    )
    """Its steps follow from `epochs` and `max_steps`. The KL is the exact one, with n sampling steps n times that of
    Flow-GRPO's code; clips are of their ratios, 1e-5 with noise cps."""
    optim: OptimConfig = OptimConfig(lr=1e-4, warmup_steps=5)
    """The flow's optimizer."""


def tiny() -> SoundGRPOConfig:
    return SoundGRPOConfig(
        **TINY,
        parts=("clean",),
        speech=SpeechRewards(asr="tiny", speaker="tiny", metric="cer"),
        rl=RLConfig(prompts_per_step=2, group_size=2, eval_every=1, save_every=1),
    )


def speech_terms(config: SoundGRPOConfig, rate: int, samples: Sequence[Sample], folder: Path) -> tuple[Term, ...]:
    """Return the rewards of rows of speech: those of tts-grpo, and of `enhance` that of SI-SDR. Raises ValueError for
    rows that they cannot score."""
    options, task = config.speech, config.task
    check_judge(config.judge, options)
    for sample in samples:
        if options.asks_asr:
            references_of(sample, options.normalizer, config.language)
        if task == "enhance" and config.sdr_weight and "audio" not in sample.metadata:
            raise ValueError(f"sample {sample.id!r}: no clean audio to compare with; give it, or --sdr-weight 0")
    parts = {name: tiny_part(folder, name, getattr(options, name)) for name in ("asr", "speaker")}
    terms = speech_reward(replace(options, **parts), RecordedSpeech(rate), samples, config.language, "speech").terms
    sdr = Term("sdr", SignalToDistortion(RecordedSpeech(rate)), config.sdr_weight)
    return (sdr, *terms) if task == "enhance" and config.sdr_weight else terms


def main(config: SoundGRPOConfig, run: Run) -> None:
    if config.task in SPEECH and (config.tagger or config.weights or config.parts not in ((), tiny().parts)):
        raise ValueError(f"--tagger, --parts, --weights: {config.task} is rewarded by --speech.…; leave them out")
    policy = flow_from(config, run)
    reward = None if config.task in SPEECH else sound_reward(config, policy.model.config.channels, config.model.device)
    train, held_out = sounds_of(config, policy, learned=False, reward=reward)
    begin_flow(config, run, policy, train)
    if other := next((s.task for s in [*train, *held_out] if s.task != config.task), None):
        raise ValueError(
            f"--task {config.task}: a row asks for {other}, whose rewards differ; train one after the other"
        )
    if reward is None:
        terms = speech_terms(config, policy.audio.codec.sample_rate, [*train, *held_out], run.dir / "tiny")
        reward = with_user_reward(config, WeightedSum(terms))
    measured = FlowSFTConfig()
    measure_sounds(run, "before", policy, held_out, config, measured, reward)
    train_rl(
        policy,
        train,
        reward,
        run,
        config=config.with_steps_for(config.rl, len(train)),
        optim=config.optim,
        sampling=config.sampling,
        seed=config.seed,
        phase="grpo",
        evaluate=probe_sounds(policy, held_out, config, measured, reward),
    )
    measure_sounds(run, "after", policy, held_out, config, measured, reward)
    print(write_report(run.dir))

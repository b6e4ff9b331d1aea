"""Reinforcement learning of a model that speaks, on how its speech is understood, in whose voice and how long it is.

    audiorl train tts-grpo --out runs/tts --model.dtype bfloat16 --lora True \\
        --data LibriTTS/train.jsonl --held-out LibriTTS/test.jsonl --clone True --rewards.quality 0.3
    audiorl train tts-grpo --out runs/mine --path runs/voice/checkpoints/sft/step_001000 \\
        --codec runs/codec/codec --data texts.txt --voice anna.wav --voice-text "Good morning." \\
        --rewards.asr judges/whisper-tiny.en --rewards.speaker judges/speaker --judge judges/whisper-base

The model is Higgs Audio V2, or another that has learned to write codes (`tts_sft`). Texts come from a manifest, a
meta.lst or a file with one a line; voices to imitate stand in the prompt, as Higgs reads them. Each reward has its
weight, 0 leaves it out. The KL to the start is held near its target by a controller in log space. Before and after, a
judge that the reward does not use transcribes the spoken held-out texts. Other estimators by option: `--rl.advantage
rloo`, `--rl.advantage gae`, … (`RLConfig`). `--tiny` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from audiorl.config import KLConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.recipe import PtxOptions, RewardOptions
from audiorl.recipes._common import RowCheck, with_user_reward
from audiorl.recipes._speech import (
    TINY,
    Measurement,
    SpeechConfig,
    check_judge,
    ptx_utterances,
    speaking_policy,
    spoken_text,
    texts_of,
    tiny_part,
    with_tiny_parts,
)
from audiorl.report import write_report
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.tasks.tts.prompts import utterance_example, utterance_sample
from audiorl.tasks.tts.rewards import SpeechRewards, speech_reward
from audiorl.tasks.tts.texts import encode_corpus
from audiorl.train.rl.train import train_rl


@dataclass(frozen=True)
class TTSGRPOConfig(PtxOptions, RewardOptions, SpeechConfig):
    rewards: SpeechRewards = SpeechRewards()
    """Rewards, and the speech models that they ask."""
    rl: RLConfig = RLConfig(
        prompts_per_step=8,
        group_size=8,
        aggregation="token-mean",
        kl=KLConfig(kind="k3", control="log-space", target=0.1),
        kl_beta=0.04,
        eval_every=50,
        save_every=25,
    )
    """Its steps follow from `epochs` and `max_steps`. A frame's KL is that of its codes together."""
    optim: OptimConfig = OptimConfig(lr=1e-6, warmup_steps=5)
    """The policy's optimizer."""


def tiny() -> TTSGRPOConfig:
    return TTSGRPOConfig(
        **TINY,
        rewards=SpeechRewards(asr="tiny", speaker="tiny", metric="cer"),
        rl=RLConfig(prompts_per_step=2, group_size=2, kl=KLConfig(control="log-space"), eval_every=1, save_every=1),
        sampling=SamplingConfig(max_new_tokens=2, max_frames=12),
    )


def main(config: TTSGRPOConfig, run: Run) -> None:
    folder, sampling = run.dir / "tiny", config.sampling
    policy_of = cache(lambda: speaking_policy(with_tiny_parts(config, folder)))
    understood = config.rewards.normalizer if config.rewards.asks_asr else None
    check = RowCheck(
        policy_of,
        new_tokens=sampling.max_frames,
        eval_tokens=sampling.max_frames,
        trained=lambda u: [spoken_text(u, config, understood)],
        measured=lambda u: [spoken_text(u, config, None if config.judge is None else config.normalizer)],
    )
    train, held_out = texts_of(config, check)
    samples = [utterance_sample(u, config.tags) for u in train]
    config = with_tiny_parts(config, folder)
    asr, speaker = config.rewards.asr, config.rewards.speaker
    options = replace(config.rewards, asr=tiny_part(folder, "asr", asr), speaker=tiny_part(folder, "speaker", speaker))
    check_judge(config.judge, options)
    supervised = ptx_utterances(config, config.ptx_data, config.rl, check)
    policy = policy_of()
    if supervised:
        encode_corpus(policy, [clip for u in supervised for clip in (u.recording, u.prompt) if clip], run.dir / "codes")
    speech_decoder = CodecSpeechDecoder.of(policy)
    reward = speech_reward(options, speech_decoder, samples, config.language)
    measure = Measurement(config, run, policy, train, held_out)
    measure("before")
    train_rl(
        policy,
        samples,
        with_user_reward(config, reward),
        run,
        config=config.with_steps_for(config.rl, len(samples)),
        optim=config.optim,
        sampling=config.sampling,
        seed=config.seed,
        phase="grpo",
        evaluate=measure.probe(),
        supervised=[utterance_example(u, config.tags) for u in supervised],
        speech_decoder=speech_decoder,
    )
    measure("after")
    print(write_report(run.dir))

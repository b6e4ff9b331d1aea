"""A small model learns to speak: codec, DualFFN, and GRPO on what a recogniser understands, on real human speech.

    codec    our tokenizer, on a person's recordings and robot voices
    ear      a recogniser of characters on Whisper tiny's encoder: the judge that the reward asks
    sft      a text decoder of 5 M parameters, taught to write codes: robot voices say all texts, a person says those of
             the training split
    grpo     the person's voice says the texts of the practice split, which only robots have said; the reward is the
             share of characters that the ear understands, with a little for the right length

Before and after, the person's voice says the texts of the test split, which only robots have said either, and a judge
that took no part in training (`--judge`, another recogniser) writes down what it understands.

    audiorl train recipes/tts_quickstart.py --out runs/tts
    audiorl train recipes/tts_quickstart.py --judge judges/whisper-base --seed 1 --out runs/tts-1
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soxr
import torch

from audiorl.config import OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.data.corpus import Utterance, bundled_speech, split_by_key
from audiorl.data.recordings import Recordings
from audiorl.data.synth import Speech, synthesize_many, voices
from audiorl.judges import Recogniser, load_recogniser
from audiorl.judges.character_ctc import CharacterCTC, plain, train_character_ctc
from audiorl.judges.character_ctc import load as load_ear
from audiorl.models.branch import dualize
from audiorl.models.text import tiny as tiny_text
from audiorl.report import write_report
from audiorl.rewards import WeightedSum
from audiorl.rewards.speech import Duration, Finished, Intelligibility, Listener
from audiorl.rollout.voice import CodecVoice
from audiorl.simulst.bundled import spoken as spoken_part
from audiorl.simulst.bundled import trimmed
from audiorl.train.codec import CodecConfig, quick_training, small_tokenizer, train_codec
from audiorl.train.loop import rl
from audiorl.train.run import Run
from audiorl.train.sft import sft
from audiorl.tts.evaluate import measure_speech, probe_speech
from audiorl.tts.prompts import spoken, to_speak
from audiorl.types import AudioClip, Sample
from tokenizers_audio import AudioTokenizer
from tokenizers_audio.audio import prepare
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer
from tokenizers_audio.unified.train import TrainConfig

RATE = 16_000
PERSON = "SPEAKER0"


@dataclass(frozen=True)
class Config:
    seed: int = 0
    max_seconds: float = 2.0
    """Longest recording to learn from or to repeat."""
    held_out: float = 0.2
    """Share of the texts in the test split."""
    practice: float = 0.25
    """Share of the others in the practice split."""
    voices: int = 4
    """Robot voices; every text is said by each of them."""
    test_texts: int = 80
    threads: int = 2
    ear_steps: int = 600
    judge: str = "pocketsphinx"
    """Recogniser for the measurements, which the reward never asks: a folder, or `pocketsphinx`."""
    tokenizer: UnifiedConfig = small_tokenizer(4, 256)
    """0.8 kbit/s: a small model learns to write few codes sooner."""
    codec: CodecConfig = quick_training(1500, codebook_dropout=0.0)
    hidden: int = 256
    layers: int = 4
    sft: SFTConfig = SFTConfig(steps=900, batch_size=24, micro_batch_tokens=4000, save_every=100)
    sft_optim: OptimConfig = OptimConfig(lr=1.5e-3, warmup_steps=50, schedule="cosine")
    grpo: RLConfig = RLConfig(
        steps=60,
        prompts_per_step=8,
        group_size=8,
        aggregation="token-mean",
        kl_in="loss",
        kl_kind="k3",
        kl_beta=0.05,
        kl_control="log-space",
        kl_target=0.2,
        micro_batch_tokens=6000,
        eval_every=20,
        save_every=10,
    )
    optim: OptimConfig = OptimConfig(lr=1e-4, warmup_steps=3)
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=8, max_frames=64)


def tiny() -> Config:
    return Config(
        max_seconds=0.8,
        voices=1,
        test_texts=2,
        ear_steps=2,
        judge="ear",
        tokenizer=UnifiedConfig(
            num_codebooks=2,
            codebook_size=16,
            codebook_dim=16,
            spectrum_hop=240,
            phases="peaks",
            strides=(2, 2),
            channels=(16, 16, 16),
            dilations=(1,),
            acoustic_dim=16,
            semantic_dim=16,
        ),
        codec=CodecConfig(
            batch_size=2,
            crop_seconds=0.4,
            save_every=2,
            train=TrainConfig(steps=3, start_vectors=40, adversarial_after=None),
        ),
        hidden=64,
        layers=2,
        sft=SFTConfig(steps=2, batch_size=2, save_every=1),
        grpo=RLConfig(steps=2, prompts_per_step=2, group_size=2, eval_every=1, save_every=1),
        sampling=SamplingConfig(max_new_tokens=2, max_frames=12),
    )


def main(config: Config, run: Run) -> None:
    torch.set_num_threads(config.threads)
    train, practice, test = splits(config)
    people = [(u.text, trimmed(u.clip.load(RATE))) for u in train]
    robots = robot_voices([u.text for u in (*train, *practice, *test)], config)
    codec = trained_codec(run, [wav for _, wav in people] + [wav for _, _, wav in robots], config)
    ear = trained_ear(run, people + [(text, wav) for text, _, wav in robots], codec, config)
    judge: Recogniser = ear if config.judge == "ear" else load_recogniser(config.judge, "en")

    letters = tiny_text(hidden=config.hidden, layers=config.layers, vocab_size=256, seed=config.seed)
    policy = dualize(letters, codec.num_codebooks, codec.codebook_size, config.seed)
    policy.set_codec(codec)
    recorded = [spoken(u.id, plain(u.text), spoken_part(u), speaker=PERSON) for u in train]
    synthetic = [
        spoken(f"{voice}/{number}", plain(text), AudioClip(array=wav, sample_rate=RATE), speaker=voice)
        for number, (text, voice, wav) in enumerate(robots)
    ]
    sft(policy, recorded + synthetic, run, config=config.sft, optim=config.sft_optim, seed=config.seed)

    held_out = [to_speak(u.id, plain(u.text), speaker=PERSON) for u in test][: config.test_texts]
    measure_speech(run, "before", policy, held_out, config.sampling, judge)
    voice = CodecVoice.of(policy)
    listener = Listener(voice, recogniser=ear)
    reward = WeightedSum.of(
        understood=Intelligibility(listener, "cer"),
        length=(Duration(listener), 0.2),
        finished=(Finished(listener), 0.1),
    )
    rl(
        policy,
        prompts(practice, robots),
        reward,
        run,
        config=config.grpo,
        optim=config.optim,
        sampling=config.sampling,
        seed=config.seed,
        phase="grpo",
        evaluate=probe_speech(policy, held_out, config.sampling, judge),
        voice=voice,
    )
    measure_speech(run, "after", policy, held_out, config.sampling, judge)
    print(write_report(run.dir))


def splits(config: Config) -> tuple[list[Utterance], list[Utterance], list[Utterance]]:
    """(train, practice, test): English recordings with letters to say; no text is in two of them."""
    usable = [u for u in bundled_speech(("en",), max_seconds=config.max_seconds) if len(plain(u.text)) > 1]
    rest, test = split_by_key(usable, config.held_out, seed=0)
    train, practice = split_by_key(rest, config.practice, seed=1)
    return train, practice, test


def robot_voices(said: Sequence[str], config: Config) -> list[tuple[str, str, np.ndarray]]:
    """(text, name of the voice, waveform at RATE Hz): every text said by every voice."""
    rng = random.Random(config.seed)
    chosen = rng.sample(voices("en"), config.voices)
    asked = [
        (f"ROBOT{k}", Speech(text, "en", voice, 150 + 10 * k, 30 + 15 * k))
        for text in said
        for k, voice in enumerate(chosen)
    ]
    waves = synthesize_many([speech for _, speech in asked], workers=config.threads)
    return [(s.text, name, trimmed(np.asarray(wav))) for (name, s), wav in zip(asked, waves, strict=True)]


def prompts(practice: Sequence[Utterance], robots: Sequence[tuple[str, str, np.ndarray]]) -> list[Sample]:
    """Each text for the person's voice, to last as long as it does when robots say it."""
    seconds: dict[str, list[float]] = {}
    for text, _, wav in robots:
        seconds.setdefault(text, []).append(len(wav) / RATE)
    return [
        to_speak(u.id, plain(u.text), speaker=PERSON, metadata={"reference_seconds": float(np.mean(seconds[u.text]))})
        for u in practice
    ]


def trained_codec(run: Run, waves: Sequence[np.ndarray], config: Config) -> UnifiedTokenizer:
    """The tokenizer, also saved as the folder codec/ of the run."""
    torch.manual_seed(config.seed)
    codec = UnifiedTokenizer(config.tokenizer)
    clips = tuple(AudioClip(array=wav, sample_rate=RATE) for wav in waves)
    recordings = Recordings(clips, tuple(len(wav) / RATE for wav in waves))
    train_codec(codec, recordings, run, config=config.codec, seed=config.seed)
    codec.save(run.dir / "codec")
    return codec


def trained_ear(
    run: Run, speech: Sequence[tuple[str, np.ndarray]], codec: AudioTokenizer, config: Config
) -> CharacterCTC:
    """The reward's recogniser, which also knows how the codec changes voices."""
    folder = run.dir / "ear"
    if not run.finished("ear"):
        fitting = [(t, w) for t, w in speech if len(w) / RATE > len(plain(t)) / 25]
        judge = train_character_ctc(
            [through(codec, w) if i % 2 else w for i, (_, w) in enumerate(fitting)],
            [t for t, _ in fitting],
            RATE,
            steps=config.ear_steps,
            seed=config.seed,
        )
        judge.save(folder)
        run.finish("ear", {"steps": config.ear_steps, "clips": len(fitting)})
    return load_ear(folder)


def through(codec: AudioTokenizer, wav: np.ndarray) -> np.ndarray:
    """[T] at RATE Hz, encoded and decoded."""
    out = codec.decode(codec.encode(prepare(wav, RATE, codec)))[0].numpy()
    return soxr.resample(out, codec.sample_rate, RATE)[: len(wav)]


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)

"""A small model learns to speak: codec, DualFFN, and GRPO on what a recogniser understands, on real human speech.

A text is one or two of some eighty words (`WORDS`) of which there is a person's recording. Its speech is those
recordings, one after the other. Four phases:

    codec        our tokenizer, trained on the speech of the training split
    recogniser   a recogniser of characters on Whisper tiny's encoder, which the reward asks
    sft          a text decoder of 5 M parameters learns to write the codes of the training split
    grpo         it says the texts of the practice split, each once, without recordings of them. The reward is the share
                 of characters that the recogniser understands, credited word by word, and a little for the right
                 length, and on request for the usual prosody. Only the norms' weights are trained

With `--corpus` the recordings are of another folder, and there may be several speakers; each text has one of them. With
`--clone` two other words of that speaker stand in the prompt, so that the model learns to say a text in the voice that
it is given; without, a text can be said in more than one way, and no prompt tells in which.

Before and after GRPO it says the texts of the test split, with `--unseen-speakers` in voices that no phase was trained
on, and another recogniser (`--judge`), which took no part in training, transcribes them. No text is in two splits.
Sampling is the same in training and when it is measured, and is the best that was found for such a start: what GRPO
adds to it is not sharpening.

    audiorl train tts-quickstart --out runs/tts
    audiorl train tts-quickstart --judge judges/whisper-base --seed 1 --out runs/tts-1
    audiorl train tts-quickstart --prosody-weight 0.3 --out runs/lively
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import perm
from typing import Any, Literal

import numpy as np
import soxr
import torch

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig, require_ranges, torch_device
from audiorl.config.checks import require
from audiorl.data.corpus import bundled_speech, corpus
from audiorl.data.recordings import Recordings
from audiorl.data.silence import trimmed
from audiorl.eval._common import Judges
from audiorl.eval._speech import measure_speech, probe_speech
from audiorl.models import dualize, load_policy
from audiorl.models.examples import Example
from audiorl.models.families import talker
from audiorl.models.families.text import tiny as tiny_text
from audiorl.protocols import Reward
from audiorl.recipes._common import passes_on_cpu
from audiorl.report import write_report
from audiorl.rewards import WeightedSum
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.speech_models import Recogniser, load_recogniser
from audiorl.speech_models.character_ctc import Features, plain
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.prompts import speech_sample
from audiorl.tasks.tts.prosody import ProsodyRange, prosody_norm
from audiorl.tasks.tts.rewards import Duration, Finished, Intelligibility, WordIntelligibility
from audiorl.train.codec import CodecConfig, quick_training, small_tokenizer, train_codec
from audiorl.train.rl.train import train_rl
from audiorl.train.sft import sft
from audiorl.types import Sample
from corpora.models.recogniser import train_character_ctc
from tokenizers_audio import AudioTokenizer
from tokenizers_audio.audio import prepare
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer
from tokenizers_audio.unified.train import TrainConfig

RATE = 16_000
GAP = 0.06
"""Seconds of silence between words."""
WORDS = (  # noqa: SIM905
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec "
    "romeo sierra tango uniform victor whiskey yankee zulu january february march april june july august "
    "september october december monday tuesday wednesday thursday friday saturday sunday hello goodbye family "
    "friends messages password location today tomorrow yesterday extension transfer urgent calling cancelled "
    "enabled disabled activated paused removed received saved console agent local record time work minutes hours "
    "added star space playback"
).split()
Words = tuple[str, ...]
Voices = Mapping[str, Mapping[str, np.ndarray]]
"""Recordings [T] at RATE Hz by speaker and word."""


@dataclass(frozen=True)
class TTSQuickstartConfig:
    seed: int = 0
    """Seed of sampling, of the order of the data, and of new weights."""
    corpus: str = ""
    """A folder of `audiorl data build` or `tools/build_voices.py` with English recordings; empty: the bundled ones."""
    talker: bool = False
    """Train the talker of a small random Qwen3-Omni, in RUN/omni, in place of a dualized decoder: its frames have no
    delay, and a code predictor writes all codebooks but the first."""
    clone: bool = False
    """Put two other words of the text's speaker, with their recordings, in the prompt."""
    unseen_speakers: tuple[str, ...] = ()
    """Speakers of the corpus that no phase is trained on, in whose voices the test texts are said. Needs `clone`."""
    words: int = len(WORDS)
    """How many of WORDS are used."""
    most_words: int = 2
    """Most words of a text."""
    train_texts: int = 4000
    """Texts of the training split, at least one for each word."""
    voices_per_text: int = 1
    """In how many of the speakers' voices the decoder learns to say each text."""
    practice_texts: int = 1400
    """Texts of the practice split: more than GRPO says, since a policy that meets a text again learns the text."""
    test_texts: int = 160
    """Texts that are measured and not trained on."""
    threads: int = 2
    """CPU threads of torch."""
    recogniser_steps: int = 600
    """Training steps of the reward's recogniser."""
    recogniser_texts: int = 1500
    """How many of the training texts the reward's recogniser learns from."""
    recogniser_speakers: tuple[str, ...] = ()
    """Speakers that it learns from; () are all. A recogniser of one way of speaking prefers that."""
    recogniser_features: Features = "whisper"
    """Its input: frames of Whisper tiny's encoder, or log-mel frames, which bind it to the speech it has met."""
    judge: str = "pocketsphinx"
    """Recogniser for the measurements, which the reward never asks: a folder, `pocketsphinx`, or `recogniser` for the
    reward's own, to try the recipe."""
    tokenizer: UnifiedConfig = small_tokenizer(4, 256)
    """0.8 kbit/s: a small model learns to write few codes sooner."""
    codec: CodecConfig = quick_training(1500, codebook_dropout=0.0)
    """Training of the tokenizer."""
    hidden: int = 256
    """Width of the decoder."""
    layers: int = 4
    """Layers of the decoder."""
    sft: SFTConfig = SFTConfig(steps=500, batch_size=32, save_every=100)
    """Supervised training on the codes."""
    sft_optim: OptimConfig = OptimConfig(lr=1.5e-3, warmup_steps=50, schedule="cosine")
    """The optimizer of supervised training."""
    only: tuple[str, ...] = ("norm",)
    """Regular expressions of the weights that GRPO trains. 256 rewards a step say little about millions of weights, and
    more about the scales of the norms."""
    credit: Literal["text", "word"] = "word"
    """Where the reward of being understood goes: to the text (then set `--rl.advantage grpo`), or each word on
    the frames that say it."""
    rl: RLConfig = RLConfig(
        steps=60,
        prompts_per_step=16,
        group_size=16,
        advantage="step-index",
        aggregation="token-mean",
        kl_beta=0.005,
        save_every=10,
    )
    """GRPO on the practice split."""
    length_weight: float = 0.2
    """Weight of the right length, next to the share of characters that is understood, which has weight 1."""
    prosody_weight: float = 0.0
    """Weight of prosody as in the recordings of the training split: ranges of pitch and level, and pauses."""
    optim: OptimConfig = OptimConfig(lr=0.01, betas=(0.9, 0.95), warmup_steps=3)
    """The optimizer of GRPO."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.4, audio_top_p=0.9, max_new_tokens=8, max_frames=90)
    """How texts are said, in training and when they are measured."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("length_weight", "prosody_weight"))
        require(self.most_words >= 2, "most_words", self.most_words, "2 or more")
        if self.talker and self.clone:
            raise ValueError("--clone: a talker has voices of its own and hears no prompt; leave it or --talker out")
        if self.unseen_speakers and not self.clone:
            raise ValueError("--unseen-speakers: without --clone no prompt says whose voice is wanted")
        if self.clone and self.words < 2 * self.most_words + 2:
            raise ValueError(
                f"--clone: {self.words} words are too few to choose two that a text has not; raise --words"
            )


def tiny() -> TTSQuickstartConfig:
    return TTSQuickstartConfig(
        words=6,
        train_texts=8,
        practice_texts=4,
        test_texts=2,
        recogniser_steps=2,
        judge="recogniser",
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
        rl=RLConfig(steps=2, prompts_per_step=2, group_size=2, advantage="step-index", eval_every=1, save_every=1),
        sampling=SamplingConfig(max_new_tokens=2, max_frames=12),
    )


def main(config: TTSQuickstartConfig, run: Run) -> None:
    torch.set_num_threads(config.threads)
    voices, test_voices = voices_of(config)
    if unknown := [name for name in config.recogniser_speakers if name not in voices]:
        raise ValueError(f"--recogniser-speakers: no speaker {unknown[0]!r}, only {', '.join(voices)}")
    familiar = {name: voices[name] for name in config.recogniser_speakers or voices}
    train, practice, test = splits(config)
    speech = [(" ".join(words), said(words, voices)) for words in train]
    codec = trained_codec(run, [wav for _, wav in speech], config)
    known_speech = [(" ".join(words), said(words, familiar)) for words in train[: config.recogniser_texts]]
    recogniser = trained_recogniser(run, known_speech, codec, config)
    judge = recogniser if config.judge == "recogniser" else load_recogniser(config.judge, "en")

    sizes: dict[str, Any] = dict(hidden=config.hidden, layers=config.layers, vocab_size=600, seed=config.seed)
    if config.talker:
        codes: dict[str, Any] = dict(codebooks=codec.num_codebooks, codebook_size=codec.codebook_size)
        talker.tiny(run.dir / "omni", [t for t, _ in speech], generation="qwen3", **codes, **sizes)
        policy = load_policy(run.dir / "omni", talker=True)
    else:
        writer = tiny_text([t for t, _ in speech], **sizes)
        policy = dualize(writer, codec.num_codebooks, codec.codebook_size, config.seed)
        policy.model.to(torch_device(policy.config.device))
    config = passes_on_cpu(config, policy.device, sft=4000, rl=6000)
    policy.set_codec(codec)
    examples = supervised(train, voices, config.clone, config.voices_per_text)
    policy.clip_codes.encode_all(clip for e in examples for clip in (*e.sample.audio, *e.speech))
    sft(policy, examples, run, config=config.sft, optim=config.sft_optim, seed=config.seed)

    held_out = prompts(test, test_voices, config.clone)
    outside = config.judge != "recogniser"
    measure_speech(run, "before", policy, held_out, config.sampling, Judges(judge), outside=outside)
    policy = load_policy(run.checkpoint("sft"), ModelConfig(only=config.only), codec)
    speech_decoder = CodecSpeechDecoder.of(policy)
    reward = reward_of(config, SpeechModels(speech_decoder, recogniser=recogniser), [wav for _, wav in speech])
    train_rl(
        policy,
        [prompt(words, voices, config.clone) for words in practice],
        reward,
        run,
        config=config.rl,
        optim=config.optim,
        sampling=config.sampling,
        seed=config.seed,
        phase="grpo",
        evaluate=probe_speech(policy, held_out, config.sampling, Judges(judge)),
        supervised=examples,
        speech_decoder=speech_decoder,
    )
    measure_speech(run, "after", policy, held_out, config.sampling, Judges(judge), outside=outside)
    print(write_report(run.dir))


def reward_of(config: TTSQuickstartConfig, judges: SpeechModels, speech: Sequence[np.ndarray] = ()) -> WeightedSum:
    """Return the reward of GRPO. speech: recordings [T] at RATE Hz whose prosody is the usual one, for
    `prosody_weight`."""
    understood = WordIntelligibility(judges) if config.credit == "word" else Intelligibility(judges, "cer")
    rewards: dict[str, tuple[Reward, float]] = {
        "understood": (understood, 1.0),
        "length": (Duration(judges), config.length_weight),
        "finished": (Finished(judges), 0.1),
    }
    if config.prosody_weight:
        usual = prosody_norm([AudioClip(array=wav, sample_rate=RATE) for wav in speech], judges.sample_rate)
        rewards["prosody"] = (ProsodyRange(judges, usual), config.prosody_weight)
    return WeightedSum.of(**rewards)


def voices_of(config: TTSQuickstartConfig) -> tuple[Voices, Voices]:
    """Return the speakers to train on, and those in whose voices the test texts are said: the unseen, or else the
    same."""
    voices = recordings(config)
    if unknown := [name for name in config.unseen_speakers if name not in voices]:
        raise ValueError(f"--unseen-speakers: no speaker {unknown[0]!r}, only {', '.join(voices)}")
    training_voices = {name: recorded for name, recorded in voices.items() if name not in config.unseen_speakers}
    if not training_voices:
        raise ValueError("--unseen-speakers: names every speaker; leave one to train on")
    if not 1 <= config.voices_per_text <= len(training_voices):
        raise ValueError(
            f"--voices-per-text: {config.voices_per_text}, but there are {len(training_voices)} speakers to train on"
        )
    test_voices = {name: voices[name] for name in config.unseen_speakers}
    return training_voices, test_voices or training_voices


def recordings(config: TTSQuickstartConfig) -> Voices:
    """Return the first recording of each word by each speaker. Raises ValueError for a speaker who lacks a word."""
    speech = corpus(config.corpus, ("en",), max_seconds=2.0) if config.corpus else bundled_speech(("en",), 0.0, 2.0)
    voices: dict[str, dict[str, np.ndarray]] = {}
    for u in speech:
        if plain(u.text) in WORDS[: config.words] and plain(u.text) not in voices.setdefault(u.speaker, {}):
            voices[u.speaker][plain(u.text)] = trimmed(u.clip.load(RATE))
    for speaker, recorded in voices.items():
        if missing := [word for word in WORDS[: config.words] if word not in recorded]:
            raise ValueError(f"--corpus {config.corpus}: {speaker} does not say {', '.join(missing)}")
    return voices


def splits(config: TTSQuickstartConfig) -> tuple[list[Words], list[Words], list[Words]]:
    """(train, practice, test): texts of 1 to `most_words` different words, none twice; single words are in train."""
    rng = random.Random(config.seed)
    vocabulary = WORDS[: config.words]
    texts: dict[Words, None] = dict.fromkeys((word,) for word in vocabulary)
    wanted = max(config.train_texts, len(vocabulary)) + config.practice_texts + config.test_texts
    possible = sum(perm(len(vocabulary), count) for count in range(1, config.most_words + 1))
    if wanted > possible:
        raise ValueError(
            f"--words {len(vocabulary)}, --most-words {config.most_words}: make {possible} texts, {wanted} are wanted; "
            "raise them, or lower --train-texts, --practice-texts or --test-texts"
        )
    while len(texts) < wanted:
        texts[tuple(rng.sample(vocabulary, rng.randint(2, config.most_words)))] = None
    drawn_texts = list(texts)
    first, last = len(drawn_texts) - config.practice_texts - config.test_texts, len(drawn_texts) - config.test_texts
    return drawn_texts[:first], drawn_texts[first:last], drawn_texts[last:]


def speakers_of(words: Words, voices: Voices, count: int = 1) -> list[str]:
    """Return the speakers that a text is given to: `count` different ones, the first of whom says it where one does."""
    names = sorted(voices)
    first = zlib.crc32(" ".join(words).encode())
    return [names[(first + i * len(names) // count) % len(names)] for i in range(count)]


def said(words: Words, voices: Voices) -> np.ndarray:
    """Return the recordings of the words one after the other, [T] at RATE Hz, by the speaker that the text is given
    to."""
    return joined(words, voices[speakers_of(words, voices)[0]])


def joined(words: Words, recorded: Mapping[str, np.ndarray]) -> np.ndarray:
    gap = np.zeros(round(GAP * RATE), np.float32)
    return np.concatenate([part for word in words for part in (recorded[word], gap)][:-1])


def voice_prompt(words: Words, recorded: Mapping[str, np.ndarray]) -> tuple[str, AudioClip]:
    """Two words that the text has not, and their recording."""
    vocabulary = sorted(recorded)
    pairs = list(zip(vocabulary[::2], vocabulary[1::2], strict=False))
    first = zlib.crc32(f"voice of {' '.join(words)}".encode()) % len(pairs)
    other = next(pair for pair in (*pairs[first:], *pairs[:first]) if not {*pair} & {*words})
    return " ".join(other), AudioClip(array=joined(other, recorded), sample_rate=RATE)


def prompt(
    words: Words, voices: Voices, clone: bool = False, with_recording: bool = False, speaker: str = ""
) -> Sample:
    """Return the text to say, with `clone` after a recording of the voice to say it in; how long it lasts when the
    speaker says it and, to be compared with, that recording. speaker: "" is the one that the text is given to, any
    other stands in the sample's id."""
    recorded = voices[speaker or speakers_of(words, voices)[0]]
    text, wav = " ".join(words), joined(words, recorded)
    id = f"{text} / {speaker}" if speaker else text
    about: dict[str, object] = {"reference_seconds": len(wav) / RATE}
    if with_recording:
        about["reference_audio"] = AudioClip(array=wav, sample_rate=RATE)
    return speech_sample(id, text, voice=voice_prompt(words, recorded) if clone else None, metadata=about)


def prompts(texts: Sequence[Words], voices: Voices, clone: bool = False, voices_per_text: int = 1) -> list[Sample]:
    """Return each text in so many voices, with the recording of it. Where there are several, ids have the speaker,
    too."""
    return [
        prompt(words, voices, clone, with_recording=True, speaker=speaker)
        for words in texts
        for speaker in (speakers_of(words, voices, voices_per_text) if voices_per_text > 1 else ("",))
    ]


def supervised(texts: Sequence[Words], voices: Voices, clone: bool = False, voices_per_text: int = 1) -> list[Example]:
    """Texts with their recordings, as the model learns to say them."""
    recorded = prompts(texts, voices, clone, voices_per_text)
    return [Example(p, speech=(p.metadata["reference_audio"],)) for p in recorded]


def trained_codec(run: Run, waves: Sequence[np.ndarray], config: TTSQuickstartConfig) -> UnifiedTokenizer:
    """Return the tokenizer, also saved as the folder codec/ of the run."""
    torch.manual_seed(config.seed)
    codec = UnifiedTokenizer(config.tokenizer).to(torch_device("auto"))
    clips = tuple(AudioClip(array=wav, sample_rate=RATE) for wav in waves)
    recordings = Recordings(clips, tuple(len(wav) / RATE for wav in waves))
    train_codec(codec, recordings, run, config=config.codec, seed=config.seed)
    codec.save(run.dir / "codec")
    return codec


def trained_recogniser(
    run: Run, speech: Sequence[tuple[str, np.ndarray]], codec: AudioTokenizer, config: TTSQuickstartConfig
) -> Recogniser:
    """Return the reward's recogniser, which also knows how the codec changes the voice."""
    folder = run.dir / "recogniser"
    if not run.finished("recogniser"):
        fitting = [(t, w) for t, w in speech if len(w) / RATE > len(plain(t)) / 25]
        judge = train_character_ctc(
            [through(codec, w) if i % 2 else w for i, (_, w) in enumerate(fitting)],
            [t for t, _ in fitting],
            RATE,
            steps=config.recogniser_steps,
            seed=config.seed,
            features=config.recogniser_features,
        )
        judge.save(folder)
        run.finish("recogniser", {"steps": config.recogniser_steps, "clips": len(fitting)})
    return load_recogniser(folder)


def through(codec: AudioTokenizer, wav: np.ndarray) -> np.ndarray:
    """[T] at RATE Hz, encoded and decoded."""
    out = codec.decode(codec.encode(prepare(wav, RATE, codec)))[0].cpu().numpy()
    return soxr.resample(out, codec.sample_rate, RATE)[: len(wav)]

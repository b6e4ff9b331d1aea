"""Parts that recipes of interpretation share: the stages of segmented PPO, and the streams of `simul-quickstart`.

Streams are said by people and synthetic voices, in training and by unseen speakers. `Prompts` lays out whole prompts of
the recordings; synthetic voices say all of them, those that are measured too. `Announcements` composes numbers, dates
and times of single words; nobody says in training what is measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.data.augment import augment
from audiorl.data.corpus import Utterance, bundled_speech, corpus
from audiorl.data.silence import trimmed
from audiorl.data.synth import Speech, synthesize_many, voices
from audiorl.eval._streams import probe_streams
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.rewards import StandardisedSum, WeightedSum
from audiorl.run.folder import Run
from audiorl.tasks.simul import announcements
from audiorl.tasks.simul.announcements import Augment, WordVoice, announcement_streams, bundled_words, voices_of, words
from audiorl.tasks.simul.bundled import Speak, Split, bundled_streams, prompt_pairs
from audiorl.tasks.simul.quality import Metric
from audiorl.tasks.simul.rewards import TimeCompliance, Waits, hpo, multi_turn, single_turn
from audiorl.tasks.simul.streams import SPEAKER_MARK, ChunkConfig, Stream, interpretation_sample, with_speaker_marks
from audiorl.train.rl.train import train_rl

StageName = Literal["stage1", "stage2"]


@dataclass(frozen=True)
class StreamRewards:
    """Rewards of the two stages; see `audiorl.tasks.simul.rewards`."""

    quality: Metric = "word_f1"
    """How a translation is compared with its reference. `word_f1` and `ter` weigh what is missing and what is too much
    alike; chrF weighs what is missing more."""
    time: bool = False
    """Time compliance: the translation should last as long as its reference does when spoken."""
    longest_wait: float = 1.0
    """Acceptable wait of a translation, in chunks."""
    waits: Waits = "silence"
    """How waits are counted: the silent chunks before a translation (the paper's), or with `available` only those since
    something could be said."""
    hinge: float | None = None
    """Reward speed only where a sentence's quality is at least this, in [0, 1], as HPO does (arXiv 2604.21045); None:
    the penalty on waits, whatever the quality."""
    guards: bool = True
    """Penalise output that is longer or shorter than the reference, or that repeats itself: parts `length` and
    `repetition`. Without them and with chrF as `quality` it pays to say more than the reference."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of rewards by name; 1 for those that are not named."""
    hpo: bool = False
    """Reward both stages by HPO instead: the quality of the stream, and promptness above `hinge` (0.5 where
    it is None). It wants the advantage `gdpo`, several rollouts of a stream, and the KL in the loss."""

    def of_stages(
        self, frame_rate: float | None = None
    ) -> tuple[StandardisedSum, StandardisedSum] | tuple[WeightedSum, WeightedSum]:
        """Return the rewards of stage 1 and of stage 2; `frame_rate` of a codec, where the policy speaks."""
        if self.hpo:
            reward = hpo(self.quality, 0.5 if self.hinge is None else self.hinge)
            return reward, reward
        time: bool | TimeCompliance = self.time
        if time and frame_rate is not None:
            time = TimeCompliance(frame_rate)
        of_turns = {name: w for name, w in self.weights.items() if name not in ("latency", "stream_quality")}
        single = single_turn(self.quality, time, of_turns, guards=self.guards)
        both = multi_turn(
            self.quality,
            time,
            self.longest_wait,
            self.weights,
            waits=self.waits,
            guards=self.guards,
            hinge=self.hinge,
        )
        return single, both


@dataclass(frozen=True)
class SimulStage:
    """A phase of the run, its reward, and the name of the evaluation after it."""

    name: StageName
    reward: Reward
    config: RLConfig
    measured_as: str


def train_stages(
    policy: AudioPolicy,
    streams: Sequence[Stream],
    held_out: Sequence[Stream],
    run: Run,
    stages: Sequence[SimulStage],
    *,
    chunks: ChunkConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    measure: Callable[[str], object],
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
        if beta is not None and config.kl.control != "fixed":
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


# -- the streams of simul-quickstart -----------------------------------------------------------------------------------

SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class StreamOptions:
    """Options of the streams: their texts, languages and speakers."""

    seed: int = 0
    """Seed of sampling, of the order of the data, and of new weights."""
    source: str = "en"
    """Language of the speech: en, es or fr."""
    target: str = "es"
    """Language to translate into: es, fr or en. English is also judged by the similarity of sentence embeddings."""
    texts: Literal["prompts", "announcements"] = "prompts"
    """`announcements`: numbers, dates and times composed of single words, Spanish and English only. Nobody says the
    measured ones in training; of `prompts`, synthetic voices say all."""
    seconds: tuple[float, float] = (6.0, 12.0)
    """Shortest and longest stream."""
    max_prompt_seconds: float = 2.0
    """Longest recording used in a stream."""
    held_out: float = 0.27
    """Share of the prompts that is measured and that no person says in training; of announcements, of their pairs of
    words."""
    voices: int = 4
    """Synthetic voices per prompt; of announcements ten times as many in all."""
    robot_streams: int = 300
    """Streams in synthetic voices to train on."""
    human_streams: int = 150
    """Streams in a person's voice to train on."""
    augmented: float = 0.0
    """For announcements: share of the people's training streams that are made to sound like other rooms, lines and
    levels, as those in synthetic voices always are."""
    test_streams: int = 40
    """Streams in a person's voice to measure on; as many in the voices of `unseen`."""
    speakers: str = ""
    """For announcements: a folder of recordings as `audiorl data build` writes them, whose speakers say the streams
    instead of the package's. A speaker who says both languages is translated in the own voice."""
    speakers_per_stream: int = 1
    """For announcements: number of speakers who take turns in a stream."""
    speaker_marks: bool = False
    """The interpreter writes `>>` where another speaker begins."""
    unseen: tuple[str, ...] = ()
    """Folders of recordings as `audiorl data build` writes them: streams of speakers who are not in training, saying
    the same prompts, are measured too; of held-out prompts alone where these last as long as a stream."""
    threads: int = 2
    """CPU threads of torch."""


def streams_of(options: StreamOptions) -> Prompts | Announcements:
    if options.texts == "announcements":
        return Announcements(options)
    of_announcements = {
        f"--speakers {options.speakers}": options.speakers != "",
        f"--speakers-per-stream {options.speakers_per_stream}": options.speakers_per_stream != 1,
        "--speaker-marks": options.speaker_marks,
    }
    for option, given in of_announcements.items():
        if given:
            raise ValueError(f"{option}: needs --texts announcements")
    return Prompts(options)


@dataclass(frozen=True)
class Prompts:
    options: StreamOptions

    def target_texts(self) -> list[str]:
        """All references, for the tokenizer."""
        return [target.text for split in SPLITS for _, target in self._pairs(split)]

    def people(self, split: Split) -> list[Stream]:
        """Streams in a person's voice, to train on or to measure on: the same for all seeds."""
        count = self.options.human_streams if split == "train" else self.options.test_streams
        return self._streams(split, count)

    def robots(self) -> list[Stream]:
        """All prompts in synthetic voices, half of the streams from either split."""
        streams: list[Stream] = []
        for split in SPLITS:
            speak = self._synthesized([source for source, _ in self._pairs(split)])
            streams += self._streams(split, self.options.robot_streams // 2, seed=self.options.seed, speak=speak)
        return streams

    def unseen(self) -> list[Stream]:
        """Streams of the speakers of `unseen`, `test_streams` in all, each of one speaker.

        A speaker says held-out prompts only, or all, which is printed, where the held-out ones last no
        `options.seconds[1]`.
        """
        trained = sorted({source.speaker for source, _ in self._pairs("train")})
        voices = unseen_recordings(self.options, trained)
        speakers: list[tuple[Split, list[Utterance]]] = []
        for speaker, voice in voices.items():
            held_out, prompts = (len(self._pairs(split, voice)) for split in ("test", "all"))
            if not prompts:
                print(f"{speaker}: left out, says none of the prompts", flush=True)
                continue
            enough = sum(source.duration for source, _ in self._pairs("test", voice)) >= self.options.seconds[1]
            speakers.append(("test" if enough else "all", voice))
            of_training = 0 if enough else prompts - held_out
            print(
                f"{speaker}: {held_out if enough else prompts} prompts, {of_training} of them said by a person in "
                "training",
                flush=True,
            )
        if not speakers:
            longest = self.options.max_prompt_seconds
            raise ValueError(f"--unseen: {', '.join(voices)} say none of the prompts of at most {longest:g} s")
        total = self.options.test_streams
        count = -(-total // len(speakers))
        return [s for split, voice in speakers for s in self._streams(split, count, voice)][:total]

    def _streams(
        self, split: Split, count: int, voice: Sequence[Utterance] = (), seed: int = 0, speak: Speak | None = None
    ) -> list[Stream]:
        return bundled_streams(
            split,
            self.options.target,
            self.options.source,
            count=count,
            seconds=self.options.seconds,
            max_prompt_seconds=self.options.max_prompt_seconds,
            held_out=self.options.held_out,
            seed=seed,
            speak=speak,
            voice=voice,
        )

    def _pairs(self, split: Split, voice: Sequence[Utterance] = ()) -> list[tuple[Utterance, Utterance]]:
        return prompt_pairs(
            split,
            self.options.target,
            self.options.source,
            held_out=self.options.held_out,
            max_prompt_seconds=self.options.max_prompt_seconds,
            voice=voice,
        )

    def _synthesized(self, prompts: Sequence[Utterance]) -> Speak:
        """Return a function that says a prompt in one of its `voices`, each synthesised once."""
        rng = random.Random(self.options.seed)
        requests = [
            Speech(u.text, u.language, *_random_voice(u.language, rng))
            for u in prompts
            for _ in range(self.options.voices)
        ]
        spoken = iter(synthesize_many(requests, workers=self.options.threads))
        takes = {u.id: [next(spoken) for _ in range(self.options.voices)] for u in prompts}

        def speak(utterance: Utterance, rng: np.random.Generator) -> np.ndarray:
            return augment(takes[utterance.id][int(rng.integers(self.options.voices))], rng)

        return speak


@dataclass(frozen=True)
class Announcements:
    options: StreamOptions

    def target_texts(self) -> list[str]:
        """All references, for the tokenizer, which may know the words of those that are measured."""
        marks = [SPEAKER_MARK] if self.options.speaker_marks else []
        return [*marks, *announcements.texts(self.options.target)]

    def people(self, split: Split) -> list[Stream]:
        """Streams of the package's speaker, or of those of `speakers`: the same for all seeds."""
        if split == "test":
            return self._streams(split, self._speakers, self.options.test_streams, seed=0)
        return self._streams(
            split, self._speakers, self.options.human_streams, 0, augment, augmented=self.options.augmented
        )

    def robots(self) -> list[Stream]:
        """Streams of the training split, each in one synthetic voice."""
        if not self.options.robot_streams:
            return []
        source, rng = self.options.source, random.Random(self.options.seed)
        kinds = [_random_voice(source, rng) for _ in range(10 * self.options.voices)]
        requests = [Speech(text, source, *kind) for kind in kinds for text in words(source).values()]
        spoken = iter(synthesize_many(requests, workers=self.options.threads))
        robots = [
            WordVoice(voice, {key: trimmed(next(spoken)) for key in words(source)}, bundled_words(self.options.target))
            for voice, _, _ in kinds
        ]
        return self._streams("train", robots, self.options.robot_streams, self.options.seed, augment)

    def unseen(self) -> list[Stream]:
        """Streams of the speakers of `unseen`, `test_streams` in all, of announcements that nobody says in training."""
        recordings = unseen_recordings(self.options, [v.name for v in self._speakers])
        unseen = self._voices(u for of_speaker in recordings.values() for u in of_speaker)
        if not unseen:
            raise ValueError(f"--unseen: {', '.join(recordings)} say none of the words of announcements")
        return self._streams("test", unseen, self.options.test_streams, seed=0)

    @cached_property
    def _speakers(self) -> list[WordVoice]:
        return self._voices(corpus(self.options.speakers) if self.options.speakers else bundled_speech())

    def _voices(self, speech: Iterable[Utterance]) -> list[WordVoice]:
        return voices_of(speech, self.options.source, self.options.target)

    def _streams(
        self,
        split: Split,
        voices: Sequence[WordVoice],
        count: int,
        seed: int,
        augment: Augment | None = None,
        augmented: float = 1.0,
    ) -> list[Stream]:
        streams = announcement_streams(
            split,
            voices,
            self.options.target,
            self.options.source,
            count=count,
            seconds=self.options.seconds,
            held_out=self.options.held_out,
            seed=seed,
            augment=augment,
            augmented=augmented,
            speakers=self.options.speakers_per_stream,
        )
        return [with_speaker_marks(s) for s in streams] if self.options.speaker_marks else streams


def _random_voice(language: str, rng: random.Random) -> tuple[str, int, int]:
    """Return a synthetic voice, its speed and its pitch."""
    return rng.choice(voices(language)), rng.randint(120, 200), rng.randint(20, 80)


def unseen_recordings(options: StreamOptions, trained: Sequence[str]) -> dict[str, list[Utterance]]:
    """Return the recordings of each speaker of the source language in `unseen` who is not `trained`, in both languages.

    Raises ValueError for a folder without one.
    """
    voices: dict[str, list[Utterance]] = {}
    for folder in options.unseen:
        unseen = [u for u in corpus(folder) if u.speaker not in trained]
        speakers = list(dict.fromkeys(u.speaker for u in unseen if u.language == options.source))
        if not speakers:
            raise ValueError(f"--unseen {folder}: nobody but {', '.join(trained)} says anything in {options.source!r}")
        for u in unseen:
            if u.speaker in speakers and u.language in (options.source, options.target):
                voices.setdefault(u.speaker, []).append(u)
    return voices

"""Streams of `simul-quickstart`, said by people and synthetic voices, in training and by unseen speakers.

`Prompts` lays out whole prompts of the recordings; synthetic voices say all of them, those that are measured too.
`Announcements` composes numbers, dates and times of single words; nobody says in training what is measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from audiorl.data.augment import augment
from audiorl.data.corpus import Utterance, bundled_speech, corpus
from audiorl.data.silence import trimmed
from audiorl.data.synth import Speech, synthesize_many, voices
from audiorl.tasks.simul.bundled import Speak, Split, bundled_streams, prompt_pairs
from audiorl.tasks.simul.streams import SPEAKER_MARK, Stream, with_speaker_marks
from corpora import announcements
from corpora.announcements import Augment, WordVoice, announcement_streams, bundled_words, voices_of, words

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
        """Return all references, for the tokenizer."""
        return [target.text for split in SPLITS for _, target in self._pairs(split)]

    def people(self, split: Split) -> list[Stream]:
        """Streams in a person's voice, to train on or to measure on: the same for all seeds."""
        count = self.options.human_streams if split == "train" else self.options.test_streams
        return self._streams(split, count)

    def robots(self) -> list[Stream]:
        """Return all prompts in synthetic voices, half of the streams from either split."""
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
        """Return all references, for the tokenizer, which may know the words of those that are measured."""
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

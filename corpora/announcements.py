"""Streams of announcements, composed of recordings of single words as telephone systems say them.

    voices = voices_of(bundled_speech(), "es", "en")
    train = announcement_streams("train", voices, "en", "es", count=100)
    test = announcement_streams("test", voices, "en", "es", count=20)     # nobody says these texts in "train"

An announcement is a number, a date or a time in a frame::

    es    usted tiene | treinta | y siete | minutos            martes | veinticinco de noviembre
    en    you have    | thirty  | seven   | minutes            tuesday | november twenty fifth

A block, between two bars, is a unit of the stream: its translation can be said once it has ended. Within a date the
order differs, so that the day has to wait for the month. What is held out is a pair of words: tens and ones, day and
month, or hour and minutes. All words of the test split are said in the train split, none of its pairs is. English and
Spanish.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance, bundled_speech
from audiorl.data.silence import RATE, trimmed
from audiorl.tasks.simul.bundled import PAUSES, Split, StreamPiece, lay_out, limits_in_samples
from audiorl.tasks.simul.streams import Stream

LANGUAGES = ("en", "es")
WORD_GAPS = (0.0, 0.1)
"""Shortest and longest pause between the words of an announcement, in seconds. Each has 50 ms on either side."""

Keys = tuple[str, ...]
Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Block:
    """Words in both languages, by their keys in the corpus, that are each other's translation."""

    en: Keys
    es: Keys

    def keys(self, language: str) -> Keys:
        return self.en if language == "en" else self.es


@dataclass(frozen=True)
class Announcement:
    blocks: tuple[Block, ...]
    pair: str
    """The pair of words that decides the split."""

    def keys(self, language: str) -> Keys:
        return tuple(key for block in self.blocks for key in block.keys(language))


@dataclass(frozen=True, eq=False)
class WordVoice:
    """Recordings of words without silence around them, float32 [T] at RATE Hz by key, in the source and the target
    language."""

    name: str
    source: Mapping[str, np.ndarray]
    target: Mapping[str, np.ndarray]


def voices_of(speech: Iterable[Utterance], source: str, target: str) -> list[WordVoice]:
    """Return the speakers of `source` with their first recording of each word of announcements.

    A speaker who does not say the target language is given the package's recordings of it.
    """
    _check_languages(source, target)
    recordings: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for u in speech:
        of_speaker = recordings.setdefault((u.language, u.speaker), {})
        if u.language in (source, target) and u.key in words(u.language) and u.key not in of_speaker:
            of_speaker[u.key] = trimmed(u.clip.load(RATE))
    return [
        WordVoice(speaker, said, recordings.get((target, speaker)) or bundled_words(target))
        for (language, speaker), said in recordings.items()
        if language == source and said
    ]


def announcement_streams(
    split: Split,
    voices: Sequence[WordVoice],
    target: str = "en",
    source: str = "es",
    *,
    count: int = 100,
    seconds: tuple[float, float] = (6.0, 12.0),
    held_out: float = 0.27,
    seed: int = 0,
    augment: Augment | None = None,
    augmented: float = 1.0,
    speakers: int = 1,
) -> list[Stream]:
    """`count` random streams, each of `speakers` of the voices; stream i is determined by (seed, i).

    Each of several speakers says an announcement, and then any of them the next one, until the stream is full: one of
    8 s or more has room for two.

    seconds: minimum and maximum duration. held_out: the fraction of pairs in
    the split "test", the same for every seed, voice and length. augment: applied to the speech of each block, in a
    fraction `augmented` of the streams. An announcement is drawn from those whose words the voice has. Raises
    ValueError for a voice without any, and for more speakers than voices.
    """
    _check_languages(source, target)
    shortest, _ = limits_in_samples(seconds)
    if not voices:
        raise ValueError("announcements: no voices; give one or more")
    if not 1 <= speakers <= len(voices):
        raise ValueError(
            f"announcements: {speakers} speakers a stream, but {len(voices)} voices; give 1 to {len(voices)}"
        )
    drawable = [_drawable(voice, split, source, target, held_out) for voice in voices]
    streams = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        present = rng.permutation(len(voices))[:speakers] if speakers > 1 else [int(rng.integers(len(voices)))]
        goal = rng.uniform(*seconds)
        change = augment if augmented >= 1 or rng.random() < augmented else None
        pieces: list[StreamPiece] = []
        length = 0.0
        for turn in itertools.count():
            which = present[turn if turn < speakers else int(rng.integers(speakers))]
            voice, kinds = voices[which], drawable[which]
            kind = kinds[int(rng.integers(len(kinds)))]
            said = _pieces(kind[int(rng.integers(len(kind)))], voice, source, target, rng, change)
            length += sum(p.seconds for p in said)
            if pieces and length > goal:
                break
            pieces += said
        names = "+".join(voices[which].name for which in present)
        name = f"{source}-{target}/announcements/{split}/{names}/{seed}/{index:04d}"
        metadata = {"speaker": names} if speakers == 1 else {}
        streams.append(lay_out(name, pieces, source, target, rng, shortest, metadata))
    return streams


def texts(language: str, split: Split = "all", held_out: float = 0.27) -> list[str]:
    """Return all announcements of a split, in words."""
    of_word = words(language)
    of_split = (a for kind in announcements() for a in kind if _in_split(a, split, held_out))
    return sorted({" ".join(of_word[key] for key in a.keys(language)) for a in of_split})


@cache
def words(language: str) -> Mapping[str, str]:
    """Return the text of each word of announcements by its key, in lower case."""
    _check_languages(language)
    wanted = {key for kind in announcements() for a in kind for key in a.keys(language)}
    return {u.key: u.text.lower().rstrip(".") for u in bundled_speech((language,)) if u.key in wanted}


@cache
def bundled_words(language: str) -> Mapping[str, np.ndarray]:
    """Return the package's recordings of the words of announcements, without silence around them."""
    return {u.key: trimmed(u.clip.load(RATE)) for u in bundled_speech((language,)) if u.key in words(language)}


@cache
def announcements() -> tuple[tuple[Announcement, ...], ...]:
    """Return all numbers, all dates, all times."""
    return tuple(_numbers()), tuple(_dates()), tuple(_times())


def _numbers() -> Iterable[Announcement]:
    frames = [("", ""), ("", "queue-minutes"), ("", "queue-seconds"), ("", "digits/thousand"), ("vm-extension", "")]
    frames += [("vm-youhave", "queue-minutes"), ("vm-youhave", "queue-seconds")]
    for tens, ones, (prefix, suffix) in itertools.product(range(20, 100, 10), range(2, 10), frames):
        before, after = (_same(key) for key in (prefix, suffix))
        yield Announcement((*before, *_number(tens + ones), *after), f"number {tens} {ones}")


def _dates() -> Iterable[Announcement]:
    frames = ["", "digits/today", "digits/tomorrow", *(f"digits/day-{i}" for i in range(7))]
    for day, month, prefix in itertools.product(range(2, 32), range(12), frames):
        if day == 10:  # not among the Spanish recordings
            continue
        spanish = tuple(key for block in _number(day) for key in block.es)
        tens, ones = day // 10 * 10, day % 10
        english = (f"digits/h-{day}",) if day <= 20 or not ones else (f"digits/{tens}", f"digits/h-{ones}")
        date = Block((f"digits/mon-{month}", *english), (*spanish, "vm-from", f"digits/mon-{month}"))
        yield Announcement((*_same(prefix), date), f"date {day} {month}")


def _times() -> Iterable[Announcement]:
    for hour, minutes, prefix in itertools.product(range(2, 13), (*range(11, 30), 30, 40, 50), ("", "digits/today")):
        if hour == 10:
            continue
        first, *others = _number(minutes)
        with_and = Block(first.en, ("vm-and", *first.es))
        yield Announcement((*_same(prefix), *_number(hour), with_and, *others), f"time {hour} {minutes}")


def _number(n: int) -> tuple[Block, ...]:
    """2 to 99: treinta | y siete; 21 to 29 are one word in Spanish."""
    tens, ones = n // 10 * 10, n % 10
    if n <= 20 or not ones:
        return _same(f"digits/{n}")
    if tens == 20:
        return (Block((f"digits/{tens}", f"digits/{ones}"), (f"digits/{n}",)),)
    return *_same(f"digits/{tens}"), Block((f"digits/{ones}",), ("vm-and", f"digits/{ones}"))


def _same(key: str) -> tuple[Block, ...]:
    return (Block((key,), (key,)),) if key else ()


def _in_split(announcement: Announcement, split: Split, held_out: float) -> bool:
    in_test = zlib.crc32(announcement.pair.encode()) % 1000 < 1000 * held_out
    return split == "all" or in_test == (split == "test")


def _drawable(
    voice: WordVoice, split: Split, source: str, target: str, held_out: float
) -> tuple[tuple[Announcement, ...], ...]:
    """Return the numbers, dates and times of the split that the voice can say, in both languages."""

    def can_say(a: Announcement) -> bool:
        return voice.source.keys() >= {*a.keys(source)} and voice.target.keys() >= {*a.keys(target)}

    kinds = tuple(tuple(a for a in kind if _in_split(a, split, held_out) and can_say(a)) for kind in announcements())
    if not any(kinds):
        raise ValueError(f"announcements: {voice.name} has the words of none; give recordings of numbers and months")
    return tuple(kind for kind in kinds if kind)


def _pieces(
    announcement: Announcement,
    voice: WordVoice,
    source: str,
    target: str,
    rng: np.random.Generator,
    augment: Augment | None,
) -> list[StreamPiece]:
    def gap(limits: tuple[float, float]) -> np.ndarray:
        return np.zeros(round(float(rng.uniform(*limits)) * RATE), np.float32)

    def joined(keys: Keys, recordings: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([part for key in keys for part in (gap(WORD_GAPS), recordings[key])][1:])

    pieces = []
    for block in announcement.blocks:
        wav = joined(block.keys(source), voice.source)
        said = joined(block.keys(target), voice.target)
        pieces.append(
            StreamPiece(
                wav if augment is None else augment(wav, rng),
                pause=len(gap(PAUSES if block is announcement.blocks[-1] else WORD_GAPS)),
                source=" ".join(words(source)[key] for key in block.keys(source)),
                target=" ".join(words(target)[key] for key in block.keys(target)),
                spoken=AudioClip(array=said, sample_rate=RATE),
                speaker=voice.name,
            )
        )
    return pieces


def _check_languages(*languages: str) -> None:
    for language in languages:
        if language not in LANGUAGES:
            raise ValueError(f"announcements are composed in {' and '.join(LANGUAGES)}, not in {language!r}")

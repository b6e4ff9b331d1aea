"""Spoken numbers: questions about sequences of number words, whose thought can be worked out and checked.

    words = number_words("bundled", "en")                     # or "synthetic:10", or a folder of recordings
    samples = spoken_numbers(words, 200, lengths=(2, 3), operation="sum", seed=0)
    samples[0].metadata["thought"], samples[0].references     # "3+8=11+2=13", ("13",)

It is Countdown (Pan 2025) in kind for speech: the numbers must be heard before they can be added.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from audiorl.audio import AudioClip, write_wav
from audiorl.data.corpus import bundled_speech, corpus, normalised
from audiorl.data.prompts import how_to_answer
from audiorl.data.rows import write_json_lines
from audiorl.eval.metrics.text import number_words as has_number_words
from audiorl.eval.metrics.text import spell_numbers
from audiorl.types import Message, Sample

RATE = 16_000
FSDD_NAME = re.compile(r"([0-9])_([^_]+)_[0-9]+\.(?:wav|flac)")
"""Files of the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset): DIGIT_SPEAKER_TAKE.wav."""
_SIGNS = {"sum": "+", "difference": "-", "largest": "^", "count": ",", "twice": ","}
_FOLDS: dict[str, Callable[[int, int], int]] = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "largest": max,
}
QUESTIONS = {
    "sum": "Add the numbers.",
    "difference": "Subtract the other numbers from the first.",
    "largest": "Which number is the largest?",
    "count": "How many numbers are said?",
    "twice": "Which number comes twice?",
}
OPERATIONS = tuple(QUESTIONS)


@dataclass(frozen=True)
class NumberWord:
    """A recording of one number word."""

    value: int
    text: str
    language: str
    speaker: str
    clip: AudioClip


def number_words(
    source: str, language: str = "en", largest: int = 9, smallest: int = 1, seed: int = 0
) -> list[NumberWord]:
    """Return the recordings of `smallest` to `largest` in `source`.

    source: "bundled", the package's own; "synthetic:N", N voices of espeak-ng drawn by `seed`; a folder that
    `audiorl data build` wrote, or one with the files of the Free Spoken Digit Dataset. Adding 0 changes nothing, so
    that a model may learn to leave it out: it is not among the numbers unless asked for.

    Raises ValueError for a source that lacks one of these numbers in the language, and for one recording with two.
    """
    if not has_number_words(language):
        raise ValueError(f"language {language!r}: no words for its numbers are known; take another")
    spoken = {normalised(spell_numbers(str(n), language)): n for n in range(smallest, largest + 1)}
    folder = Path(source)
    words: list[NumberWord] = []
    if source.startswith("synthetic"):
        from audiorl.data.synth import Speech, synthesize_many, voices  # rewards import this module

        count = source.removeprefix("synthetic").removeprefix(":") or "10"
        if not count.isdecimal() or not 1 <= int(count) <= len(voices(language)):
            raise ValueError(f"{source}: give 1 to {len(voices(language))} voices, as in synthetic:10")
        rng = random.Random(f"{seed}/{language}")
        chosen = [(v, rng.randint(130, 190), rng.randint(20, 80)) for v in rng.sample(voices(language), int(count))]
        requests = [Speech(text, language, v, speed, pitch) for v, speed, pitch in chosen for text in spoken]
        for request, wav in zip(requests, synthesize_many(requests), strict=True):
            clip = AudioClip(array=wav, sample_rate=RATE)
            words.append(NumberWord(spoken[request.text], request.text, language, f"espeak {request.voice}", clip))
    elif source == "bundled" or (folder / "manifest.jsonl").exists():
        found = [u for u in (bundled_speech() if source == "bundled" else corpus(folder)) if u.language == language]
        words = [
            NumberWord(spoken[text], text, language, u.speaker, u.clip)
            for u in found
            if (text := normalised(u.text)) in spoken
        ]
    else:
        names = {value: text for text, value in spoken.items()}
        for file in sorted(folder.iterdir() if folder.is_dir() else ()):
            match = FSDD_NAME.fullmatch(file.name)
            if match and language == "en" and int(match[1]) in names:
                value = int(match[1])
                words.append(NumberWord(value, names[value], "en", match[2], AudioClip(path=str(file))))
    meanings: dict[object, int] = {}
    for word in words:
        clip = word.clip
        if clip.path and meanings.setdefault((clip.path, clip.start, clip.channel), word.value) != word.value:
            other = meanings[clip.path, clip.start, clip.channel]
            raise ValueError(f"{clip.path}: is {other} in one row and {word.value} in another; keep the right one")
    if missing := sorted(set(spoken.values()) - {word.value for word in words}):
        kinds = "a folder of `audiorl data build` with such texts, or files named DIGIT_SPEAKER_TAKE.wav (English)"
        raise ValueError(
            f"{source}: no recording of {missing[0]} ({spell_numbers(str(missing[0]), language)}); expected {kinds}"
        )
    return words


def split_speakers(words: Sequence[NumberWord], unseen: Sequence[str]) -> tuple[list[NumberWord], list[NumberWord]]:
    """Return the words of all speakers but the `unseen` ones, and theirs. Raises ValueError for an unknown name."""
    speakers = {word.speaker for word in words}
    if strangers := sorted(set(unseen) - speakers):
        raise ValueError(f"unseen speaker {strangers[0]!r}: the words are by {', '.join(sorted(speakers))}")
    if not speakers - set(unseen):
        raise ValueError("every speaker of the words is unseen; leave one to train on")
    return [w for w in words if w.speaker not in unseen], [w for w in words if w.speaker in unseen]


def spoken_numbers(
    words: Sequence[NumberWord],
    count: int,
    lengths: tuple[int, int] = (2, 3),
    operation: str = "sum",
    seed: int = 0,
    change: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
    written: bool = False,
    think: bool = True,
    split: Literal["train", "test"] | None = None,
) -> list[Sample]:
    """Return `count` questions about sequences of the words, each by one speaker, who are drawn in turn.

    lengths: the shortest and the longest sequence. change: what is done to a recording, such as `augment`. written: the
    words themselves in place of their recordings. think: ask for a thought before the answer. split: a fourth of all
    sequences is of the test, the others are to train on. The metadata hold `numbers`, `thought`, `operation`,
    `speaker`, `language`, `text` and `question`; the task is the length.

    Raises ValueError for lengths without a result: a difference of one number, no number twice; and where a split has
    no sequence of these.
    """
    least = {"difference": 2, "twice": 3}.get(operation, 1)
    if operation not in QUESTIONS:
        raise ValueError(f"operation {operation!r} is not one of {', '.join(OPERATIONS)}")
    if not least <= lengths[0] <= lengths[1]:
        raise ValueError(
            f"lengths {lengths}: {operation!r} has a result from {least} numbers on; give SHORTEST LONGEST"
        )
    by_speaker: dict[tuple[str, str], dict[int, list[NumberWord]]] = {}
    for word in words:
        by_speaker.setdefault((word.language, word.speaker), {}).setdefault(word.value, []).append(word)
    speakers = sorted(by_speaker)
    rng, noise = random.Random(f"{seed}/{operation}"), np.random.default_rng(seed)
    samples = []
    for i in range(count):
        language, speaker = speakers[i % len(speakers)]
        own = by_speaker[language, speaker]
        for _ in range(1000):
            length = rng.randint(*lengths)
            if operation == "twice":
                if len(own) < length - 1:
                    raise ValueError(f"{speaker}: {len(own)} numbers are too few for {length} of which one comes twice")
                numbers = rng.sample(sorted(own), length - 1)
                numbers.insert(rng.randrange(length), rng.choice(numbers))
            else:
                numbers = rng.choices(sorted(own), k=length)
            if split is None or (zlib.crc32(repr(numbers).encode()) % 4 == 0) == (split == "test"):
                break
        else:
            raise ValueError(
                f"{speaker}: no sequence of {lengths[0]} to {lengths[1]} numbers is of the split {split!r}"
            )
        text = " ".join(own[n][0].text for n in numbers)
        content: str | AudioClip = f"{text}\n"
        if not written:
            wav = _said_in_turn([rng.choice(own[n]) for n in numbers], rng)
            content = AudioClip(array=wav if change is None else change(wav, noise), sample_rate=RATE)
        thought, answer = work_out(numbers, operation)
        about = {"numbers": numbers, "thought": thought, "operation": operation, "language": language, "text": text}
        about["question"] = QUESTIONS[operation]
        messages = (Message("user", (content, f"{QUESTIONS[operation]}\n{how_to_answer(think)}")),)
        name = f"{operation}-{seed}-{i}"
        samples.append(Sample(name, messages, (answer,), (), f"{length} numbers", about | {"speaker": speaker}))
    return samples


def write_rows(samples: Sequence[Sample], folder: Path, name: str) -> Path:
    """Write questions as FOLDER/NAME.jsonl, which every recipe reads, with their recordings in FOLDER/NAME."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for s in samples:
        row = {"id": s.id, "audio": f"{name}/{s.id}.wav", "answer": s.references[0], "task": s.task}
        write_wav(folder / row["audio"], s.audio[0].load(RATE), RATE)
        rows.append(row | dict(s.metadata))
    file = folder / f"{name}.jsonl"
    write_json_lines(file, rows)
    return file


def work_out(numbers: Sequence[int], operation: str) -> tuple[str, str]:
    """Return the exact thought and the answer.

    >>> work_out([3, 8, 2], "sum"), work_out([3, 8, 2], "largest"), work_out([3, 8, 3], "twice")
    (('3+8=11+2=13', '13'), ('3^8=8^2=8', '8'), ('3,8,3=3', '3'))
    """
    sign, fold = _SIGNS[operation], _FOLDS.get(operation)
    if fold is None:
        answer = len(numbers) if operation == "count" else next(n for n in numbers if list(numbers).count(n) == 2)
        return f"{sign.join(map(str, numbers))}={answer}", str(answer)
    written, result = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        result = fold(result, number)
        written += f"{sign}{number}={result}"
    return written, str(result)


def read_thought(thought: str, operation: str) -> tuple[list[int], str | None]:
    """Return the numbers that a thought says it heard, and its result, None unless each of its steps is right.

    >>> read_thought("3+8=11+2=13", "sum"), read_thought("3+8=12+2=14", "sum"), read_thought("three", "sum")
    (([3, 8, 2], '13'), ([3, 8, 2], None), ([], None))
    """
    sign = re.escape(_SIGNS[operation])
    thought = "".join(thought.split())
    numbers = [int(n) for n in re.findall(rf"(?:^|(?<!=){sign})(\d{{1,4}})(?=$|=|{sign})", thought)]
    if not numbers or (operation == "twice" and all(numbers.count(n) != 2 for n in numbers)):
        return numbers, None
    exact, answer = work_out(numbers, operation)
    return numbers, answer if thought == exact else None


def _said_in_turn(words: Sequence[NumberWord], rng: random.Random) -> np.ndarray:
    """Join recordings [T] at RATE, each without the silence around it and at the same level, with pauses between."""
    pieces = []
    for word in words:
        wav = word.clip.load(RATE)
        loud = np.flatnonzero(np.abs(wav) > 0.02 * np.abs(wav).max(initial=1e-9))
        wav = wav[max(loud[0] - 800, 0) : loud[-1] + 800] if len(loud) else wav
        pieces += [wav / max(float(np.abs(wav).max(initial=0)), 1e-9) * 0.5]
        pieces += [np.zeros(int(RATE * rng.uniform(0.1, 0.4)), np.float32)]
    return np.concatenate(pieces).astype(np.float32)

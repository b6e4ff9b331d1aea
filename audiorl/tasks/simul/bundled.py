"""Streams of human speech for interpretation, built from the bundled recordings or a corpus of `audiorl data build`.

    train = bundled_streams("train", target="es", count=200)
    spoken = bundled_streams("train", target="es", speak=my_voices)     # the same prompts said by other voices

A stream is a sequence of prompts in the source language with pauses between them. The reference of a prompt is its text
in the target language; the reference's duration is that of the target language's own recording.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from audiorl.audio import AudioClip
from audiorl.audio import seconds as clip_seconds
from audiorl.data.corpus import Utterance, bundled_speech, corpus, parallel, split_by_key
from audiorl.data.silence import RATE, speech_in, trimmed
from audiorl.languages import language_code
from audiorl.tasks.simul.streams import Stream, Unit

Split = Literal["train", "test", "all"]
Speak = Callable[[Utterance, np.random.Generator], np.ndarray]
"""Returns speech of an utterance's text: float32 [T] at RATE Hz."""

PAUSES = (0.2, 1.2)
"""Shortest and longest pause after a prompt, in seconds."""
ROOM_TONE = -75.0
"""Level of the noise added to the whole stream, dB relative to full scale: that of pauses in the English recordings."""
_TRIES = 10


def bundled_streams(
    split: Split, target: str = "es", source: str = "en", *, count: int = 100, **options: Any
) -> list[Stream]:
    """Return the first `count` streams of `draw_streams` with these options, in memory: about 64 kB for a second."""
    return list(itertools.islice(draw_streams(split, target, source, **options), count))


def draw_streams(
    split: Split,
    target: str = "es",
    source: str = "en",
    *,
    seconds: tuple[float, float] = (10.0, 30.0),
    seed: int = 0,
    max_prompt_seconds: float = 8.0,
    held_out: float = 0.27,
    folder: str | Path | None = None,
    speak: Speak | None = None,
    voice: Sequence[Utterance] = (),
) -> Iterator[Stream]:
    """Yield an endless sequence of random streams; stream i is determined by (seed, i).

    split: "test" is a fraction `held_out` of all recordings, the same for every seed, length and target language; none
    of its prompts or texts is in "train"; "all" is both. seconds: minimum and maximum duration of a stream; (60, 60)
    gives exactly 60 s. max_prompt_seconds: maximum duration of a prompt's source recording. folder: a built corpus in
    place of the bundled one. speak: speech in place of the recordings. voice: another speaker's recordings in place of
    the source's, of the prompts that they have.

    Prompts are appended in a random order until one no longer fits. Raises ValueError for a language without recordings
    and for durations that the prompts cannot fill.
    """
    low, high = limits_in_samples(seconds)
    pairs = prompt_pairs(split, target, source, held_out, max_prompt_seconds, folder, voice)
    recorded: dict[str, np.ndarray] = {}  # each decoded once
    for index in itertools.count():
        name = "/".join([f"{source}-{target}", split, *dict.fromkeys(u.speaker for u in voice), f"{seed}/{index:04d}"])
        rng = np.random.default_rng([seed, index])
        goal = int(rng.integers(low, high + 1))
        pieces: list[StreamPiece] = []
        keys: list[str] = []
        length = misses = 0
        for k in rng.permutation(len(pairs)):
            prompt, translation = pairs[k]
            if speak is None and prompt.id not in recorded:
                recorded[prompt.id] = prompt.clip.load(RATE)
            wav = _trimmed(recorded[prompt.id] if speak is None else speak(prompt, rng), prompt)
            pause = round(float(rng.uniform(*PAUSES)) * RATE)
            if length + len(wav) + pause > goal:
                misses += 1
                if length >= low or (pieces and misses == _TRIES):
                    break
                continue
            pieces.append(StreamPiece(wav, pause, prompt.text, translation.text, trimmed_recording(translation)))
            keys.append(prompt.key)
            length += len(wav) + pause
        if not pieces or (length < low and not misses):
            together = sum(a.duration for a, _ in pairs)
            raise ValueError(
                f"stream {name} is to last {low / RATE:g} to {high / RATE:g} s, which {len(pairs)} prompts of "
                f"{together:.0f} s together do not fill; choose other lengths"
            )
        yield lay_out(name, pieces, source, target, rng, low, {"prompts": " ".join(keys)})


def prompt_pairs(
    split: Split,
    target: str = "es",
    source: str = "en",
    held_out: float = 0.27,
    max_prompt_seconds: float = 8.0,
    folder: str | Path | None = None,
    voice: Sequence[Utterance] = (),
) -> list[tuple[Utterance, Utterance]]:
    """Return the (source, target) recordings of a split from which streams are built.

    voice: another speaker's recordings, which replace those of the same key and language; the other prompts are left
    out. Single letters, which are mostly the same in both languages, and texts without a letter are left out.
    """

    def letters(text: str) -> int:
        return sum(c.isalnum() for c in text)

    speech = bundled_speech() if folder is None else corpus(folder)
    source, target = language_code(source), language_code(target)
    for language in (source, target):
        if not any(u.language == language for u in speech):
            languages = ", ".join(sorted({u.language for u in speech}))
            raise ValueError(f"no recordings in {language!r}, only {languages}; `audiorl data build` builds others")
    # The split is made over all languages and durations, so that it does not depend on the arguments.
    train, test = split_by_key(speech, held_out, seed=0)
    pairs = parallel({"train": train, "test": test, "all": speech}[split], source, target)
    if voice:
        recordings = {u.key: u for u in voice if u.language == source}
        pairs = [(recordings[a.key], b) for a, b in pairs if a.key in recordings]
    short = [(a, b) for a, b in pairs if a.duration <= max_prompt_seconds]
    return [(a, b) for a, b in short if letters(a.text) > 1 and letters(b.text) > 0]


@dataclass(frozen=True, eq=False)
class StreamPiece:
    """A unit of a stream before it has a place in it: its speech, float32 [T] at RATE Hz, and the pause behind it."""

    wav: np.ndarray
    pause: int
    """In samples."""
    source: str
    target: str
    spoken: AudioClip
    """A recording of the target, without silence around it."""
    speaker: str = ""

    @property
    def seconds(self) -> float:
        return (len(self.wav) + self.pause) / RATE


def lay_out(
    id: str,
    pieces: Sequence[StreamPiece],
    source: str,
    target: str,
    rng: np.random.Generator,
    at_least: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Stream:
    """Return the stream of the pieces one after the other, with faint noise; silence fills it to `at_least` samples.

    source, target: the languages.
    """
    total = max(at_least, sum(len(p.wav) + p.pause for p in pieces))
    wav = rng.standard_normal(total, dtype=np.float32) * np.float32(10 ** (ROOM_TONE / 20))
    units, at = [], 0
    for piece in pieces:
        end = at + len(piece.wav)
        wav[at:end] += piece.wav
        seconds = clip_seconds(piece.spoken)
        units.append(Unit(at / RATE, end / RATE, piece.target, piece.source, seconds, piece.spoken, piece.speaker))
        at = end + piece.pause
    audio = AudioClip(array=wav, sample_rate=RATE)
    return Stream(id, audio, total / RATE, tuple(units), source, target, metadata or {})


_trimmed_recordings: dict[str, AudioClip] = {}


def trimmed_recording(utterance: Utterance) -> AudioClip:
    """Return the recording without silence around its speech, as a part of its file. Decoded once per process."""
    clip = utterance.clip
    if clip.key not in _trimmed_recordings:
        try:
            first, end = speech_in(clip.load(RATE))
        except ValueError as error:
            raise ValueError(f"{utterance.id}: {error}") from error
        start, seconds = clip.start + first / RATE, (end - first) / RATE
        _trimmed_recordings[clip.key] = replace(clip, start=start, duration=seconds)
    return _trimmed_recordings[clip.key]


def _trimmed(wav: np.ndarray, utterance: Utterance) -> np.ndarray:
    try:
        return trimmed(wav)
    except ValueError as error:
        raise ValueError(f"{utterance.id}: {error}") from error


def limits_in_samples(seconds: tuple[float, float]) -> tuple[int, int]:
    """Return the minimum and maximum length of streams in samples. Raises ValueError for what is no range."""
    low, high = (round(s * RATE) for s in seconds)
    if not 0 < low <= high:
        raise ValueError(f"seconds must be (minimum, maximum) with 0 < minimum <= maximum, got {seconds}")
    return low, high

"""Streams of human speech to interpret, laid out from the bundled recordings or a folder of tools/build_corpus.py.

    train = bundled_streams("train", target="es", count=200)
    test = bundled_streams("test", target="es", count=20)               # prompts and texts never heard in training
    long = bundled_streams("train", target="fr", count=4, seconds=(60, 60))
    spoken = bundled_streams("train", target="es", speak=my_voices)     # the same prompts said by other voices

A stream is prompts of the source language with pauses between them. What can be said when a prompt has ended is its
text in the target language, and how long that lasts is measured on the target language's own recording::

    |--one moment please--| pause |--goodbye--| pause |
    0                    1.9     2.6         3.3     4.1 s

Stream number i of a seed is the same whatever other streams are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance, bundled_speech, corpus, parallel, split_by_key
from audiorl.data.silence import RATE, speech_in, trimmed
from audiorl.simulst.streams import Stream, Unit

Speak = Callable[[Utterance, np.random.Generator], np.ndarray]
"""Says an utterance's text: float32 [T] at RATE Hz."""

ROOM_TONE = -75.0
"""Level of the noise under the whole stream, dB relative to full scale: that of the English recordings' own pauses."""
_TRIES = 10


def bundled_streams(
    split: Literal["train", "test"],
    target: str = "es",
    source: str = "en",
    *,
    count: int = 100,
    seconds: tuple[float, float] = (10.0, 30.0),
    pauses: tuple[float, float] = (0.2, 1.2),
    seed: int = 0,
    max_prompt_seconds: float = 8.0,
    held_out: float = 0.27,
    folder: str | Path | None = None,
    speak: Speak | None = None,
) -> list[Stream]:
    """The first `count` of `draw_streams`, in memory: about 64 kB for a second."""
    drawn = draw_streams(
        split,
        target,
        source,
        seconds=seconds,
        pauses=pauses,
        seed=seed,
        max_prompt_seconds=max_prompt_seconds,
        held_out=held_out,
        folder=folder,
        speak=speak,
    )
    return list(islice(drawn, count))


def draw_streams(
    split: Literal["train", "test"],
    target: str = "es",
    source: str = "en",
    *,
    seconds: tuple[float, float] = (10.0, 30.0),
    pauses: tuple[float, float] = (0.2, 1.2),
    seed: int = 0,
    max_prompt_seconds: float = 8.0,
    held_out: float = 0.27,
    folder: str | Path | None = None,
    speak: Speak | None = None,
) -> Iterator[Stream]:
    """Streams without end, each drawn from (seed, its number).

    split: which prompts; "test" is a fraction `held_out` of all recordings, the same for every seed, length and target
    language, and no prompt or text of it is in "train". seconds: least and greatest length of a stream; (60, 60) gives
    exactly 60 s. pauses: least and greatest pause in seconds, one after each prompt. max_prompt_seconds: longest prompt
    to use, by its source recording. folder: a built corpus in place of the bundled one. speak: says the prompts in
    place of the recordings.

    Raises ValueError for a language without recordings and for lengths that the prompts do not fill.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", got {split!r}')
    low, high = (round(s * RATE) for s in seconds)
    if not 0 < low <= high:
        raise ValueError(f"seconds must be (least, greatest) with 0 < least <= greatest, got {seconds}")
    _check_pauses(pauses)
    pairs = prompt_pairs(split, target, source, held_out, max_prompt_seconds, folder)
    return _drawn(f"{source}-{target}/{split}/{seed}", pairs, low, high, pauses, seed, speak or _recordings())


def prompt_pairs(
    split: Literal["train", "test"],
    target: str = "es",
    source: str = "en",
    held_out: float = 0.27,
    max_prompt_seconds: float = 8.0,
    folder: str | Path | None = None,
) -> list[tuple[Utterance, Utterance]]:
    """The (source, target) recordings of a split that streams are laid out from.

    Single letters, which mostly read the same in both languages, and texts without a letter are left out.
    """
    speech = bundled_speech() if folder is None else corpus(folder)
    for language in (source, target):
        if not any(u.language == language for u in speech):
            known = ", ".join(sorted({u.language for u in speech}))
            raise ValueError(f"no recordings in {language!r}, only {known}; tools/build_corpus.py builds others")
    # All languages and lengths take part in the split, so that it depends on nothing that is chosen here.
    train, test = split_by_key(speech, held_out, seed=0)
    return [
        (a, b)
        for a, b in parallel(train if split == "train" else test, source, target)
        if a.duration <= max_prompt_seconds and _letters(a.text) > 1 and _letters(b.text) > 0
    ]


def build_stream(
    id: str,
    prompts: Sequence[tuple[np.ndarray, Utterance, Utterance]],
    pauses: tuple[float, float],
    rng: np.random.Generator,
    *,
    seconds: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
) -> Stream:
    """The stream in which each prompt's waveform (float32 [T], RATE Hz) is heard and followed by a pause.

    A prompt is (waveform, source utterance, target utterance); the waveform need not be the source's own recording.
    pauses: least and greatest in seconds, drawn by `rng`. seconds: silence fills a shorter stream up to this length.
    Silence around each prompt is cut off, of the target's recording too (see `trimmed`).

    Raises ValueError for no prompts and a silent one.
    """
    _check_pauses(pauses)
    cut = [_cut(wav, source) for wav, source, _ in prompts]
    drawn = [round(p * RATE) for p in rng.uniform(*pauses, size=len(cut))]
    pairs = [(source, target) for _, source, target in prompts]
    return _laid_out(id, cut, drawn, pairs, rng, round(seconds * RATE), dict(metadata or {}))


def _drawn(
    name: str,
    pairs: Sequence[tuple[Utterance, Utterance]],
    low: int,
    high: int,
    pauses: tuple[float, float],
    seed: int,
    speak: Speak,
) -> Iterator[Stream]:
    """Lengths in samples. Prompts are taken in a drawn order until the first that no longer fits."""
    index = 0
    while True:
        rng = np.random.default_rng([seed, index])
        goal = int(rng.integers(low, high + 1))
        cut: list[np.ndarray] = []
        silences: list[int] = []
        chosen: list[tuple[Utterance, Utterance]] = []
        length = misses = 0
        for k in rng.permutation(len(pairs)):
            wav = _cut(speak(pairs[k][0], rng), pairs[k][0])
            pause = round(float(rng.uniform(*pauses)) * RATE)
            if length + len(wav) + pause > goal:
                misses += 1
                if length >= low or (chosen and misses == _TRIES):
                    break
                continue
            cut.append(wav)
            silences.append(pause)
            chosen.append(pairs[k])
            length += len(wav) + pause
        if not chosen or (length < low and not misses):
            raise ValueError(
                f"stream {name}/{index:04d} is to last {low / RATE:g} to {high / RATE:g} s, which {len(pairs)} prompts "
                f"of {sum(a.duration for a, _ in pairs):.0f} s together do not fill; choose other lengths"
            )
        yield _laid_out(f"{name}/{index:04d}", cut, silences, chosen, rng, low, {})
        index += 1


def _laid_out(
    id: str,
    cut: Sequence[np.ndarray],
    pauses: Sequence[int],
    pairs: Sequence[tuple[Utterance, Utterance]],
    rng: np.random.Generator,
    at_least: int,
    metadata: dict[str, Any],
) -> Stream:
    """Waveforms that are cut already, [T] each, with pauses in samples."""
    if not cut:
        raise ValueError(f"stream {id!r}: no prompts; give one or more")
    total = max(at_least, sum(map(len, cut)) + sum(pauses))
    wav = rng.standard_normal(total, dtype=np.float32) * np.float32(10 ** (ROOM_TONE / 20))
    units, at = [], 0
    for speech, pause, (source, target) in zip(cut, pauses, pairs, strict=True):
        wav[at : at + len(speech)] += speech
        end = at + len(speech)
        said = spoken(target)
        units.append(Unit(at / RATE, end / RATE, target.text, source.text, said.duration, said))
        at = end + pause
    source, target = pairs[0]
    return Stream(
        id=id,
        audio=AudioClip(array=wav, sample_rate=RATE),
        seconds=total / RATE,
        units=tuple(units),
        source_language=source.language,
        target_language=target.language,
        metadata={"prompts": " ".join(a.key for a, _ in pairs), **metadata},
    )


_spoken: dict[str, AudioClip] = {}


def spoken(utterance: Utterance) -> AudioClip:
    """The recording without silence around its speech, by reference. Decoded once per process to find where that is."""
    key = utterance.clip.key
    if key not in _spoken:
        try:
            first, end = speech_in(utterance.clip.load(RATE))
        except ValueError as error:
            raise ValueError(f"{utterance.id}: {error}") from error
        _spoken[key] = replace(utterance.clip, start=utterance.clip.start + first / RATE, duration=(end - first) / RATE)
    return _spoken[key]


def recording_seconds(utterance: Utterance) -> float:
    """How long the recording's speech lasts, without silence around it."""
    duration = spoken(utterance).duration
    assert duration is not None
    return duration


def _recordings() -> Speak:
    """The recordings themselves, each decoded once."""
    known: dict[str, np.ndarray] = {}

    def speak(utterance: Utterance, rng: np.random.Generator) -> np.ndarray:
        if utterance.id not in known:
            known[utterance.id] = utterance.clip.load(RATE)
        return known[utterance.id]

    return speak


def _cut(wav: np.ndarray, utterance: Utterance) -> np.ndarray:
    try:
        return trimmed(wav)
    except ValueError as error:
        raise ValueError(f"{utterance.id}: {error}") from error


def _letters(text: str) -> int:
    return sum(c.isalnum() for c in text)


def _check_pauses(pauses: tuple[float, float]) -> None:
    if not 0 <= pauses[0] <= pauses[1]:
        raise ValueError(f"pauses must be (least, greatest) in seconds with 0 <= least <= greatest, got {pauses}")

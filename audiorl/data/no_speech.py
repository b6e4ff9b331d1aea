"""Recordings in which nobody speaks: what a recogniser writes for them, it makes up.

Their reference is "", which rewards and evaluations read as: nothing is to be written. A manifest says so with an empty
`text` and `"task": "no_speech"`; any other empty transcript is an error of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from audiorl.audio import AUDIO_SUFFIXES, AudioClip, seconds
from audiorl.data.augment import add_noise
from audiorl.data.prompts import asr_prompt
from audiorl.data.rows import files_below
from audiorl.types import Sample

Kind = Literal["silence", "white", "pink", "hum", "clicks"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TRAINED: tuple[Kind, ...] = ("silence", "white", "pink")
"""The kinds that training uses; hum and clicks are only measured."""
LEVELS = (-60.0, -40.0, -20.0)
"""dB of full scale: root mean square, of clicks the peak; digital silence has none."""
TASK = "no_speech"
RATE = 16_000
SHORTEST, LONGEST = 2.0, 8.0
"""Seconds."""


def no_speech_samples(
    count: int,
    kinds: Sequence[Kind] = KINDS,
    seed: int = 0,
    music: str | Path | None = None,
    question: str = "",
    languages: Sequence[str] = (),
) -> list[Sample]:
    """`count` requests for a transcript of 2 to 8 s without speech, all kinds and levels in turn.

    seed: of lengths and noise; equal seeds give equal clips. music: a folder of recordings without voices, such as
    music on hold, of which as many parts are added as there are clips of each kind. question: asked in place of the
    usual request. languages: which the usual requests name in turn. metadata: {"kind", "level"}.
    """
    if count < 1:
        raise ValueError(f"no speech: give at least 1 clip, got {count}")
    pairs: list[tuple[Kind, float | None]] = [("silence", None)] if "silence" in kinds else []
    pairs += product((kind for kind in kinds if kind != "silence"), LEVELS)
    files = files_below(Path(music), *AUDIO_SUFFIXES) if music else []
    if music and not files:
        raise ValueError(f"{music}: no recordings ({', '.join(AUDIO_SUFFIXES)}) in this folder")
    samples: list[Sample] = []
    language = cycle(languages or ("",))

    def add(id: str, clip: AudioClip, kind: str, level: float | None) -> None:
        request = asr_prompt(clip, next(language), ask=question)
        samples.append(Sample(id, request, ("",), task=kind, metadata={"kind": kind, "level": level}))

    for number, (kind, level) in enumerate(islice(cycle(pairs), count)):
        rng = np.random.default_rng((seed, number))
        wav = sound(kind, rng.uniform(SHORTEST, LONGEST), level, rng)
        name = kind if level is None else f"{kind} {level:g} dB"
        add(f"no-speech/{number}/{name}", AudioClip(array=wav, sample_rate=RATE), kind, level)
    for number in range(max(1, count // len(kinds)) if music else 0):
        rng = np.random.default_rng((seed, number, 1))
        file = files[number % len(files)]
        length = seconds(AudioClip(path=str(file)))
        duration = min(length, rng.uniform(SHORTEST, LONGEST))
        clip = AudioClip(path=str(file), start=rng.uniform(0, length - duration), duration=duration)
        add(f"no-speech/music/{number}/{file.name}@{clip.start:.2f}", clip, "music", None)
    return samples


def sound(kind: Kind, duration: float, level: float | None, rng: np.random.Generator) -> np.ndarray:
    """[T] float32 at RATE Hz. level: see LEVELS, None only for silence.

    hum: 50 Hz and its harmonics, as of a bad cable. clicks: about three impulses a second.
    """
    length = round(duration * RATE)
    if kind == "silence":
        return np.zeros(length, np.float32)
    assert level is not None
    wav: np.ndarray
    if kind in ("white", "pink"):
        tone = np.full(length, 1e-6, np.float32)  # what the noise is measured against
        wav = add_noise(tone, -120.0, rng, color=float(kind == "pink")) - tone
    elif kind == "hum":
        time = np.arange(length) / RATE
        harmonics = np.arange(1, 7)[:, None]
        phases = rng.uniform(0, 2 * np.pi, (6, 1))
        wav = (np.sin(2 * np.pi * 50 * harmonics * time + phases) / harmonics).sum(0)
    elif kind == "clicks":
        wav = np.zeros(length)
        for start in rng.integers(0, max(1, length - 80), size=max(1, round(3 * duration))):
            wav[start : start + 80] += rng.standard_normal(80)[: length - start] * np.exp(-np.arange(80) / 16)
    else:
        raise ValueError(f"no kind of sound is called {kind!r}; choose from {', '.join(KINDS)}")
    loudness = np.abs(wav).max() if kind == "clicks" else np.sqrt(np.mean(np.square(wav, dtype=np.float64)))
    return np.clip(wav * 10 ** (level / 20) / loudness, -1, 1).astype(np.float32)

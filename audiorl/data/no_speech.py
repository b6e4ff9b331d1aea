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

from audiorl.audio import AudioClip, seconds
from audiorl.data.augment import add_noise
from audiorl.data.prompts import asr_prompt
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
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")


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
    samples = []
    language = cycle(languages or ("",))
    for number, (kind, level) in enumerate(islice(cycle(pairs), count)):
        rng = np.random.default_rng((seed, number))
        wav = sound(kind, rng.uniform(SHORTEST, LONGEST), level, rng)
        name = kind if level is None else f"{kind} {level:g} dB"
        clip = AudioClip(array=wav, sample_rate=RATE)
        samples.append(_sample(f"no-speech/{number}/{name}", clip, kind, level, next(language), question))
    for number, clip in enumerate(_music(music, max(1, count // len(kinds)), seed) if music else ()):
        name = f"{Path(str(clip.path)).name}@{clip.start:.2f}"
        samples.append(_sample(f"no-speech/music/{number}/{name}", clip, "music", None, next(language), question))
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


def _music(folder: str | Path, count: int, seed: int) -> list[AudioClip]:
    """`count` parts of 2 to 8 s of the files in turn. Raises ValueError for a folder without any."""
    files = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{folder}: no recordings ({', '.join(SUFFIXES)}) in this folder")
    clips = []
    for number, file in enumerate(islice(cycle(files), count)):
        rng = np.random.default_rng((seed, number, 1))
        length = seconds(AudioClip(path=str(file)))
        duration = min(length, rng.uniform(SHORTEST, LONGEST))
        clips.append(AudioClip(path=str(file), start=rng.uniform(0, length - duration), duration=duration))
    return clips


def _sample(id: str, clip: AudioClip, kind: str, level: float | None, language: str, question: str) -> Sample:
    request = asr_prompt(clip, language, ask=question)
    return Sample(id, request, ("",), task=kind, metadata={"kind": kind, "level": level})

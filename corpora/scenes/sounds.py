"""Recorded sounds by class, from Debian packages: several files each, so that some can be held out.

A sound is cut where it begins, so that its onset is known to a millisecond, and where it has died away.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip

SOURCES = {
    "sonic-pi": ("sonic-pi-samples", Path("usr/share/sonic-pi/samples"), "CC0-1.0"),
    "wesnoth": ("wesnoth-1.16-data", Path("usr/share/games/wesnoth/1.16/data/core/sounds"), "GPL-2.0-or-later"),
    "tuxpaint": ("tuxpaint-stamps-default", Path("usr/share/tuxpaint/stamps/animals"), "GPL-2.0-or-later"),
}
"""Package, folder in it and licence of each source."""
LEAST_FILES = 3
"""Files that a class needs: at least two to train on and one that is held out."""
_TOMS = tuple(f"drum_tom_{pitch}_{how}.flac" for pitch in ("hi", "mid", "lo") for how in ("hard", "soft"))


@dataclass(frozen=True)
class SoundClass:
    """What is heard, the files of each source, and YAMNet's names for it."""

    files: Mapping[str, tuple[str, ...]]
    yamnet: tuple[str, ...]


def _numbered(name: str, last: int, ending: str, first: int = 1) -> tuple[str, ...]:
    return tuple(f"{name}{n}{ending}" for n in range(first, last + 1))


CLASSES: dict[str, SoundClass] = {
    "bass drum": SoundClass(
        {"sonic-pi": tuple(f"bd_{n}.flac" for n in ("808", "boom", "fat", "haus", "klub", "pure", "tek", "zome"))},
        ("Bass drum", "Drum", "Thump, thud"),
    ),
    "snare drum": SoundClass(
        {
            "sonic-pi": tuple(
                f"{n}.flac" for n in ("drum_snare_hard", "drum_snare_soft", "sn_dolf", "sn_dub", "sn_zome")
            )
        },
        ("Snare drum", "Rimshot"),
    ),
    "tom drum": SoundClass({"sonic-pi": _TOMS}, ("Drum", "Timpani")),
    "cymbal": SoundClass(
        {"sonic-pi": tuple(f"drum_{n}.flac" for n in ("cymbal_hard", "cymbal_open", "splash_hard", "splash_soft"))},
        ("Cymbal", "Hi-hat"),
    ),
    "tabla": SoundClass(
        {"sonic-pi": _numbered("tabla_tun", 3, ".flac") + _numbered("tabla_tas", 3, ".flac")}, ("Tabla",)
    ),
    "guitar": SoundClass(
        {"sonic-pi": tuple(f"guit_{n}.flac" for n in ("e_fifths", "e_slide", "em9", "harmonics"))},
        ("Guitar", "Electric guitar", "Strum", "Plucked string instrument"),
    ),
    "bell": SoundClass(
        {"sonic-pi": ("perc_bell.flac", "perc_bell2.flac", "elec_chime.flac", "elec_bell.flac")},
        ("Bell", "Chime", "Ding"),
    ),
    "robot": SoundClass({"sonic-pi": _numbered("mehackit_robot", 7, ".flac")}, ("Synthesizer", "Sound effect")),
    "synthesizer bass": SoundClass(
        {"sonic-pi": tuple(f"bass_{n}.flac" for n in ("drop_c", "hard_c", "thick_c", "trance_c", "woodsy_c"))},
        ("Bass guitar", "Synthesizer"),
    ),
    "horn": SoundClass({"wesnoth": _numbered("horn-signals/horn-", 8, ".ogg")}, ("French horn", "Trumpet", "Shofar")),
    "wolf": SoundClass(
        {"wesnoth": _numbered("wolf-growl-", 4, ".ogg") + _numbered("wolf-die-", 4, ".ogg")},
        ("Growling", "Canidae, dogs, wolves", "Dog"),
    ),
    "griffin": SoundClass(
        {"wesnoth": _numbered("gryphon-hit-", 3, ".ogg") + _numbered("gryphon-shriek-", 2, ".ogg")},
        ("Bird", "Squawk", "Screaming"),
    ),
    "horse": SoundClass(
        {"wesnoth": (*_numbered("horse-hit-", 3, ".ogg"), "horse-die.ogg"), "tuxpaint": ("mammals/equines/horse.ogg",)},
        ("Horse", "Neigh, whinny"),
    ),
    "man": SoundClass(
        {"wesnoth": _numbered("human-hit-", 5, ".ogg") + _numbered("human-die-", 3, ".ogg")},
        ("Grunt", "Shout", "Groan"),
    ),
    "woman": SoundClass(
        {"wesnoth": _numbered("human-female-hit-", 3, ".ogg") + _numbered("human-female-die-", 3, ".ogg")},
        ("Screaming", "Gasp", "Shout"),
    ),
    "bow": SoundClass(
        {
            "wesnoth": (
                "bow.ogg",
                "bow-miss.ogg",
                "bow-puny.ogg",
                "bow-puny-miss.ogg",
                "crossbow.ogg",
                "crossbow-miss.ogg",
            )
        },
        ("Arrow", "Whoosh, swoosh, swish"),
    ),
    "snake": SoundClass({"wesnoth": ("hiss.wav", "hiss-big.wav", "hiss-die.wav", "hiss-hit.wav")}, ("Hiss", "Snake")),
    "flame": SoundClass(
        {"wesnoth": ("fire.wav", "flame-big.ogg", "flame-big-miss.ogg", "torch.ogg", "melee-fire.ogg")},
        ("Fire", "Crackle"),
    ),
    "bones": SoundClass(
        {"wesnoth": _numbered("skeleton-hit-", 3, ".ogg") + _numbered("skeleton-die-", 2, ".ogg")}, ("Crack", "Clatter")
    ),
    "cow": SoundClass(
        {"tuxpaint": tuple(f"mammals/bovines/{n}.ogg" for n in ("cow", "cow_white", "bull", "bison"))},
        ("Moo", "Cattle, bovinae"),
    ),
    "sheep": SoundClass(
        {"tuxpaint": tuple(f"mammals/bovines/{n}.ogg" for n in ("sheep", "sheep_lamb", "goat", "mountaingoat", "ram"))},
        ("Sheep", "Bleat", "Goat"),
    ),
    "pig": SoundClass(
        {"tuxpaint": tuple(f"mammals/{n}.ogg" for n in ("pig", "pig_golden", "pig_golden2"))}, ("Pig", "Oink")
    ),
    "duck": SoundClass(
        {"tuxpaint": tuple(f"birds/{n}.ogg" for n in ("duck", "drake", "gander"))}, ("Duck", "Quack", "Goose", "Honk")
    ),
    "songbird": SoundClass(
        {"tuxpaint": tuple(f"birds/{n}.ogg" for n in ("blackbird", "lark", "cuckoo"))},
        ("Bird vocalization, bird call, bird song", "Chirp, tweet", "Bird"),
    ),
}


@dataclass(frozen=True)
class SoundFile:
    """A recording of a class: `file` is its name in rows, SOURCE/NAME."""

    name: str
    file: str
    licence: str
    wave: NDArray[np.float32]
    """[T], mono, from its onset on, with a peak of 1."""


def read_sounds(root: Path, sources: Sequence[str], rate: int, max_seconds: float) -> list[SoundFile]:
    """Return the sounds of all classes that the sources have enough files of; packages are unpacked below `root`.

    Raises ValueError for a file that is missing or silent, and where fewer than two classes are left.
    """
    sounds: list[SoundFile] = []
    for name, kind in CLASSES.items():
        files = [(source, file) for source in sources for file in kind.files.get(source, ())]
        if len(files) < LEAST_FILES:
            continue
        for source, file in files:
            package, folder, licence = SOURCES[source]
            path = root / folder / file
            if not path.is_file():
                raise ValueError(f"{path}: missing; is {package} installed or unpacked here?")
            wave = cut(AudioClip(path=str(path)).load(rate), rate, max_seconds)
            if not len(wave):
                raise ValueError(f"{path}: silent; the package is not the one that is meant")
            sounds.append(SoundFile(name, f"{source}/{file}", licence, wave))
    if len({s.name for s in sounds}) < 2:
        raise ValueError(f"--sources {' '.join(sources)}: fewer than two classes with {LEAST_FILES} files; name more")
    return sounds


def cut(wave: NDArray[np.float32], rate: int, max_seconds: float) -> NDArray[np.float32]:
    """Cut a sound from 2 ms before it first reaches a tenth of its peak to where it stays 50 dB below, at most
    `max_seconds` long, with a peak of 1 and faded ends; empty for silence."""
    peak = float(np.abs(wave).max(initial=0.0))
    if peak < 1e-4:
        return np.zeros(0, np.float32)
    loud = np.abs(wave) / peak
    ramp = rate // 500
    start = max(int(np.argmax(loud >= 0.1)) - ramp, 0)
    end = int(np.flatnonzero(loud >= 10 ** (-50 / 20))[-1]) + 1
    out = (wave[start : min(end, start + round(max_seconds * rate))] / peak).astype(np.float32)
    fade = min(rate // 20, len(out) // 4)
    out[:ramp] *= np.linspace(0, 1, ramp, endpoint=False, dtype=np.float32)[: len(out)]
    out[len(out) - fade :] *= np.linspace(1, 0, fade, dtype=np.float32)
    return out / max(float(np.abs(out).max()), 1e-6)


def split_files(
    sounds: Sequence[SoundFile], seed: int
) -> tuple[dict[str, list[SoundFile]], dict[str, list[SoundFile]]]:
    """Return the sounds by class, (to train on, held out): of each class a drawn third of its files is held out."""
    train: dict[str, list[SoundFile]] = {}
    held_out: dict[str, list[SoundFile]] = {}
    for name in dict.fromkeys(s.name for s in sounds):
        files = sorted((s for s in sounds if s.name == name), key=lambda s: s.file)
        random.Random(f"{seed}/files/{name}").shuffle(files)
        count = max(round(len(files) / 3), 1)
        held_out[name], train[name] = files[:count], files[count:]
    return train, held_out


def split_combinations(names: Sequence[str], share: float, seed: int) -> set[frozenset[str]]:
    """Return the pairs of classes that no training scene has: a drawn share of all, at least one."""
    ordered = sorted(names)
    pairs = [frozenset((a, b)) for i, a in enumerate(ordered) for b in ordered[i + 1 :]]
    random.Random(f"{seed}/combinations").shuffle(pairs)
    return set(pairs[: max(round(share * len(pairs)), 1)])

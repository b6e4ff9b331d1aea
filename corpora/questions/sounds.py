"""Questions about the sounds of animals and things that come with the stamps of Tux Paint.

A file's name says what is heard. Each file serves one split only, so the animals and things of the held-out split occur
in no training question: naming them takes what a model knew before. Counting and loudness carry over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import soxr

from corpora.questions.choices import Draft
from corpora.sources.voices import RATE, read_audio

LICENCE = "GPL-2.0-or-later"
STAMPS = Path("usr/share/tuxpaint/stamps")
ANIMALS = {
    "frog": "animals/amphibians/frog",
    "blackbird": "animals/birds/blackbird",
    "crow": "animals/birds/crow",
    "cuckoo": "animals/birds/cuckoo",
    "duck": "animals/birds/duck",
    "goose": "animals/birds/gander",
    "hen": "animals/birds/hen",
    "owl": "animals/birds/owl",
    "penguin": "animals/birds/penguin",
    "rooster": "animals/birds/rooster",
    "seagull": "animals/birds/seagull",
    "toucan": "animals/birds/tucan",
    "turkey": "animals/birds/turkey",
    "bee": "animals/insects/bee",
    "grasshopper": "animals/insects/grasshopper",
    "mosquito": "animals/insects/mosquito",
    "chimpanzee": "animals/mammals/apes/chimp",
    "gorilla": "animals/mammals/apes/gorilla",
    "dolphin": "animals/mammals/aquatic/dolphin",
    "sea lion": "animals/mammals/aquatic/sea_lion",
    "whale": "animals/mammals/aquatic/whale",
    "bear": "animals/mammals/bears/bear",
    "bison": "animals/mammals/bovines/bison",
    "cow": "animals/mammals/bovines/cow",
    "goat": "animals/mammals/bovines/goat",
    "sheep": "animals/mammals/bovines/sheep",
    "camel": "animals/mammals/camel/camel",
    "lion": "animals/mammals/cats/lion",
    "tiger": "animals/mammals/cats/tiger",
    "deer": "animals/mammals/deer/deer",
    "dog": "animals/mammals/dogs/dog",
    "fox": "animals/mammals/dogs/fox",
    "elephant": "animals/mammals/elephant",
    "donkey": "animals/mammals/equines/donkey",
    "horse": "animals/mammals/equines/horse",
    "zebra": "animals/mammals/equines/zebra",
    "hippopotamus": "animals/mammals/hippopotamus",
    "pig": "animals/mammals/pig",
    "mouse": "animals/mammals/rodents/mouse",
    "squirrel": "animals/mammals/rodents/squirrel",
    "koala": "animals/marsupials/koala",
    "cat": "seasonal/halloween/blackcat",
}
THINGS = {
    "camera": "hobbies/camera_35mm",
    "cymbal": "hobbies/music/percussion/cymbal_crash",
    "drum": "hobbies/music/percussion/drum_tomtom_floor",
    "washing machine": "household/Washing-machine",
    "scissors": "household/arttools/scissors_small_closed",
    "drinking glass": "household/dishes/glass",
    "kettle": "household/kettle",
    "rubber duck": "household/rubberduck",
    "toilet": "household/toilet",
    "hammer": "household/tools/hammer",
    "metal mallet": "household/tools/mallet_metal",
    "saw": "household/tools/saw",
    "vacuum cleaner": "household/vacuum_cleaner",
    "thunder": "naturalforces/lightningbolt",
    "fireworks": "seasonal/newyears/fireworks",
    "rocket": "space/apollo_lander",
    "fire engine": "vehicles/emergency/firetruck",
    "submarine": "vehicles/ship/cartoon/bathyscape",
    "bugle": "military/final-roll-call",
    "racing car": "town/flags/checkeredflag",
}
"""Names to files below STAMPS, without their suffix .ogg."""
SOURCES_OF_SOUND = ("an animal", "an object", "a person", "a musical instrument")
COUNTS = ("one", "two", "three", "four")
LOUDNESS = ("it gets louder", "it gets quieter", "it stays the same", "it swells and fades")
MAX_SECONDS = 5.0

Wave = Callable[[], np.ndarray]


def split_names(names: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """(training, held-out) names: a drawn third is held out."""
    order = sorted(names)
    random.Random(f"{seed}/sounds").shuffle(order)
    count = round(len(order) / 3)
    return order[count:], order[:count]


def sound_drafts(
    split: str, count: int, seed: int, root: Path, people: Sequence[tuple[str, Wave]], instruments: Sequence[Draft]
) -> list[Draft]:
    """About `count` questions: which animal, which thing, what kind of sound, how many times, how the loudness changes.

    `root`: the folder below which tuxpaint-stamps-default is unpacked. `people`: (id, clip) of speech by the split's
    speakers under the same licence. `instruments`: the split's pieces of music for one instrument.
    """
    part = 0 if split == "train" else 1
    animals, things = (split_names(list(names), seed)[part] for names in (ANIMALS, THINGS))
    files = {name: root / STAMPS / f"{path}.ogg" for name, path in (ANIMALS | THINGS).items()}
    for name in (*animals, *things):
        if not files[name].exists():
            raise ValueError(f"{files[name]}: missing; is tuxpaint-stamps-default unpacked here?")
    drafts: list[Draft] = []

    def add(kind: str, question: str, answer: str, wave: Wave, source: str, **more: str | tuple[str, ...]) -> None:
        number = sum(d.kind == kind for d in drafts)
        id = f"sound-{kind}-{split}-{number:04d}"
        drafts.append(Draft(id, "sound", kind, question, answer, partial(_varied, wave, id), (source,), **more))  # type: ignore[arg-type]

    per_kind = count // 5
    for kind, names in (("animal", animals), ("thing", things)):
        what = "Which animal is it?" if kind == "animal" else "What makes this sound?"
        for n in range(per_kind):
            name = names[n % len(names)]
            wave: Wave = partial(read_audio, files[name])
            add(kind, what, name, wave, str(files[name].relative_to(root)), licence=LICENCE, difficulty="easy")
    for n in range(per_kind):
        answer = SOURCES_OF_SOUND[n % 4]
        rng = random.Random(f"{seed}/source/{split}/{n}")
        licence = LICENCE
        if answer == "a person":
            source, wave = people[rng.randrange(len(people))]
        elif answer == "a musical instrument":
            piece = instruments[n // 4 % len(instruments)]
            source, wave, licence = piece.sources[0], piece.wave, piece.licence
        else:
            path = files[rng.choice(animals if answer == "an animal" else things)]
            source, wave = str(path.relative_to(root)), partial(read_audio, path)
        question = "What makes this sound?"
        add("source", question, answer, wave, source, licence=licence, difficulty="easy", choices=SOURCES_OF_SOUND)
    for n in range(per_kind):
        answer, path = COUNTS[n % 4], files[random.Random(f"{seed}/count/{split}/{n}").choice([*animals, *things])]
        wave = partial(repeated, path, n % 4 + 1, f"{seed}/{split}/{n}")
        question, source = "How many times is the sound played?", str(path.relative_to(root))
        add("count", question, answer, wave, source, licence=LICENCE, difficulty="medium", choices=COUNTS)
    for n in range(per_kind):
        answer, path = LOUDNESS[n % 4], files[random.Random(f"{seed}/loudness/{split}/{n}").choice([*animals, *things])]
        wave = partial(with_loudness, path, answer)
        question, source = "How does the loudness change?", str(path.relative_to(root))
        add("loudness", question, answer, wave, source, licence=LICENCE, difficulty="medium", choices=LOUDNESS)
    return drafts


def repeated(path: Path, times: int, seed: str) -> np.ndarray:
    """Return the loudest half second of a file `times` times with silence between."""
    rng = random.Random(seed)
    wav = read_audio(path)
    length = min(len(wav), RATE // 2)
    energy = np.cumsum(np.concatenate([[0.0], wav.astype(np.float64) ** 2]))
    start = int(np.argmax(energy[length:] - energy[:-length]))
    event = _faded(wav[start : start + length])
    pieces = [np.zeros(round(rng.uniform(0.1, 0.5) * RATE), np.float32)]
    for _ in range(times):
        pieces += [event, np.zeros(round(rng.uniform(0.35, 0.8) * RATE), np.float32)]
    return np.concatenate(pieces)


def with_loudness(path: Path, change: str, seconds: float = 4.0) -> np.ndarray:
    """Return a file looped to `seconds`, evened out, with a change of 30 dB over its length."""
    wav = read_audio(path)
    loop = np.tile(_faded(wav), -(-round(seconds * RATE) // len(wav)))[: round(seconds * RATE)]
    half = RATE // 20
    energy = np.cumsum(np.pad(loop.astype(np.float64) ** 2, (half + 1, half), mode="edge"))
    level = np.sqrt((energy[2 * half :] - energy[: -2 * half])[: len(loop)] / (2 * half)) + 1e-3
    loop = loop / level * 0.1
    t = np.linspace(0, 1, len(loop))
    curve = {
        "it gets louder": t,
        "it gets quieter": 1 - t,
        "it stays the same": np.full_like(t, 0.7),
        "it swells and fades": 1 - np.abs(2 * t - 1),
    }[change]
    return (np.clip(loop, -1, 1) * 10 ** (1.5 * (curve - 1))).astype(np.float32)


def _varied(wave: Wave, seed: str) -> np.ndarray:
    """Return the clip at another speed (up to 6 %) and level, with a little noise, at most MAX_SECONDS long."""
    rng = np.random.default_rng(list(seed.encode()))
    wav = wave()
    wav = soxr.resample(wav, RATE, round(RATE * rng.uniform(0.94, 1.06)))[: round(MAX_SECONDS * RATE)]
    wav = wav * (rng.uniform(0.25, 0.8) / max(float(np.abs(wav).max()), 1e-6))
    noise = rng.standard_normal(len(wav)) * np.sqrt(np.mean(wav**2)) * 10 ** (-rng.uniform(25, 40) / 20)
    return np.clip(wav + noise, -1, 1).astype(np.float32)


def _faded(wav: np.ndarray, milliseconds: int = 10) -> np.ndarray:
    """Fade the ends of a clip: it neither starts nor stops with a click."""
    ramp = np.minimum(np.arange(len(wav)), np.arange(len(wav))[::-1]) / (RATE * milliseconds / 1000)
    return (wav * np.minimum(ramp, 1)).astype(np.float32)

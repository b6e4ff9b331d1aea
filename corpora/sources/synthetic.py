"""Synthetic speech: espeak-ng speaks the texts of the recordings in a corpus, and those of a file, in many voices."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from audiorl.data.corpus import normalised
from corpora.sources.voices import SourceRecording, Voice

SOURCE = "synthetic"
SPEAKER_PREFIX = "espeak-ng "
"""How the names of its speakers begin."""
INTRODUCTION = """\
espeak-ng (https://github.com/espeak-ng/espeak-ng) spoke the texts of the manifest. This speech is synthetic."""
SPEEDS = (120, 200)
"""Words a minute, minimum and maximum."""
PITCHES = (30, 70)
"""Minimum and maximum of espeak-ng's pitch, which is 0 to 99."""


@dataclass(frozen=True)
class Text:
    """A text to speak. `licence` is that of the text, which is also that of the speech."""

    key: str
    language: str
    text: str
    translation: str
    licence: str


def texts_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[Text]:
    """Return the texts of rows of a manifest, each once a language."""
    texts: dict[tuple[str, str], Text] = {}
    for row in rows:
        text = Text(row["key"], row["language"], row["text"], row["translation"], row["licence"])
        texts.setdefault((text.language, normalised(text.text)), text)
    return list(texts.values())


def read_texts(path: Path, licence: str) -> list[Text]:
    """Texts of a file with the columns language, text and, optionally, English text, separated by tabs."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        language, *columns = line.split("\t")
        if len(columns) not in (1, 2) or not language or not columns[0].strip():
            raise ValueError(f"{path}: row {number}: not LANGUAGE, tab, TEXT and optionally tab, ENGLISH TEXT")
        translation = columns[1].strip() if len(columns) == 2 else ""
        texts.append(Text(f"texts/{path.stem}-{number:06d}", language, columns[0].strip(), translation, licence))
    return texts


def synthetic_voices(texts: Sequence[Text], speakers: int, clips: int) -> list[Voice]:
    """One entry a language, in which `speakers` voices of espeak-ng speak each text `clips` times."""
    if speakers < 1 or clips < 1:
        raise ValueError(f"synthetic speakers and clips must be at least 1, got {speakers} and {clips}")
    digest = sha256(repr(texts).encode()).hexdigest()[:16]
    return [
        Voice(
            source=SOURCE,
            folder=f"synthetic-{language}",
            language=language,
            speaker="espeak-ng",
            licence="",
            credit="Spoken by espeak-ng.",
            packages=(),
            recordings=partial(_spoken, [t for t in texts if t.language == language], language, speakers, clips),
            licence_text=None,
            settings={"texts": digest, "speakers": speakers, "clips": clips},
        )
        for language in sorted({t.language for t in texts})
    ]


def _spoken(texts: Sequence[Text], language: str, speakers: int, clips: int, root: Path) -> Iterator[SourceRecording]:
    from audiorl.data.synth import synthesize, voices

    names = sorted(voices(language), key=lambda name: sha256(name.encode()).digest())[:speakers]
    for text in texts:
        for number in range(clips):
            # The voice of a text does not depend on which other texts there are.
            rng = random.Random(f"{language}/{text.key}/{number}")
            voice, speed, pitch = rng.choice(names), rng.randint(*SPEEDS), rng.randint(*PITCHES)
            read = partial(synthesize, text.text, language, voice=voice, speed=speed, pitch=pitch)
            name = f"{text.key}-{number}" if clips > 1 else text.key
            speaker = f"{SPEAKER_PREFIX}{voice}"
            yield SourceRecording(name, text.key, text.text, text.translation, read, "", speaker, text.licence)

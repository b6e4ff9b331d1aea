"""Parallel human speech: the recordings that come with the package, and folders that `audiorl data build` writes.

The same `key` is the same prompt in every language::

    speech = bundled_speech(("en", "es"))
    train, held_out = split_by_key(speech, held_out_fraction=0.2, seed=0)
    pairs = parallel(held_out, "en", "es")      # [(Utterance en/activated, Utterance es/activated), …]

Sources and licences are in the folder's ATTRIBUTION.md (CC BY-SA 3.0 for the bundled languages).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.data.rows import read_checked
from audiorl.data.schema import check
from audiorl.data.schema.results import RecordingRow
from audiorl.data.sets import draw
from audiorl.languages import language_code


@dataclass(frozen=True)
class Utterance:
    """One recording with its transcript, from a row of a manifest.

    `id` is unique; `key` is shared by all recordings of the same prompt, in any language. `duration` in seconds.
    `translation`: the text in English, "" where there is none. `licence`: an SPDX identifier where there is one.
    """

    id: str
    key: str
    language: str
    text: str
    clip: AudioClip
    duration: float
    speaker: str
    translation: str = ""
    licence: str = ""


def bundled_speech(
    languages: Sequence[str] = ("en", "es", "fr"), min_seconds: float = 0.0, max_seconds: float | None = None
) -> list[Utterance]:
    """Return the package's own recordings in these languages, in the order of the manifest."""
    folder = Path(str(resources.files("audiorl"))) / "assets" / "speech"
    return corpus(folder, languages, min_seconds, max_seconds)


def unseen_speakers(folder: str | Path | None = None) -> list[Utterance]:
    """Return the test set of five speakers that the bundled recordings lack (one English, two Spanish, two French).

    A clone of the repository holds them in `unseen_speakers/`; the installed package does not, since some are under the
    GPL. `folder`: where `audiorl data build FOLDER --unseen` wrote them.
    """
    if folder is None:
        folder = Path(str(resources.files("audiorl"))).parent / "unseen_speakers"
        if not (folder / "manifest.jsonl").exists():
            raise ValueError(
                f"{folder}: the recordings of unseen speakers are not installed with the package; write them with "
                "`audiorl data build FOLDER --unseen` and give that folder"
            )
    return corpus(folder)


def corpus(
    folder: str | Path,
    languages: Sequence[str] | None = None,
    min_seconds: float = 0.0,
    max_seconds: float | None = None,
) -> list[Utterance]:
    """Return a built folder's utterances, all languages by default, that last from `min_seconds` to `max_seconds`."""
    folder = Path(folder)
    manifest = folder / "manifest.jsonl"
    if not manifest.exists():
        raise ValueError(f"{manifest}: missing; build the folder with `audiorl data build`")
    utterances = []
    for _, row in read_checked(manifest, lambda row: check(row, RecordingRow)):
        part: dict[str, Any] = {} if row.start is None else {"start": row.start, "duration": row.duration}
        clip = AudioClip(path=str(folder / row.audio), channel=row.channel, **part)
        about = (row.duration, row.speaker, row.translation, row.licence)
        utterances.append(Utterance(row.id, row.key or row.id, row.language, row.text, clip, *about))
    present = sorted({u.language for u in utterances})
    wanted = {language_code(language) for language in (present if languages is None else languages)}
    for language in languages or ():
        if language_code(language) not in map(language_code, present):
            known = ", ".join(present)
            raise ValueError(f"{manifest}: no language {language!r}, only {known}; `audiorl data build` builds others")
    longest = float("inf") if max_seconds is None else max_seconds
    return [u for u in utterances if language_code(u.language) in wanted and min_seconds <= u.duration <= longest]


def parallel(utterances: Iterable[Utterance], source: str, target: str) -> list[tuple[Utterance, Utterance]]:
    """Return the same prompts in two languages, as (source, target) pairs in the order of the source utterances.

    Where several voices speak one key, the n-th of the source goes with the n-th of the target.
    """
    by_key: dict[str, list[Utterance]] = {}
    sources = []
    for u in utterances:
        if u.language == target:
            by_key.setdefault(u.key, []).append(u)
        elif u.language == source:
            sources.append(u)
    waiting = {key: iter(utterances) for key, utterances in by_key.items()}
    pairs = ((u, next(waiting.get(u.key, iter(())), None)) for u in sources)
    return [(u, translation) for u, translation in pairs if translation is not None]


def split_by_key(
    utterances: Sequence[Utterance], held_out_fraction: float, seed: int = 0
) -> tuple[list[Utterance], list[Utterance]]:
    """(training, held-out) utterances such that no text held out is in training.

    All languages of a key stay together, and so do keys with an equal text but for case, accents and punctuation
    ("second" is a rank and a time). The held-out side is the smallest set of whole groups, in an order drawn by `seed`,
    that reaches the fraction. Order is kept on both sides.
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must be in [0, 1), got {held_out_fraction}")
    group_of = _group_keys(utterances)
    held_out = draw({i: group_of[u.key] for i, u in enumerate(utterances)}, held_out_fraction * len(utterances), seed)
    train = [u for i, u in enumerate(utterances) if i not in held_out]
    return train, [u for i, u in enumerate(utterances) if i in held_out]


def normalised(text: str) -> str:
    """Letters and digits in lower case without accents, words separated by one space.

    >>> normalised("Número de  BUZÓN, por favor...")
    'numero de buzon por favor'
    """
    folded = unicodedata.normalize("NFKD", text).casefold()
    words = "".join(c if c.isalnum() else " " for c in folded if not unicodedata.combining(c))
    return " ".join(words.split()) or text.strip()


def _group_keys(utterances: Iterable[Utterance]) -> dict[str, str]:
    """Key to the smallest key of its group: keys linked, directly or through others, by an equal text."""
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    first: dict[str, str] = {}
    for u in utterances:
        parent.setdefault(u.key, u.key)
        a, b = root(u.key), root(first.setdefault(normalised(u.text), u.key))
        parent[max(a, b)] = min(a, b)
    return {key: root(key) for key in parent}

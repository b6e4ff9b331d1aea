"""Hotwords: words that a recording may hold, such as names, which a recogniser reads before it listens.

A row has its own in the column `hotwords`; a file has one a line, for all rows. Distractors are words that nobody says
there, so that a model learns to listen for a word and not to write it because it is listed (Le et al. 2021, arXiv
2104.02194): half of them sound like what is said, by the edit distance of espeak-ng's phonemes, half are drawn at
random. `audiorl.data.prompts.with_hotwords` writes them into a request.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from audiorl.data.prompts import with_hotwords
from audiorl.data.schema import FieldError
from audiorl.eval.metrics.text import INVISIBLE, hotword_spans, hotword_units, normalize, units
from audiorl.types import Message, Sample

_MARKUP = re.compile(r"[<>\[\]{}|,]")
_NEAR = 3
"""Distractors by sound are drawn from so many times as many of the nearest words."""


def checked_hotwords(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words composed (NFC) and stripped. Raises FieldError for one that is no word, has markup or comes
    twice."""
    return _checked((f"hotwords[{number}]", word) for number, word in enumerate(words))


def _checked(words: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Check words with the place where each stands, the field of a FieldError."""
    found: dict[str, str] = {}
    checked = []
    for place, given in words:
        word = " ".join(unicodedata.normalize("NFC", given).split())
        if fault := _fault(word):
            raise FieldError(place, f"{given!r} {fault}", given)
        if (earlier := found.setdefault(word.casefold(), place)) != place:
            raise FieldError(place, f"{given!r} stands in {earlier} too; give it once", given)
        checked.append(word)
    return tuple(checked)


def _fault(word: str) -> str:
    if found := _MARKUP.search(word):
        return f"holds {found[0]!r}, which is markup or divides hotwords; give the word as it is said"
    if INVISIBLE.search(word) or any(unicodedata.category(c) in ("Cc", "Co", "Cn", "Cs") for c in word):
        return "holds a character that no text shows; remove it"
    return "" if any(c.isalnum() for c in word) else "has no letter; give a word"


def read_hotwords(path: str | Path) -> tuple[str, ...]:
    """Read a file with one hotword a line. Raises ValueError that names the file and the line: for one that is not
    UTF-8, holds no word, or is refused by `checked_hotwords`."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: missing; give a text file with one hotword a line")
    words: list[tuple[str, str]] = []
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        try:
            words.append((f"line {number}", line.decode().strip()))
        except UnicodeDecodeError as error:
            bad = f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8"
            raise ValueError(f"{path}, line {number}: {bad}; save the file as UTF-8") from error
    if not any(word for _, word in words):
        raise ValueError(f"{path}: no hotwords; write one a line, or leave the file out")
    try:
        return _checked((place, word) for place, word in words if word)
    except FieldError as error:
        raise ValueError(f"{path}, {error.field}: {error.message}") from error


def with_context(
    samples: Sequence[Sample],
    words: Sequence[str] = (),
    distractors: int | None = None,
    *,
    prompt: bool = True,
    seed: int = 0,
) -> list[Sample]:
    """Return the samples with their hotwords in `metadata["hotwords"]` and, if `prompt`, in their request.

    A sample's own come first; one without gets `words`. With `distractors` it gets of `words` only those that its
    reference has, and so many others: of `words` and all samples' own, none that its reference has. They are drawn by
    `seed` and id, and the list is shuffled. Raises ValueError where there are not as many.
    """
    own = [tuple(sample.metadata.get("hotwords") or ()) for sample in samples]
    if distractors is None:
        return [_with(sample, mine or tuple(words), prompt) for sample, mine in zip(samples, own, strict=True)]
    draw = _Distractors([*words, *(word for mine in own for word in mine)], distractors)
    biased = []
    for sample, mine in zip(samples, own, strict=True):
        rng = random.Random(f"{seed}:{sample.id}")
        language = sample.metadata.get("language") or sample.metadata.get("lang")
        said = draw.said(sample, language)
        mine = mine or tuple(word for word in words if word in said)
        listed = [*mine, *draw(mine, said, language, rng, sample.id)]
        rng.shuffle(listed)
        biased.append(_with(sample, tuple(listed), prompt))
    return biased


def _with(sample: Sample, words: tuple[str, ...], prompt: bool) -> Sample:
    metadata = {name: value for name, value in sample.metadata.items() if name != "hotwords"}
    *before, asked = sample.messages
    *content, last = asked.content
    request = last if isinstance(last, str) else ""
    content += [last] if request != last else []
    messages = (*before, Message(asked.role, (*content, with_hotwords(request, words if prompt else ()))))
    return replace(sample, messages=messages, metadata=metadata | ({"hotwords": list(words)} if words else {}))


class _Distractors:
    """Draws `count` words of a pool that a sample does not say."""

    def __init__(self, pool: Iterable[str], count: int):
        self.pool, self.count = tuple(dict.fromkeys(pool)), count
        self._units: dict[str | None, dict[tuple[str, ...], list[str]]] = {}
        self._sounds: dict[str | None, dict[str, str]] = {}
        self._near: dict[tuple[str | None, str], list[str]] = {}

    def said(self, sample: Sample, language: str | None) -> set[str]:
        """Return the words of the pool that a sample's reference has, however they are written."""
        if language not in self._units:
            self._units[language] = defaultdict(list)
            for word in self.pool:
                self._units[language][next(iter(hotword_units((word,), "basic", language)))].append(word)
        listed = self._units[language]
        text = units(normalize(sample.references[0] if sample.references else "", "basic", language))
        return {word for start, end in hotword_spans(text, listed) for word in listed[tuple(text[start:end])]}

    def __call__(
        self, own: Sequence[str], said: set[str], language: str | None, rng: random.Random, id: str
    ) -> list[str]:
        taken = {word.casefold() for word in (*own, *said)}
        left = {word.casefold(): word for word in self.pool if word.casefold() not in taken}
        if len(left) < self.count:
            raise ValueError(
                f"sample {id!r}: {self.count} distractors, but only {len(left)} other hotwords to draw from; give more "
                "words (--hotwords FILE), or fewer distractors"
            )
        words = list(left.values())
        nearest = {word for anchor in own for word in self._nearest(anchor, language)}
        near = [word for word in words if word in nearest]
        sounding = rng.sample(near, min(len(near), (self.count + 1) // 2))
        others = [word for word in words if word not in sounding]
        return [*sounding, *rng.sample(others, self.count - len(sounding))]

    def _nearest(self, anchor: str, language: str | None) -> list[str]:
        """Return the words of the pool that sound most like one of them."""
        if (language, anchor) not in self._near:
            if language not in self._sounds:
                try:
                    from audiorl.data.synth import phonemes  # rewards import this module

                    sounds = phonemes(self.pool, language or "en")
                except ValueError:  # no language of espeak-ng's: its letters say how a word sounds
                    sounds = [word.casefold() for word in self.pool]
                self._sounds[language] = dict(zip(self.pool, sounds, strict=True))
            sound = self._sounds[language]
            distance, most = Levenshtein.normalized_distance, _NEAR * self.count + 1
            found = process.extract(sound[anchor], sound, scorer=distance, limit=most)
            self._near[language, anchor] = [word for _, _, word in found if word != anchor]
        return self._near[language, anchor]

"""Rows to train on and to measure on, from corpora that `audiorl data build` wrote.

No text that is measured is trained on, in any language or voice, and no speaker of the unseen folders: such speakers
show what training learned beyond its own voices. Synthetic voices are trained on only.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiorl.data.corpus import Utterance, normalised, split_by_key
from audiorl.data.rows import write_json_lines
from audiorl.languages import language_code
from corpora.sources.synthetic import SPEAKER_PREFIX


@dataclass(frozen=True)
class Selection:
    """Which utterances take part: those in `languages` (None: all) of these lengths in seconds and words."""

    languages: tuple[str, ...] | None = None
    min_seconds: float = 0.4
    max_seconds: float = 8.0
    min_words: int = 1

    def refuses(self, u: Utterance) -> str | None:
        """Why an utterance takes no part; None if it does."""
        if self.languages is not None and language_code(u.language) not in map(language_code, self.languages):
            return "another language"
        if not self.min_seconds <= u.duration <= self.max_seconds:
            return "too short or too long"
        return "too few words" if len(u.text.split()) < self.min_words else None


@dataclass(frozen=True)
class Split:
    """`split` fills it in."""

    train: list[Utterance]
    held_out: list[Utterance]
    """Speakers of `train` and of no unseen folder, with texts that are not in `train`."""
    unseen: list[Utterance]
    """Speakers that are not in `train`, with texts that are not in `train`."""
    left_out: Counter[str]
    """How many utterances of the corpora are in no set, by reason."""


def split(
    utterances: Sequence[Utterance],
    unseen: Sequence[Utterance],
    held_out_fraction: float,
    selection: Selection | None = None,
    seed: int = 0,
) -> Split:
    """Split `utterances`, and keep the speakers and texts of `unseen` out of both parts.

    held_out_fraction: of the utterances, by key as in `split_by_key`. Raises ValueError for a part without utterances.
    """
    selection = selection or Selection()
    speakers = {u.speaker for u in unseen}
    texts = {text for u in unseen for text in _texts(u)}
    left_out: Counter[str] = Counter()
    chosen = []
    for u in utterances:
        reason = selection.refuses(u)
        if reason is None and u.speaker in speakers:
            reason = "speaker of an unseen folder"
        if reason is None and texts & set(_texts(u)):
            reason = "text of an unseen folder"
        if reason is None:
            chosen.append(u)
        else:
            left_out[reason] += 1
    train, held_out = split_by_key(chosen, held_out_fraction, seed)
    people = [u for u in held_out if not u.speaker.startswith(SPEAKER_PREFIX)]
    if dropped := len(held_out) - len(people):
        left_out["held-out text in a synthetic voice"] = dropped
    measured = [u for u in unseen if selection.refuses(u) is None]
    for name, part in (("training", train), ("held-out", people), ("unseen", measured)):
        if not part and (name != "unseen" or unseen):
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "none left out"
            raise ValueError(f"no {name} utterances are left, of {len(utterances)}: {reasons}")
    return Split(train, people, measured, left_out)


def _texts(u: Utterance) -> list[str]:
    """Return what is said, and what it means in English, as texts are compared."""
    return [normalised(text) for text in (u.text, u.translation) if text.strip()]


def write_rows(path: Path, utterances: Iterable[Utterance]) -> None:
    """JSON lines that `audiorl.data.manifest.read_samples` reads; audio relative to the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(path, (_row(u, path.parent) for u in utterances))


def _row(u: Utterance, folder: Path) -> dict[str, Any]:
    audio = os.path.relpath(Path(str(u.clip.path)).absolute(), folder.absolute())
    row: dict[str, Any] = {"id": u.id, "key": u.key, "language": u.language, "text": u.text, "audio": audio}
    row |= {"duration": u.duration, "speaker": u.speaker, "translation": u.translation, "licence": u.licence}
    return row | {name: value for name, value in u.clip.part.items() if name != "duration"}


def summary(parts: dict[str, list[Utterance]]) -> list[tuple[str, str, int, int, float]]:
    """(set, language, speakers, clips, minutes) of each language of each set."""
    rows = []
    for name, utterances in parts.items():
        for language in sorted({u.language for u in utterances}):
            said = [u for u in utterances if u.language == language]
            minutes = sum(u.duration for u in said) / 60
            rows.append((name, language, len({u.speaker for u in said}), len(said), minutes))
    return rows

"""Whether a recording says the text that it comes with: tables of what a recogniser made of it.

`tools/confirm_texts.py` writes one table for each voice that needs it, `audiorl/assets/verdicts/VOICE.tsv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from audiorl.data.sources.voice import Recording

TABLES = Path(str(resources.files("audiorl"))) / "assets" / "verdicts"
CLASSES = ("digits", "letters", "phonetic", "animals")
"""Folders of single words, in which a text is also confirmed where it ranks first."""


@dataclass(frozen=True)
class Verdict:
    """What a recogniser made of one recording. `tools/confirm_texts.py` fills it in.

    `cer` is the character error rate of the transcript against the text. `rank` is that of the text by probability
    given the audio among all single words of its folder, 0 for the most probable one; None for longer texts and
    outside of CLASSES. A recogniser often misspells a short word that it yet prefers to all others of its class.
    """

    name: str
    cer: float
    rank: int | None
    transcript: str


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """Recording's name to verdict of a table with the columns name, cer, rank, transcript."""
    verdicts = {}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        name, cer, rank, transcript = line.split("\t")
        verdicts[name] = Verdict(name, float(cer), int(rank) if rank else None, transcript)
    return verdicts


def write_verdicts(path: Path, verdicts: Sequence[Verdict]) -> None:
    """The table that `read_verdicts` reads."""
    lines = ["name\tcer\trank\ttranscript"]
    for v in verdicts:
        lines.append(f"{v.name}\t{v.cer:.3f}\t{'' if v.rank is None else v.rank}\t{' '.join(v.transcript.split())}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def confirmed(
    root: Path, voice: str, candidates: Callable[[Path], Iterator[Recording]], max_cer: float
) -> Iterator[Recording]:
    """The candidates, those to be left out whose character error rate is above `max_cer` and whose rank is not 0."""
    verdicts = read_verdicts(TABLES / f"{voice}.tsv")
    for recording in candidates(root):
        verdict = verdicts.get(recording.name)
        if not recording.left_out and not (verdict and (verdict.cer <= max_cer or verdict.rank == 0)):
            recording = replace(recording, left_out="text not confirmed")
        yield recording

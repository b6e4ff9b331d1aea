"""Whether a recording says the text that it comes with: tables of what a recogniser made of it.

`tools/confirm_texts.py` writes one table for each voice that needs it, `audiorl/assets/verdicts/VOICE.tsv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from corpora.sources.voice import Recording, Voice

TABLES = Path(str(resources.files("audiorl"))) / "assets" / "verdicts"
CLASSES = ("digits", "letters", "phonetic", "animals")
"""Folders of single words, in which a text is also confirmed where it is the nearest to the transcript."""
MAX_CER_OF_NEAREST = 0.5
"""Maximum character error rate of such a word."""


@dataclass(frozen=True)
class Verdict:
    """What a recogniser made of one recording. `tools/confirm_texts.py` fills it in.

    `cer` is the character error rate of the transcript against the text. `rank` is the number of other single words of
    its folder that are as near to the transcript or nearer, by edit distance; None for longer texts and outside of
    CLASSES. A recogniser often misspells a short word, which yet resembles no other word of a closed class.
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


def confirmed(voice: Voice, root: Path) -> Iterator[Recording]:
    """The recordings of the voice, of which those are to be left out whose text the recogniser does not confirm.

    It confirms a text with a character error rate of at most `voice.max_cer`, or MAX_CER_OF_NEAREST with rank 0.
    """
    if voice.max_cer is None:
        yield from voice.recordings(root)
        return
    verdicts = read_verdicts(TABLES / f"{voice.folder}.tsv")
    for recording in voice.recordings(root):
        verdict = verdicts.get(recording.name)
        fits = voice.unchecked
        if verdict is not None:
            fits = verdict.cer <= (MAX_CER_OF_NEAREST if verdict.rank == 0 else voice.max_cer)
        yield recording if fits or recording.left_out else replace(recording, left_out="text not confirmed")

"""What a source offers: voices, the recordings of each, and whether a recording says the text that it comes with.

`tools/confirm_texts.py` writes what a recogniser made of the recordings of each voice that needs it, a table
`audiorl/assets/verdicts/VOICE.tsv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import av
import numpy as np
import soxr

from audiorl.audio import AudioClip

RATE = 16_000
"""Sample rate of all clips of a corpus, in Hz."""
TABLES = Path(str(resources.files("audiorl"))) / "assets" / "verdicts"
CLASSES = ("digits", "letters", "phonetic", "animals")
"""Folders of single words, in which a text is also confirmed where it is the nearest to the transcript."""
MAX_CER_OF_NEAREST = 0.5
"""Maximum character error rate of such a word."""


@dataclass(frozen=True)
class SourceRecording:
    """One recording of a voice before it is checked and encoded. The source's module fills it in.

    `name` is unique in the voice and becomes the file's name; `key` is shared by all recordings of the same prompt.
    `translation` is the English text, "" where there is none. `read` returns float32 [T] at RATE Hz. `left_out` is
    the reason why the recording cannot be used, where that is clear without reading it; otherwise "". `speaker` and
    `licence` are "" where they are those of the voice.
    """

    name: str
    key: str
    text: str
    translation: str
    read: Callable[[], np.ndarray]
    left_out: str = ""
    speaker: str = ""
    licence: str = ""


@dataclass(frozen=True)
class Voice:
    """The recordings of one speaker in one language from one source. The source's module fills it in.

    `folder` is that of the clips in the corpus. `packages` are the Debian packages that hold the recordings and their
    texts; `recordings` lists them and `licence_text` returns the licence's text, both from the folder below which the
    packages are unpacked. `licence` is an SPDX identifier where there is one. `settings` are those of the source that
    change the recordings.

    `max_cer` is for voices with a table of verdicts (see `confirmed`): the maximum character error rate of the
    recogniser's transcript against the text. `unchecked`: whether recordings are used that the table does not hold.
    """

    source: str
    folder: str
    language: str
    speaker: str
    licence: str
    credit: str
    packages: tuple[str, ...]
    recordings: Callable[[Path], Iterator[SourceRecording]]
    licence_text: Callable[[Path], str] | None
    max_cer: float | None = None
    unchecked: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_audio(path: Path) -> np.ndarray:
    """Mono float32 [T] at RATE Hz of a file that `AudioClip` reads, or of headerless .g722 or .gsm; may be empty."""
    if path.suffix not in (".g722", ".gsm"):
        return AudioClip(path=str(path)).load(RATE)
    with av.open(str(path), format=path.suffix[1:]) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        rate = stream.rate
    if not frames:
        return np.zeros(0, dtype=np.float32)
    wav = np.concatenate(frames, axis=1)[0].astype(np.float32) / 32768
    return wav if rate == RATE else soxr.resample(wav, rate, RATE)


# -- verdicts ----------------------------------------------------------------------------------------------------------


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
    """SourceRecording's name to verdict of a table with the columns name, cer, rank, transcript."""
    verdicts = {}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        name, cer, rank, transcript = line.split("\t")
        verdicts[name] = Verdict(name, float(cer), int(rank) if rank else None, transcript)
    return verdicts


def confirmed(voice: Voice, root: Path) -> Iterator[SourceRecording]:
    """Yield the recordings of the voice, of which those are to be left out whose text the recogniser does not confirm.

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

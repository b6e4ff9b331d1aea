"""What a source offers: voices, and the recordings of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import soxr

from audiorl.audio import AudioClip

RATE = 16_000
"""Sample rate of all clips of a corpus, in Hz."""


@dataclass(frozen=True)
class Recording:
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

    `max_cer` is for voices with a table of verdicts (see `verdicts`): the maximum character error rate of the
    recogniser's transcript against the text. `unchecked`: whether recordings are used that the table does not hold.
    """

    source: str
    folder: str
    language: str
    speaker: str
    licence: str
    credit: str
    packages: tuple[str, ...]
    recordings: Callable[[Path], Iterator[Recording]]
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

"""Speech without labels, for training and measuring codecs: files, folders and manifests in, crops out.

    recordings = read_recordings(("LibriTTS/train-clean-100", "own.jsonl"), sample_rate=24_000)
    crops = Crops(recordings, 24_000, samples=24_000)
    wavs = crops.read([crops[0], crops[1]], step=17)          # [B, T] float32

Any sample rate and number of channels is read; what was done to the recordings is counted, never silent.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from audiorl.audio import AUDIO_SUFFIXES, AudioClip, AudioError, load_clip, name, probe, seconds
from audiorl.data.formats import Style, audio_field, clip_of
from audiorl.data.rows import BadRow, Row, files_below, read_rows
from audiorl.data.schema import FieldError

SHORTEST = 0.1
"""Seconds; shorter recordings are left out."""
SILENT = 1e-3
"""Recordings that never get louder than this, -60 dB, are left out."""
CLIPPED = 0.001
"""Recordings with more than this share of samples at full scale are counted as clipped; they stay."""
FULL_SCALE = 2.0
"""Recordings that go beyond are on another scale; up to here what is beyond 1 is cut off."""


@dataclass(frozen=True)
class Recordings:
    """Usable recordings in order with their lengths, what was left out and why, and what had to be done to the rest."""

    clips: tuple[AudioClip, ...]
    lengths: tuple[float, ...]
    skipped: tuple[str, ...] = ()
    noted: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Recordings) -> Recordings:
        skipped, noted = self.skipped + other.skipped, self.noted + other.noted
        return Recordings(self.clips + other.clips, self.lengths + other.lengths, skipped, noted)

    def summary(self) -> str:
        """One line with every count."""
        hours = sum(self.lengths) / 3600
        size = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
        notes = [f"{count} {what}" for what, count in sorted(self.noted.items())]
        return "; ".join([f"{len(self.clips)} recordings, {size}", *([", ".join(notes)] if notes else [])])


def read_recordings(
    paths: Sequence[str],
    sample_rate: int,
    *,
    audio_root: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    check_audio: bool = True,
) -> Recordings:
    """Return all recordings of audio files, folders of them, and manifests (the field `audio` of a row).

    check_audio: decode everything now, which finds damaged, silent and clipped recordings before training does.
    Recordings that are silent or shorter than SHORTEST are left out and counted. Unusable ones raise ValueError naming
    the file, or are counted with `on_error="skip"`.
    """
    clips: list[AudioClip] = []
    lengths: list[float] = []
    skipped: list[str] = []
    noted: Counter[str] = Counter()
    for path in paths:
        for item in _items(path):
            try:
                if isinstance(item, BadRow):
                    raise ValueError(str(item))
                if isinstance(item, Row):
                    root = Path(audio_root) if audio_root is not None else Path(path).parent
                    clip = clip_of(item, Style(root), audio_field(item))
                else:
                    clip = item
                reason = _look(clip, sample_rate, check_audio, noted)
            except ValueError as error:
                column = error.field if isinstance(error, FieldError) else ""
                if isinstance(item, Row):
                    error = ValueError(str(BadRow(item.file, item.number, column or audio_field(item), str(error))))
                if on_error == "raise":
                    raise error from None
                skipped.append(str(error))
                noted["unusable"] += 1
                continue
            if reason:
                skipped.append(f"{name(clip)}: {reason}")
                noted[reason] += 1
            else:
                clips.append(clip)
                lengths.append(seconds(clip))
    return Recordings(tuple(clips), tuple(lengths), tuple(skipped), noted)


def _items(path: str) -> Iterable[AudioClip | Row | BadRow]:
    """Return the clips of a file or folder, or the rows of a manifest."""
    file = Path(path)
    if file.is_dir():
        files = files_below(file, *AUDIO_SUFFIXES)
        if not files:
            raise ValueError(f"{path}: no audio files below it ({', '.join(AUDIO_SUFFIXES)})")
        return [AudioClip(path=str(p)) for p in files]
    return [AudioClip(path=path)] if file.suffix.lower() in AUDIO_SUFFIXES else read_rows(file)


def _look(clip: AudioClip, sample_rate: int, decode: bool, noted: Counter[str]) -> str | None:
    """Return why a readable recording is left out, if it is; note what will be done to it."""
    about = probe(clip)
    if seconds(clip) < SHORTEST:
        return f"shorter than {SHORTEST:g} s"
    if decode:
        wav = np.abs(load_clip(clip, about.sample_rate, max_seconds=float("inf")))
        if wav.max() < SILENT:
            return "silent"
        if wav.max() > FULL_SCALE:
            raise AudioError(f"{name(clip)}: samples reach {wav.max():.4g}, far beyond 1; scale the file to [-1, 1]")
        if (wav >= 0.999).mean() > CLIPPED:
            noted["clipped"] += 1
    if about.sample_rate != sample_rate:
        noted[f"resampled from {about.sample_rate} Hz"] += 1
    if (len(clip.channels) or about.channels) > 1:
        noted["mixed down to mono"] += 1
    return None


@dataclass(frozen=True)
class Place:
    """Piece number `piece` of `pieces` of a recording."""

    clip: int
    piece: int
    pieces: int


class Crops(Sequence[Place]):
    """Every recording cut into pieces of about `seconds`: an item is the place of one, `read` gives the sounds.

    Recordings that fit into `cache_mb` all together are decoded once and kept; of larger sets only what is cropped is
    read, in `threads` at a time.
    """

    def __init__(
        self,
        recordings: Recordings,
        sample_rate: int,
        samples: int,
        seed: int = 0,
        cache_mb: int = 1024,
        threads: int = 4,
    ):
        if not recordings.clips:
            raise ValueError("nothing to train on: no recording is left")
        self.recordings, self.sample_rate, self.samples, self.seed = recordings, sample_rate, samples, seed
        length = samples / sample_rate
        self._ends = list(accumulate(max(round(s / length), 1) for s in recordings.lengths))
        # Decided by the data alone: a part decoded on its own differs in its last bits from a part of the whole.
        self._keep = sum(recordings.lengths) * sample_rate * 4 <= cache_mb * 1e6
        self._decoded: dict[int, np.ndarray] = {}
        self._pool = ThreadPoolExecutor(threads)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Place:  # type: ignore[override]
        clip = bisect_right(self._ends, index)
        before = self._ends[clip - 1] if clip else 0
        return Place(clip, index - before, self._ends[clip] - before)

    def read(self, places: Sequence[Place], step: int) -> np.ndarray:
        """[B, samples] float32 in [-1, 1]: from a position in each place's piece that is sampled for every step; zeros
        follow a recording that is too short. Equal calls give equal crops."""
        jobs = [(place, random.Random(f"{self.seed}/{step}/{k}").random()) for k, place in enumerate(places)]
        return np.stack(list(self._pool.map(lambda job: self._crop(*job), jobs)))

    def _crop(self, place: Place, where: float) -> np.ndarray:
        total = self.recordings.lengths[place.clip]
        length = self.samples / self.sample_rate
        start = min((place.piece + where) * total / place.pieces, max(total - length, 0.0))
        clip = self.recordings.clips[place.clip]
        if self._keep:
            if place.clip not in self._decoded:
                self._decoded[place.clip] = load_clip(clip, self.sample_rate, max_seconds=float("inf"))
            wav = self._decoded[place.clip][round(start * self.sample_rate) :][: self.samples]
        else:
            part = replace(clip, start=clip.start + start, duration=min(length, total - start))
            wav = load_clip(part, self.sample_rate)[: self.samples]
        return np.pad(wav.clip(-1, 1), (0, self.samples - len(wav)))

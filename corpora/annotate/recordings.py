"""The recordings that a command names: files, folders, and the rows of manifests."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.audio import AUDIO_SUFFIXES, AudioClip, AudioError, load_clip, probe, seconds, wav_bytes
from audiorl.data.containers import is_kaldi, is_shar
from audiorl.data.formats import Style, audio_field, clip_of
from audiorl.data.manifest import Format, read_values
from audiorl.data.rows import Row, stored
from audiorl.types import Message, Sample

_OTHERS = (".aif", ".au", ".amr", ".caf", ".gsm", ".mka", ".mkv", ".mov", ".mp4", ".oga", ".w64", ".wma", ".wv")
SUFFIXES = tuple(sorted((*AUDIO_SUFFIXES, *_OTHERS)))
RATE = 16_000
"""Hz of what the models get."""
IN_MEMORY = 900.0
"""Seconds up to which a recording is decoded once for all stages; of longer ones every part is decoded when needed."""
WRITTEN = (
    "id", "key", "audio", "audio_path", "audio_filepath", "audio_id", "start", "offset", "end", "end_time", "duration",
    "text", "transcript", "transcription", "sentence", "translation", "language", "lang", "speaker", "question",
    "choices", "answer", "rationale", "task", "clean_audio", "image", "images", "sample_rate", "sampling_rate",
    "channel", "channel_selector",
)  # fmt: skip
"""Columns of an input manifest that do not pass into the rows: those that the rows have themselves, questions, and
what belongs to the whole recording, such as its translation."""

Span = tuple[float, float]
"""Start and end in seconds, counted from the start of the recording."""


@dataclass(frozen=True)
class Source:
    """A recording as the command names it. `id` begins the ids of its rows; `columns` pass into them."""

    id: str
    clip: AudioClip
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> dict[str, Any]:
        """What tells whether it is still the same audio: the path, its size and time of change, and the part."""
        path = os.path.abspath(str(self.clip.path))
        mark: dict[str, Any] = {
            "path": path,
            "start": self.clip.start,
            "duration": self.clip.duration,
            **self.clip.part,
        }
        if os.path.isfile(path):
            status = os.stat(path)
            mark |= {"bytes": status.st_size, "changed": status.st_mtime_ns}
        return mark


def list_sources(inputs: Sequence[str], out: Path) -> tuple[list[Source], list[dict[str, Any]], Counter[str]]:
    """(recordings in order, each once; rows that cannot be used, as {"id", "reason", "detail"}; files of a folder that
    are not audio, by their suffix). What lies below `out` is no input. Raises ValueError for an input that is not there
    or holds no recording."""
    sources: dict[str, Source] = {}
    unusable: list[dict[str, Any]] = []
    others: Counter[str] = Counter()
    for path in inputs:
        file = Path(path)
        if not file.exists() and not path.startswith("hf://"):
            raise ValueError(f"{path}: missing; check the path")
        if file.is_dir() and not (is_kaldi(file) or is_shar(file) or (file / "state.json").exists()):
            listed = list(_files(file, out, others))
            if not listed:
                raise ValueError(f"{path}: no audio files below it ({', '.join(SUFFIXES)})")
        elif file.suffix.lower() in SUFFIXES:
            listed = [Source(path, AudioClip(path=path))]
        else:
            loaded = read_values(path, "auto", _source, detect=lambda row: "native", on_error="skip")
            listed = list(loaded.samples)
            unusable += [
                {"id": f"{row.file}:{row.row}", "reason": "row of the manifest", "detail": str(row)}
                for row in loaded.skipped
            ]
            if not listed:
                raise ValueError(f"{path}: no usable row; the first: {loaded.skipped[0]}")
        for source in listed:
            sources.setdefault(source.clip.key, source)
    ids = Counter(source.id for source in sources.values())
    repeated = next((id for id, count in ids.items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"annotate: {repeated!r} names two recordings; give the manifests' rows ids of their own")
    return list(sources.values()), unusable, others


def _files(folder: Path, out: Path, others: Counter[str]) -> Iterator[Source]:
    """Yield the audio files below a folder, sorted; those below `out`, hidden files and folders are left out."""
    out = out.resolve()
    for file in sorted(folder.rglob("*")):
        if out in file.resolve().parents:  # clips of an earlier run
            continue
        if any(part.startswith(".") for part in file.relative_to(folder).parts) or not file.is_file():
            continue
        if file.suffix.lower() in SUFFIXES:
            yield Source(str(file), AudioClip(path=str(file)))
        else:
            others[file.suffix or "no suffix"] += 1


def _source(row: Row, style: Style, format: Format) -> tuple[Sample, Source]:
    clip = clip_of(row, style, audio_field(row))
    given = row.data.get("id")
    if clip.path is None:
        clip = AudioClip(path=str(_stored(clip)), start=clip.start, duration=clip.duration)
    number = f"{Path(row.file).name}:{row.number}"
    id = str(given).strip() if given not in (None, "") else number
    plain = str | int | float | bool
    columns = {name: value for name, value in row.data.items() if name not in WRITTEN and isinstance(value, plain)}
    return Sample(id, (Message("user", (clip,)),)), Source(id, clip, columns)


def _stored(clip: AudioClip) -> Path:
    """Return a mono file for an array inside a manifest, of which the clip may select a part."""
    rate = probe(clip).sample_rate
    return stored(wav_bytes(load_clip(replace(clip, start=0.0, duration=None), rate), rate), ".wav")


@dataclass(frozen=True, eq=False)
class Recording:
    """One recording in the hands of the stages. Spans count from the start of the source's part."""

    source: Source
    results: dict[str, Any]
    """What earlier stages said, by their name."""

    @cached_property
    def seconds(self) -> float:
        return seconds(self.source.clip)

    @cached_property
    def rate(self) -> int:
        """Hz of the file itself."""
        return probe(self.source.clip).sample_rate

    @cached_property
    def whole(self) -> np.ndarray | None:
        """The samples at RATE of a recording up to IN_MEMORY."""
        if self.seconds > IN_MEMORY:
            return None
        return load_clip(self.source.clip, RATE, max_seconds=math.inf)

    def read(self, span: Span) -> np.ndarray:
        """[T] at RATE of a part."""
        if self.whole is not None:
            return self.whole[round(span[0] * RATE) : max(round(span[1] * RATE), round(span[0] * RATE) + 1)]
        return load_clip(self.part(span), RATE)

    def native(self, span: Span) -> np.ndarray:
        """[T] at the file's own rate of a part."""
        return load_clip(self.part(span), self.rate)

    @contextmanager
    def naming(self, spans: Sequence[Span]) -> Iterator[None]:
        """Name the recording and the part that holds these spans in the AudioError of a model that hears them."""
        try:
            yield
        except AudioError as error:
            raise AudioError(f"{self.source.id}, {spans[0][0]:g} to {spans[-1][1]:g} s: {error}") from error

    def part(self, span: Span) -> AudioClip:
        start, end = span
        clip = self.source.clip
        return replace(clip, start=round(clip.start + start, 3), duration=round(end - start, 3))

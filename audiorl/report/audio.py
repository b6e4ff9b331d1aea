"""Audio inside the page: a clip reference becomes an `<audio>` element with the sound in a data URI."""

from __future__ import annotations

import base64
import html
import io
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

import audiorl
from audiorl.audio import AudioClip, AudioError, probe
from audiorl.data.sets import parse_set
from audiorl.report.contour import contour

_TYPES = {
    ".opus": "audio/ogg",
    ".ogg": "audio/ogg",
    ".oga": "audio/ogg",
    ".mp3": "audio/mpeg",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
}
_RATE = 16_000


@dataclass(frozen=True)
class Allowed:
    """Which files a page may embed: the rows of a run folder that somebody else wrote can name any file.

    folders: everything in them. manifests: files of the run's data, which allow the absolute paths written in them.
    """

    folders: tuple[Path, ...]
    manifests: tuple[Path, ...] = ()

    def __contains__(self, path: Path) -> bool:
        real = path.resolve()
        inside = any(real.is_relative_to(folder.resolve()) for folder in self.folders)
        return inside or any(_names(manifest, path) for manifest in self.manifests)


def allowed_audio(run_dir: Path, config: Any, more: Sequence[Path] = ()) -> Allowed:
    """What the page of a run may embed: the run folder, audiorl's own recordings, `more`, and what its `config` names.

    Of a file that the config names (data sets, such as `train.jsonl:5000`) the folder, which relative paths start from;
    of a folder all of it. The file system's root, the home folder and what holds it are too much, and are left out.
    """
    home = Path.home().resolve()
    folders = [run_dir, Path(audiorl.__file__).parent, Path(audiorl.__file__).parents[1] / "unseen_speakers", *more]
    manifests = []
    for path in filter(None, map(_existing, _texts(config))):
        if path.is_file():
            manifests.append(path)
        folder = path.parent if path.is_file() else path
        if not home.is_relative_to(folder.resolve()):
            folders.append(folder)
    return Allowed(tuple(folders), tuple(manifests))


def _existing(text: str) -> Path | None:
    """The file or folder that a text of a config names, if there is one."""
    try:
        path = Path(parse_set(text)[0])
        return path if text and os.access(path, os.R_OK) and (path.is_file() or path.is_dir()) else None
    except (OSError, ValueError):  # no path, such as a text of many lines
        return None


def _texts(config: Any) -> Iterator[str]:
    """All texts in a config that can be paths."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list | tuple):
        for value in config:
            yield from _texts(value)
    elif isinstance(config, str):
        yield config


def _names(manifest: Path, path: Path) -> bool:
    """Whether a text file holds a path as a JSON string."""
    if not manifest.stat().st_size:
        return False
    with open(manifest, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        spellings = {json.dumps(str(path), ensure_ascii=ascii).encode(errors="replace") for ascii in (True, False)}
        return any(content.find(spelling) >= 0 for spelling in spellings)


@dataclass
class Players:
    """Makes players for clips until `max_bytes` or `max_clips` are spent; after that it names the clip instead.

    Whole files of a kind that browsers play are embedded untouched when small. Parts of files, and files over
    `max_file`, are decoded and encoded again as 16 kHz mono Opus. Files that are not in `allowed`, by default those
    below `run_dir`, are not read.

    `link`: the address of (file, start, duration) on a server that sends the sound. Then nothing is embedded, and there
    are no limits.
    """

    run_dir: Path
    max_clips: int = 60
    max_bytes: int = 12_000_000
    max_file: int = 400_000
    allowed: Allowed | None = None
    link: Callable[[Path, float, float | None], str] | None = None
    embedded: int = 0
    skipped: int = 0
    bytes_used: int = 0
    _cache: dict[tuple[str, float, float | None], tuple[str, bytes]] = field(default_factory=dict, repr=False)

    def player(self, clip: Mapping[str, Any]) -> str:
        """HTML for {"path", "start", "duration"}. A clip that cannot be read says so in its place on the page."""
        if not clip.get("path"):
            return _note("audio was not kept with the run")
        path = self._path(clip)
        start, duration = float(clip.get("start") or 0.0), clip.get("duration")
        label = path.name + (f" from {start:.1f} s" if start else "") + (f", {duration:.1f} s" if duration else "")
        if self.link is None and (self.embedded >= self.max_clips or self.bytes_used >= self.max_bytes):
            self.skipped += 1
            return _note(f"not embedded to keep the page small: {label}")
        if not self._may_read(path):
            return _note(f"not embedded, it is neither in the run folder nor in the run's data: {label}")
        if not path.is_file():
            return _note(f"audio file not found: {label}")
        title = html.escape(label)
        if self.link is not None:
            source = html.escape(self.link(path, start, duration))
            return f'<audio controls preload="none" title="{title}" src="{source}"></audio>'
        key = (str(path), start, duration)
        if key not in self._cache:
            try:
                self._cache[key] = playable(path, start, duration, self.max_file)
            except AudioError as error:
                return _note(f"cannot be played: {error}")
        mime, content = self._cache[key]
        self.embedded += 1
        self.bytes_used += len(content) * 4 // 3
        data = base64.b64encode(content).decode("ascii")
        return f'<audio controls preload="metadata" title="{title}" src="data:{mime};base64,{data}"></audio>'

    def contour(self, clip: Mapping[str, Any]) -> str:
        """Its pitch and level as an SVG; "" where there is nothing to read."""
        wav = self.samples(clip)
        return "" if wav is None else contour(wav, _RATE)

    def samples(self, clip: Mapping[str, Any]) -> np.ndarray | None:
        """The clip's sound, mono float32 [T] at 16 kHz; None where there is none to read."""
        path = self._path(clip)
        if not self._may_read(path) or not path.is_file():
            return None
        try:
            part = AudioClip(path=str(path), start=float(clip.get("start") or 0.0), duration=clip.get("duration"))
            return part.load(_RATE)
        except AudioError:
            return None  # the player in its place says why

    def _path(self, clip: Mapping[str, Any]) -> Path:
        return self.run_dir / str(clip.get("path") or "")  # an absolute path replaces run_dir

    def _may_read(self, path: Path) -> bool:
        return path in (self.allowed or Allowed((self.run_dir,)))


def playable(path: Path, start: float, duration: float | None, max_file: int) -> tuple[str, bytes]:
    """(MIME type, content) of a clip for a browser, see `Players`; AudioError when it cannot be decoded."""
    mime = _TYPES.get(path.suffix.lower())
    if mime and not start and duration is None and path.stat().st_size <= max_file:
        probe(AudioClip(path=str(path)))  # raises for a file that only has the name of audio
        return mime, path.read_bytes()
    return "audio/ogg", _opus(AudioClip(path=str(path), start=start, duration=duration).load(_RATE))


def _opus(samples: np.ndarray) -> bytes:
    """Mono samples at 16 kHz as an Ogg Opus file."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", _RATE, channels=1, format="OGG", subtype="OPUS") as file:
        for at in range(0, len(samples), _RATE):  # libsndfile overflows its stack on one long write
            file.write(samples[at : at + _RATE])
    return buffer.getvalue()


def _note(text: str) -> str:
    return f'<span class="note">♪ {html.escape(text)}</span>'

"""Audio inside the page: a clip reference becomes an `<audio>` element with the sound in a data URI."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from audiorl.audio import AudioClip, AudioError

_TYPES = {
    ".opus": "audio/ogg",
    ".ogg": "audio/ogg",
    ".oga": "audio/ogg",
    ".mp3": "audio/mpeg",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
}
_RATE = 16_000


@dataclass
class Players:
    """Makes players for clips until `max_bytes` or `max_clips` are spent; after that it names the clip instead.

    Whole files of a kind that browsers play are embedded untouched when small. Parts of files, and files over
    `max_file`, are decoded and encoded again as 16 kHz mono Opus.
    """

    run_dir: Path
    max_clips: int = 60
    max_bytes: int = 12_000_000
    max_file: int = 400_000
    embedded: int = 0
    skipped: int = 0
    bytes_used: int = 0
    _cache: dict[tuple[str, float, float | None], tuple[str, bytes]] = field(default_factory=dict, repr=False)

    def player(self, clip: Mapping[str, Any]) -> str:
        """HTML for {"path", "start", "duration"}. A clip that cannot be read says so in its place on the page."""
        if not clip.get("path"):
            return _note("audio was not kept with the run")
        path = self.run_dir / str(clip["path"])  # an absolute path replaces run_dir
        start, duration = float(clip.get("start") or 0.0), clip.get("duration")
        label = path.name + (f" from {start:.1f} s" if start else "") + (f", {duration:.1f} s" if duration else "")
        if self.embedded >= self.max_clips or self.bytes_used >= self.max_bytes:
            self.skipped += 1
            return _note(f"not embedded to keep the page small: {label}")
        if not path.is_file():
            return _note(f"audio file not found: {label}")
        key = (str(path), start, duration)
        if key not in self._cache:
            try:
                self._cache[key] = self._read(path, start, duration)
            except AudioError as error:
                return _note(f"cannot be played: {error}")
        mime, content = self._cache[key]
        self.embedded += 1
        self.bytes_used += len(content) * 4 // 3
        data = base64.b64encode(content).decode("ascii")
        return (
            f'<audio controls preload="metadata" title="{html.escape(label)}" src="data:{mime};base64,{data}"></audio>'
        )

    def samples(self, clip: Mapping[str, Any]) -> np.ndarray | None:
        """The clip's sound, mono float32 [T] at 16 kHz; None where there is none to read."""
        path = self.run_dir / str(clip.get("path") or "")
        if not path.is_file():
            return None
        try:
            part = AudioClip(path=str(path), start=float(clip.get("start") or 0.0), duration=clip.get("duration"))
            return part.load(_RATE)
        except AudioError:
            return None  # the player in its place says why

    def _read(self, path: Path, start: float, duration: float | None) -> tuple[str, bytes]:
        """(MIME type, content); AudioError when the clip cannot be decoded."""
        mime = _TYPES.get(path.suffix.lower())
        if mime and not start and duration is None and path.stat().st_size <= self.max_file:
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

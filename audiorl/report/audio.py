"""Audio inside the page: a clip reference becomes an `<audio>` element with the sound in a data URI."""

from __future__ import annotations

import base64
import io
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from markupsafe import Markup, escape
from numpy.typing import NDArray

import audiorl
from audiorl.audio import AudioClip, AudioError, load_channels, probe
from audiorl.data.sets import parse_set
from audiorl.eval.metrics.prosody import HOP_SECONDS, SILENT, prosody, voiced_f0
from audiorl.eval.metrics.speech import FRAME_SECONDS, frame_levels
from audiorl.report.kit import note
from audiorl.report.summary import metric_name, show

_TYPES = {".opus": "ogg", ".ogg": "ogg", ".oga": "ogg", ".mp3": "mpeg", ".wav": "wav", ".flac": "flac"}
"""Files that browsers play, and their subtype of audio."""
RATE = 16_000
MAX_FILE = 400_000
"""Bytes of a file that is embedded as it is."""
CONTOUR_NOTE = (
    "Under each player: its pitch (line, 12 semitones up and down from the median) and its level (area, 30 dB)."
)
_WIDTH, _HEIGHT = 300, 48  # of a contour, px
_SEMITONES = 12.0  # from the middle to either edge, on every drawing, so that flat and lively look different


# -- what may be read --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowed:
    """Which files a page may embed: the rows of a run folder that somebody else wrote can name any file.

    folders: everything in them. manifests: files of the run's data, which allow the absolute paths written in them.
    """

    folders: tuple[Path, ...]
    manifests: tuple[Path, ...] = ()

    def __contains__(self, path: Path) -> bool:
        try:
            real = path.resolve()
        except (OSError, ValueError, RuntimeError):  # a name with NUL, a name that is too long, a link to itself
            return False
        inside = any(real.is_relative_to(folder.resolve()) for folder in self.folders)
        return inside or any(_names(manifest, path) for manifest in self.manifests)


EVERYTHING = Allowed((Path("/"),))


def allowed_audio(run_dir: Path, config: Any, more: Sequence[Path] = ()) -> Allowed:
    """Return what the page of a run may embed: the run folder, audiorl's own recordings, `more`, and what its `config`
    names.

    Of a file that the config names (data sets, such as `train.jsonl:5000`) the folder, which relative paths start from;
    of a folder all of it. The file system's root, the home folder and what holds it are too much, and are left out.
    """
    home, package = Path.home().resolve(), Path(audiorl.__file__).parent
    folders = [run_dir, package, package.parent / "unseen_speakers", *more]
    manifests: list[Path] = []
    values: list[Any] = [config]
    for value in values:  # grows while it is read
        if isinstance(value, Mapping | list | tuple):
            values += value.values() if isinstance(value, Mapping) else value
            continue
        try:
            path = Path(parse_set(value)[0]) if isinstance(value, str) and value else None
            if path is None or not os.access(path, os.R_OK) or not (path.is_file() or path.is_dir()):
                continue
        except (OSError, ValueError):  # no path, such as a text of many lines
            continue
        if path.is_file():
            manifests.append(path)
        folder = path.parent if path.is_file() else path
        if not home.is_relative_to(folder.resolve()):
            folders.append(folder)
    return Allowed(tuple(folders), tuple(manifests))


def _names(manifest: Path, path: Path) -> bool:
    """Return whether a text file holds a path as a JSON string."""
    if not manifest.stat().st_size:
        return False
    with open(manifest, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        spellings = {json.dumps(str(path), ensure_ascii=ascii).encode(errors="replace") for ascii in (True, False)}
        return any(content.find(spelling) >= 0 for spelling in spellings)


# -- players -----------------------------------------------------------------------------------------------------------


@dataclass
class Players:
    """Makes players for clips until `max_bytes` or `max_clips` are spent; after that it names the clip instead.

    Whole files of a kind that browsers play are embedded untouched when small. Parts of files, and files over
    `max_file`, are decoded and encoded again as 16 kHz mono Opus. Files that are not in `allowed`, by default those
    below `run_dir`, are not read.

    `link`: the address of a clip on a server that sends its sound. Then nothing is embedded, and there are no limits.
    """

    run_dir: Path
    max_clips: int = 60
    max_bytes: int = 12_000_000
    max_file: int = MAX_FILE
    allowed: Allowed | None = None
    link: Callable[[AudioClip], str] | None = None
    embedded: int = 0
    skipped: int = 0
    bytes_used: int = 0
    _cache: dict[str, tuple[str, bytes]] = field(default_factory=dict, repr=False)

    def player(self, clip: Mapping[str, Any] | None) -> Markup:
        """Return HTML for {"path", "start", "duration", "channel"}. A clip that cannot be read says so in its place."""
        if not clip or not clip.get("path"):
            return note("♪ audio was not kept with the run", "span")
        path, part = self._part(clip)
        label = path.name + (f" from {part.start:.1f} s" if part.start else "")
        label += (f", {part.duration:.1f} s" if part.duration else "") + "".join(
            f", channel {c}" for c in part.channels
        )
        full = self.link is None and (self.embedded >= self.max_clips or self.bytes_used >= self.max_bytes)
        self.skipped += full
        for wrong, why in (
            (full, "not embedded to keep the page small"),
            (not self._may_read(path), "not embedded, it is neither in the run folder nor in the run's data"),
            (not os.path.isfile(path), "audio file not found"),
        ):
            if wrong:
                return note(f"♪ {why}: {label}", "span")
        title, key = escape(label), part.key
        if self.link is not None:
            source = escape(self.link(part))
            return Markup(f'<audio controls preload="none" title="{title}" src="{source}"></audio>')
        if key not in self._cache:
            try:
                self._cache[key] = playable(part, self.max_file)
            except AudioError as error:
                return note(f"♪ cannot be played: {error}", "span")
        mime, content = self._cache[key]
        self.embedded += 1
        self.bytes_used += len(content) * 4 // 3
        return Markup(f'<audio controls preload="metadata" title="{title}" src="{_data_uri(mime, content)}"></audio>')

    def contour(self, clip: Mapping[str, Any] | None) -> Markup:
        """Return its pitch and level as an SVG; "" where there is nothing to read."""
        wav = self.samples(clip)
        return Markup("") if wav is None else contour(wav, RATE)

    def samples(self, clip: Mapping[str, Any] | None) -> NDArray[np.float32] | None:
        """Return the clip's sound, mono float32 [T] at 16 kHz; None where there is none to read."""
        path, part = self._part(clip or {})
        if clip is None or not self._may_read(path) or not os.path.isfile(path):
            return None
        try:
            return part.load(RATE)
        except AudioError:
            return None  # the player in its place says why

    def _part(self, clip: Mapping[str, Any]) -> tuple[Path, AudioClip]:
        path = self.run_dir / str(clip.get("path") or "")  # an absolute path replaces run_dir
        channel = clip.get("channel")
        channel = tuple(channel) if isinstance(channel, list) else channel
        start, duration = float(clip.get("start") or 0.0), clip.get("duration")
        return path, AudioClip(path=str(path), start=start, duration=duration, channel=channel)

    def _may_read(self, path: Path) -> bool:
        return path in (self.allowed or Allowed((self.run_dir,)))


def clip_player(clip: AudioClip) -> Markup:
    """Return a player for a clip that the caller has read itself, in FLAC at 16 kHz; the error if it cannot be read."""
    buffer = io.BytesIO()
    try:
        soundfile.write(buffer, clip.load(RATE), RATE, format="FLAC", subtype="PCM_16")
    except AudioError as error:
        return note(str(error))
    return Markup(f'<audio controls preload="none" src="{_data_uri("audio/flac", buffer.getvalue())}"></audio>')


def playable(clip: AudioClip, max_file: int) -> tuple[str, bytes]:
    """Return (MIME type, content) of a clip for a browser, see `Players`; AudioError when it cannot be decoded."""
    path = Path(clip.path or "")
    kind = _TYPES.get(path.suffix.lower())
    if kind and not clip.part and path.is_file() and path.stat().st_size <= max_file:
        probe(clip)  # raises for a file that only has the name of audio
        return f"audio/{kind}", path.read_bytes()
    samples, buffer = load_channels(clip, RATE)[0], io.BytesIO()
    if samples.ndim == 2 and samples.shape[1] > 2:
        samples = samples.mean(axis=1)
    with soundfile.SoundFile(buffer, "w", RATE, channels=samples.ndim, format="OGG", subtype="OPUS") as file:
        for at in range(0, len(samples), RATE):  # libsndfile overflows its stack on one long write
            file.write(samples[at : at + RATE])
    return "audio/ogg", buffer.getvalue()


def _data_uri(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"


# -- melody and level --------------------------------------------------------------------------------------------------


def contour(wav: NDArray[Any], sample_rate: int) -> Markup:
    """Return an SVG as wide as a player, from the recording's start to its end; "" for one without samples."""
    levels, seconds = frame_levels(wav, sample_rate), len(wav) / sample_rate
    if not len(levels):
        return Markup("")
    # The level from `SILENT` dB below the loudest frame, the highest of the frames at each pixel.
    columns = np.minimum(np.arange(len(levels)) * FRAME_SECONDS / seconds * _WIDTH, _WIDTH - 1).astype(int)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    heights = np.maximum.reduceat(levels, starts)
    loudest = heights.max()
    shares = np.clip(1 + (heights - loudest) / SILENT, 0, 1) if np.isfinite(loudest) else np.zeros(len(heights))
    ends = [*columns[starts][1:].tolist(), _WIDTH]
    area = "".join(f"V{_HEIGHT * (1 - share):.0f}H{end}" for share, end in zip(shares, ends, strict=True))
    # The pitch, at most one point a pixel; a new line begins after each pause.
    hertz, line, drawing = voiced_f0(wav, sample_rate), "", False
    semitones = np.full(len(hertz), np.nan) if np.isnan(hertz).all() else 12 * np.log2(hertz / np.nanmedian(hertz))
    x = np.arange(len(hertz)) * HOP_SECONDS / seconds * _WIDTH
    y = np.clip(_HEIGHT / 2 * (1 - semitones / _SEMITONES), 1, _HEIGHT - 1)
    step = max(len(hertz) // _WIDTH, 1)
    for across, down in zip(x[::step], y[::step], strict=True):
        if not np.isnan(down):
            line += f"{'L' if drawing else 'M'}{across:.1f} {down:.1f}"
        drawing = not np.isnan(down)
    stroke = "fill='none' stroke='var(--line0)' stroke-width='2' stroke-linecap='round'"
    pitch = f"<path d='{line}' {stroke} vector-effect='non-scaling-stroke'/>" if line else ""
    measured = prosody(wav, sample_rate)
    title = "no voice"
    if measured is not None:
        values = (f"{metric_name(name)} {show(getattr(measured, name), name)}" for name in ("f0_range", "energy_range"))
        title = f"median {measured.f0_median:.0f} Hz, {', '.join(values)}"
    return Markup(
        f"<svg class='contour' viewBox='0 0 {_WIDTH} {_HEIGHT}' preserveAspectRatio='none' role='img'>"
        f"<title>{title}</title><path d='M0 {_HEIGHT}{area}V{_HEIGHT}Z' fill='var(--grid)'/>{pitch}</svg>"
    )

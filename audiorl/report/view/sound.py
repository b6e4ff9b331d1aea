"""Clips for a browser: their addresses, their sound and their spectrograms.

A page names a clip by a random key. Only clips that a record of a run names get a key, so the server cannot be asked
for any other file, and only what can be decoded as audio is sent.
"""

from __future__ import annotations

import io
import secrets
from functools import lru_cache
from pathlib import Path

import numpy as np

from audiorl.audio import AudioClip
from audiorl.report.audio import EVERYTHING, RATE, Players, playable

_WINDOW, _COLUMNS, _RANGE_DB = 512, 900, 80.0
FRAMES = 12
"""Frames of a video that are shown."""
_MAX_FILE = 8_000_000
"""Bytes of a file that is sent as it is; larger ones are encoded as Opus."""


class Sound:
    """Clips that pages have named so far, by key."""

    def __init__(self) -> None:
        self._clips: dict[str, AudioClip] = {}
        self._keys: dict[str, str] = {}
        self._videos: dict[str, Path] = {}
        self.content = lru_cache(maxsize=32)(self._content)
        self.spectrogram = lru_cache(maxsize=128)(self._spectrogram)

    def players(self, run_folder: Path) -> Players:
        """Return what makes players for the records of a run."""
        return Players(run_folder, allowed=EVERYTHING, link=self.link)

    def clip(self, key: str) -> AudioClip:
        """Return the clip of a key. Raises LookupError for an unknown one."""
        return self._clips[key]

    def link(self, clip: AudioClip) -> str:
        key = self._keys.setdefault(clip.key, secrets.token_urlsafe(12))
        self._clips[key] = clip
        return f"audio/{key}"

    def film(self, video: Path) -> str:
        """Return the address of `frames`."""
        key = self._keys.setdefault(str(video), secrets.token_urlsafe(12))
        self._videos[key] = video
        return f"frames/{key}"

    def frames(self, key: str) -> bytes:
        """Draw a PNG of `FRAMES` frames of a video, one beside the other. KeyError for an unknown key, ValueError or
        OSError where the file holds no grey pictures [frames, height, width]."""
        from matplotlib.image import imsave

        video = np.load(self._videos[key], mmap_mode="r", allow_pickle=False)
        if video.ndim != 3 or video.dtype != np.uint8 or not video.size:
            raise ValueError(f"{self._videos[key].name}: no pictures [frames, height, width]")
        shown = video[((np.arange(FRAMES) + 0.5) * len(video) / FRAMES).astype(int)]
        scale = max(1, 96 // video.shape[1])
        buffer = io.BytesIO()
        imsave(
            buffer,
            np.concatenate(shown, 1).repeat(scale, 0).repeat(scale, 1),
            vmin=0,
            vmax=255,
            cmap="gray",
            format="png",
        )
        return buffer.getvalue()

    def _content(self, key: str) -> tuple[str, bytes]:
        """(MIME type, file). KeyError for an unknown key, AudioError or OSError when it cannot be read."""
        return playable(self._clips[key], _MAX_FILE)

    def _spectrogram(self, key: str) -> bytes:
        """Draw a PNG: time to the right, 0 to 8 kHz upwards, 80 dB below the loudest point. Errors as above."""
        from matplotlib.image import imsave

        samples = self._clips[key].load(RATE)
        hop = max(_WINDOW // 4, len(samples) // _COLUMNS)
        padded = np.pad(samples, (_WINDOW // 2, _WINDOW))
        frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[: len(samples) + 1 : hop]
        power_TF = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW))) ** 2
        level_TF = 10 * np.log10(np.maximum(power_TF, 1e-10))
        buffer, top = io.BytesIO(), float(level_TF.max())
        imsave(buffer, level_TF.T, vmin=top - _RANGE_DB, vmax=top, cmap="magma", origin="lower", format="png")
        return buffer.getvalue()

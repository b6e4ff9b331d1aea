"""The whole file behind a clip: its bytes, and what tells it from others."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile

from audiorl.audio import AudioClip, probe


def is_small_part(clip: AudioClip) -> bool:
    """Whether a clip is less than half of its file."""
    if clip.array is not None or clip.context or clip.duration is None:
        return False
    return 2 * clip.duration < probe(clip).seconds


def cut_out(clip: AudioClip) -> AudioClip:
    """The clip alone, in memory, at the file's own rate."""
    rate = probe(clip).sample_rate
    return AudioClip(array=clip.load(rate), sample_rate=rate, duration=clip.duration)


def file_key(clip: AudioClip) -> str:
    """Equal for clips of one file or array, whatever part of it they select."""
    return replace(clip, start=0.0, duration=None, context=0.0).key


def file_bytes(clip: AudioClip) -> bytes:
    """The whole file behind a clip; an array becomes 32-bit float WAV, which loses nothing."""
    if clip.data is not None:
        return clip.data
    if clip.path is not None:
        return Path(clip.path).read_bytes()
    assert clip.array is not None and clip.sample_rate is not None
    file = io.BytesIO()
    soundfile.write(file, np.asarray(clip.array, np.float32), clip.sample_rate, format="WAV", subtype="FLOAT")
    content = bytearray(file.getvalue())
    peak = content.index(b"PEAK")
    content[peak + 12 : peak + 16] = bytes(4)  # libsndfile writes the time there: equal audio shall be equal bytes
    return bytes(content)

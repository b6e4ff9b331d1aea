"""Record from the default microphone, with the optional library sounddevice (PortAudio)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from audiorl.audio import MAX_SECONDS, AudioClip

RATE = 16_000
"""Hz of recordings."""
MIN_SECONDS = 0.1


def record(wait: Callable[[], object]) -> AudioClip:
    """What the default microphone picks up while `wait()` runs, mono at 16 kHz.

    Raises ValueError where the library, PortAudio or a microphone is missing, for a recording without samples, and for
    one that is longer than `audiorl.audio.MAX_SECONDS`.
    """
    try:
        import sounddevice
    except ImportError as error:
        raise ValueError("the microphone needs sounddevice: pip install 'audiorl[mic]'") from error
    except OSError as error:  # PortAudio is a library of the system
        raise ValueError(
            f"the microphone needs PortAudio ({error}); on Debian: apt-get install libportaudio2"
        ) from error
    blocks: list[np.ndarray] = []

    def keep(samples: np.ndarray, frames: int, time: object, status: object) -> None:
        blocks.append(samples[:, 0].copy())

    try:
        with sounddevice.InputStream(samplerate=RATE, channels=1, dtype="float32", callback=keep):
            wait()
    except sounddevice.PortAudioError as error:
        raise ValueError(f"no microphone can be opened: {error}; give a file with /audio FILE") from error
    samples_T = np.concatenate([np.zeros(0, np.float32), *blocks])
    seconds = len(samples_T) / RATE
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"recorded {seconds:.1f} s; record {MIN_SECONDS:g} to {MAX_SECONDS:g} s")
    return AudioClip(array=samples_T, sample_rate=RATE)

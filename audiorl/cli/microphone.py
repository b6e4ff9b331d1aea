"""Record from the default microphone, with the optional library sounddevice (PortAudio)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from audiorl.audio import MAX_SECONDS, AudioClip

RATE = 16_000
"""Hz of recordings."""
MIN_SECONDS = 0.1


def record(wait: Callable[[], object]) -> AudioClip:
    """What the default microphone picks up while `wait()` runs, mono at 16 kHz.

    Raises ValueError as `opened` does, for a recording without samples, and for one that is longer than
    `audiorl.audio.MAX_SECONDS`.
    """
    blocks: list[np.ndarray] = []
    with opened(blocks.append):
        wait()
    samples_T = np.concatenate([np.zeros(0, np.float32), *blocks])
    seconds = len(samples_T) / RATE
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"recorded {seconds:.1f} s; record {MIN_SECONDS:g} to {MAX_SECONDS:g} s")
    return AudioClip(array=samples_T, sample_rate=RATE)


def listen() -> Iterator[np.ndarray]:
    """The microphone's samples as they come, float32 [T] at 16 kHz, until the caller stops. Errors: see `opened`."""
    blocks: SimpleQueue[np.ndarray] = SimpleQueue()
    with opened(blocks.put):
        while True:
            yield blocks.get()


@contextmanager
def opened(take: Callable[[np.ndarray], object]) -> Iterator[None]:
    """Inside, `take` gets each block of samples, float32 [T], in a thread of its own.

    Raises ValueError where the library, PortAudio or a microphone is missing.
    """
    try:
        import sounddevice
    except ImportError as error:
        raise ValueError("the microphone needs sounddevice: pip install 'audiorl[mic]'") from error
    except OSError as error:  # PortAudio is a library of the system
        raise ValueError(
            f"the microphone needs PortAudio ({error}); on Debian: apt-get install libportaudio2"
        ) from error

    def copy(samples: np.ndarray, frames: int, time: object, status: object) -> None:
        take(samples[:, 0].copy())

    try:
        stream = sounddevice.InputStream(samplerate=RATE, channels=1, dtype="float32", callback=copy)
        stream.__enter__()
    except sounddevice.PortAudioError as error:
        raise ValueError(f"no microphone can be opened: {error}; give a file") from error
    try:
        yield
    finally:
        stream.__exit__(None, None, None)

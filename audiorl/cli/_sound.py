"""Sound in and out of the terminal: the microphone (by the optional library sounddevice), WAV files, players."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from audiorl.errors import install

if TYPE_CHECKING:
    import numpy as np

    from audiorl.audio import AudioClip

RATE = 16_000
"""Hz of recordings."""
MIN_SECONDS = 0.1
Write = Callable[[Any], object]
"""Takes samples, int16 [T]."""
STOPPED, PIPE_CLOSED = 130, 141
"""Exit codes: after Ctrl-C, and where the player ended first, as shells report SIGPIPE."""


def record(wait: Callable[[], object]) -> AudioClip:
    """Return what the default microphone picks up while `wait()` runs, mono at 16 kHz.

    Raises ValueError as `opened` does, and for a recording that is too short or too long.
    """
    import numpy as np

    from audiorl.audio import MAX_SECONDS, AudioClip

    blocks: list[np.ndarray] = []
    with opened(blocks.append):
        wait()
    samples_T = np.concatenate([np.zeros(0, np.float32), *blocks])
    seconds = len(samples_T) / RATE
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"recorded {seconds:.1f} s; record {MIN_SECONDS:g} to {MAX_SECONDS:g} s")
    return AudioClip(array=samples_T, sample_rate=RATE)


def listen() -> Iterator[np.ndarray]:
    """Yield the microphone's samples as they come, float32 [T] at 16 kHz, until the caller stops; see `opened`."""
    blocks: SimpleQueue[np.ndarray] = SimpleQueue()
    with opened(blocks.put):
        while True:
            yield blocks.get()


@contextmanager
def opened(take: Callable[[np.ndarray], object]) -> Iterator[None]:
    """Give `take` each block of samples, float32 [T], in a thread of its own.

    Raises ValueError where the library, PortAudio or a microphone is missing.
    """
    try:
        import sounddevice
    except ImportError as error:
        raise ValueError(f"the microphone needs sounddevice: {install('mic')}") from error
    except OSError as error:  # PortAudio is a library of the system
        raise ValueError(f"the microphone needs PortAudio ({error}); Debian: apt-get install libportaudio2") from error

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


def check_output(out: Path | None, raw: bool) -> None:
    """Raise ValueError for samples to a terminal, and for a file of another kind."""
    if raw and os.isatty(1):
        raise ValueError("--raw: writes samples; pipe them to a player: … --raw | aplay -f S16_LE -r 24000 -c1")
    if out is not None and out.suffix.lower() != ".wav":
        raise ValueError(f"--out: {out} is no .wav file; choose a name that ends in .wav")


def pcm16(wav: Any) -> Any:
    """Return samples in [-1, 1] as int16, little-endian."""
    return (wav.clip(-1, 1) * 32767).round().astype("<i2")


@contextmanager
def wav_file(path: Path, rate: int) -> Iterator[Write]:
    """Write a WAV file that is complete however the block is left."""
    import soundfile

    path.parent.mkdir(parents=True, exist_ok=True)
    with soundfile.SoundFile(path, "w", rate, 1, "PCM_16") as file:
        yield file.write


@contextmanager
def samples_to_stdout() -> Iterator[Write]:
    """Write to stdout without a buffer; whatever else prints there meanwhile goes to stderr: it would be played."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)

    def write(samples: Any) -> None:
        left = memoryview(samples.tobytes())
        while len(left):
            left = left[os.write(stdout, left) :]

    try:
        yield write
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)

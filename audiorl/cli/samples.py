"""Where the samples of generated speech go: a WAV file, or a player behind a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Write = Callable[[Any], object]
"""Takes samples, int16 [T]."""
STOPPED = 130
"""Exit code after Ctrl-C."""
PIPE_CLOSED = 141
"""Exit code where the player ended first, as shells report SIGPIPE."""


def check_output(out: Path | None, raw: bool) -> None:
    """Raise ValueError for samples to a terminal, and for a file of another kind."""
    if raw and os.isatty(1):
        raise ValueError("--raw: writes samples; pipe them to a player: … --raw | aplay -f S16_LE -r 24000 -c1")
    if out is not None and out.suffix.lower() != ".wav":
        raise ValueError(f"--out: {out} is no .wav file; choose a name that ends in .wav")


def pcm16(wav: Any) -> Any:
    """Samples in [-1, 1] as int16, little-endian."""
    return (wav.clip(-1, 1) * 32767).round().astype("<i2")


@contextmanager
def wav_file(path: Path, rate: int) -> Iterator[Write]:
    """A WAV file that is complete however the block is left."""
    import soundfile

    path.parent.mkdir(parents=True, exist_ok=True)
    with soundfile.SoundFile(path, "w", rate, 1, "PCM_16") as file:
        yield file.write


@contextmanager
def samples_to_stdout() -> Iterator[Write]:
    """Writes to stdout without a buffer. Inside, whatever else prints there, such as a library's warning, goes to
    stderr, since it would be played."""
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

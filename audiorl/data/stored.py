"""Encoded audio that came without a file of its own, from an archive or a hub, kept in a folder by its content.

Rows then refer to paths like all others: nothing stays in memory, and a second reading writes nothing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

CACHE = "AUDIORL_CACHE"
"""Environment variable: where audio is kept; by default ~/.cache/audiorl."""


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "audiorl")


def stored(data: bytes, suffix: str) -> Path:
    """The file that holds `data`, written unless it is there. Several processes may store the same at once."""
    name = hashlib.sha256(data).hexdigest()[:40] + suffix.lower()
    path = cache_folder() / "audio" / name[:2] / name
    if path.is_file() and path.stat().st_size == len(data):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise ValueError(f"{path}: audio cannot be stored there ({error}); set {CACHE} to another folder") from error
    return path

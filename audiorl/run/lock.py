"""One process at a time writes into a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold FOLDER/.lock, which the system frees when the process ends in any way. Raises ValueError if it is held."""
    lock = FileLock(folder / ".lock", thread_local=False)  # whichever thread drops the last reference releases it
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"{folder}: another process works in this folder, or this one has not closed it; stop it first, or wait "
            "for its end"
        ) from error
    try:
        yield
    finally:
        lock.release()

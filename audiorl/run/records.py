"""The JSON files of run folders and checkpoints: what each must hold, reading and writing; and the folder's lock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

Count = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")

FROM_PYTHON = "in Python"
"""The only one of a run's arguments where Python began it, which no command repeats."""
IN_MEMORY = "in memory:"
"""The first of a run's arguments where Python gave what no file holds; the others name it."""


class RunConfig(msgspec.Struct):
    """config.json of a run: what was asked."""

    recipe: Annotated[str, msgspec.Meta(pattern=r"^([^/]{0,255}/)*[^/]{0,255}$")]  # no longer than names of files are
    argv: list[str]
    config: dict[str, Any]
    versions: dict[str, str] = {}


class RunState(msgspec.Struct):
    """state.json of a run: how far it is. Paths of checkpoints are relative to the run folder."""

    seq: Count
    finished: dict[str, Any]
    checkpoints: dict[str, str]
    seconds: dict[str, float]
    rollout_offsets: dict[str, Count] = {}
    cpu_seconds: dict[str, float] = {}
    """By phase, for those whose steps all ran on CPUs."""


class TrainerMeta(msgspec.Struct, omit_defaults=True):
    """trainer.json of a checkpoint: how far its phase was."""

    phase: str = ""
    step: Count = 0
    seq: Count = 0
    seconds: float | None = None
    cpu_seconds: float | None = None
    """None where a step did not run on CPUs alone."""


Manifest = dict[str, tuple[Count, Count]]
"""manifest.json of a checkpoint: size and CRC-32 of every other file, by its path there."""


def read_record(path: Path, schema: type[T]) -> T:
    """Return the content of a JSON file. Raises ValueError naming the file and the field that does not fit `schema`."""
    try:
        value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text, and names no file
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ValueError(f"{path}: edited or damaged: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, not valid JSON ({error})") from error


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # a full disk
        partial.unlink(missing_ok=True)
        raise


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names, as on the command line; lists and null are JSON texts."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, str | int | float | bool)
            leaves[f"{prefix}{key}"] = value if plain else json.dumps(value, ensure_ascii=False)
    return leaves


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold FOLDER/.lock, which the system frees when the process ends in any way. Raises ValueError if it is held."""
    lock = FileLock(folder / ".lock", thread_local=False)  # whichever thread drops the last reference releases it
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        message = "another process works in this folder, or this one has not closed it; stop it first"
        raise ValueError(f"{folder}: {message}") from error
    try:
        yield
    finally:
        lock.release()

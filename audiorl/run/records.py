"""The JSON files of run folders and checkpoints: what each must hold, checked where it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")


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
    """Of the phases whose steps all ran on CPUs. Runs of earlier releases lack it."""


class TrainerMeta(msgspec.Struct, omit_defaults=True):
    """trainer.json of a checkpoint."""

    phase: str = ""
    step: Count = 0
    seq: Count = 0


Manifest = dict[str, tuple[Count, Count]]
"""manifest.json of a checkpoint: size and CRC-32 of every other file, by its path there."""


def read_record(path: Path, schema: type[T]) -> T:
    """The content of a JSON file. Raises ValueError naming the file, and the field that is not what `schema` says."""
    try:
        value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text, and names no file
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ValueError(f"{path}: edited or damaged: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, not valid JSON ({error})") from error

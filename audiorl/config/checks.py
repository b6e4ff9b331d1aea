"""Checks of options' values, in one line that names the option and says what it must be, and their JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def require(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {what}")


def refuse(faults: Mapping[str, object]) -> None:
    """Raise ValueError with the first message whose condition holds."""
    for message, holds in faults.items():
        if holds:
            raise ValueError(message)


def require_counts(config: Any, names: tuple[str, ...], prefix: str = "") -> None:
    for name in names:
        require(getattr(config, name) > 0, prefix + name, getattr(config, name), "at least 1")


def require_ranges(
    config: Any, positive: Sequence[str] = (), not_negative: Sequence[str] = (), prefix: str = ""
) -> None:
    """Refuse numbers that are not finite anywhere in `config`, and those out of range in the fields named.

    A field that is None is not set, and passes.
    """
    require_finite(config, prefix)
    for name in positive:
        value = getattr(config, name)
        require(value is None or value > 0, prefix + name, value, "greater than 0")
    for name in not_negative:
        value = getattr(config, name)
        require(value is None or value >= 0, prefix + name, value, "at least 0")


def require_finite(config: Any, path: str = "") -> None:
    """Raise ValueError naming the first number in `config`, at any depth, that is not finite."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            require_finite(value, f"{path}{field.name}.")
        for number in value if isinstance(value, tuple) else (value,):
            require(not isinstance(number, float) or math.isfinite(number), path + field.name, value, "finite")


def to_json(value: Any) -> Any:
    """Return a config, or anything in one, as plain JSON values. Dataclasses outside configs keep their class name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"a config holds plain values, not {type(value).__name__}")

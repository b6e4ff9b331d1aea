"""Checks of options' values: one line that names the option and says what it must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


def require(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {what}")


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

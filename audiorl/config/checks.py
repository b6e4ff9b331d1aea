"""Checks of options' values, in one line that names the option and says what it must be, and their JSON."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

DEVICES = r"auto|cpu|meta|cuda(:\d{1,3})?"
SIGNED = ("weight", "weights", "coef", "gain", "margin", "hinge", "layers", "regulariser")
"""Ends of the names of options that may be below 0."""
_OURS = tuple(Path(__file__).parents[2] / name for name in ("audiorl", "corpora", "tokenizers_audio"))


def require(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {what}")


def refuse(*faults: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first fault (is it there, message) that is there."""
    for there, message in faults:
        if there:
            raise ValueError(message)


TOKENS = 8192
"""Tokens of a forward pass where `micro_batch_tokens` is not set and the device is a CPU."""


class HasPasses(Protocol):
    """Options of what runs over packed rows."""

    @property
    def micro_batch_tokens(self) -> int | None: ...


def pass_tokens(config: HasPasses) -> int:
    """Return the tokens of a forward pass. Workers on a GPU have set what its memory holds where None was given."""
    return TOKENS if config.micro_batch_tokens is None else config.micro_batch_tokens


def require_counts(config: Any, names: tuple[str, ...], prefix: str = "") -> None:
    for name in names:
        if name == "micro_batch_tokens" and config.micro_batch_tokens is None:
            continue
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
    """Raise ValueError naming the first number in `config`, at any depth, that is not finite or has over 64 bits."""
    for name, value in _values(config, path):
        require(not isinstance(value, float) or math.isfinite(value), name, value, "finite")
        require(not isinstance(value, int) or abs(value) < 2**63, name, value, "below 2**63")


def require_sound(config: Any) -> None:
    """Raise ValueError naming the first value in `config`, at any depth, that no option of its name and type can have.

    These are numbers that are not finite, seeds and other numbers below 0, but for those of recipes from elsewhere,
    devices that do not exist, and a rate of the control that falls.
    """
    require_finite(config)
    file = getattr(sys.modules.get(type(config).__module__), "__file__", None) or ""
    own = {field.name for field in dataclasses.fields(config)} if not file.startswith(tuple(map(str, _OURS))) else ()
    for name, value in _values(config):
        signed = isinstance(value, str | None) or name.endswith(SIGNED) or name in own
        require(signed or value >= 0, name, value, "at least 0")
        if name.rpartition(".")[2] == "device":
            require(bool(re.fullmatch(DEVICES, str(value))), name, value, "auto, cpu, cuda or cuda:N")
        if name == "control_optim.schedule":
            require(value == "constant", name, value, "'constant': a time limit ends the control, at no known step")


def _values(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every number and text."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), path + field.name
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{name}.")
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int | float | str):
                yield name, part


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

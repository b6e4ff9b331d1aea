"""Reading the fields of an untrusted JSON document: presence and type are checked, and errors name the field."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class SerializationError(ValueError):
    """A document with something missing or wrong; the message begins with the field."""


def get(row: Any, name: str, kind: type[T], where: str) -> T:
    """The field, checked for presence and type."""
    if name not in checked(row, dict, where):
        raise SerializationError(f"{where}.{name}: missing")
    return checked(row[name], kind, f"{where}.{name}")


def checked(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):  # True is an int, but no number
        raise SerializationError(f"{where}: is a {type(value).__name__}, expected {kind.__name__}")
    return value


def finite(value: Any, where: str) -> float:
    """A number, as a float."""
    number = float(value) if type(value) is int and abs(value) < 2**53 else checked(value, float, where)
    if not math.isfinite(number):
        raise SerializationError(f"{where}: is {number}")
    return number


def optional(row: Any, name: str, read: Callable[[Any, str, str], T], where: str) -> T | None:
    """The field by `read`, or None where it is null; it must be present."""
    return None if isinstance(row, dict) and row.get(name, 0) is None else read(row, name, where)


def rows(row: Any, name: str, where: str, read: Callable[[Any, str], T]) -> list[T]:
    """A list field; `read` gets each entry with its place."""
    return each(get(row, name, list, where), f"{where}.{name}", read)


def each(values: list[Any], where: str, read: Callable[[Any, str], T]) -> list[T]:
    return [read(value, f"{where}[{i}]") for i, value in enumerate(values)]


def entry(table: list[T], place: Any, where: str) -> T:
    """The entry of `table` at index `place`."""
    if not 0 <= checked(place, int, where) < len(table):
        raise SerializationError(f"{where}: is {place}, there are {len(table)}")
    return table[place]


def integer(row: Any, name: str, where: str) -> int:
    return get(row, name, int, where)


def text(row: Any, name: str, where: str) -> str:
    return get(row, name, str, where)


def texts(row: Any, name: str, where: str) -> tuple[str, ...]:
    return tuple(rows(row, name, where, lambda value, at: checked(value, str, at)))


def number(row: Any, name: str, where: str) -> float:
    if name not in checked(row, dict, where):
        raise SerializationError(f"{where}.{name}: missing")
    return finite(row[name], f"{where}.{name}")


def seconds(row: Any, name: str, where: str) -> float:
    """A number, 0 or more."""
    value = number(row, name, where)
    if value < 0:
        raise SerializationError(f"{where}.{name}: is {value}, expected 0 or more")
    return value


def count(row: Any, name: str, where: str) -> int:
    """A whole number, 0 or more."""
    value = integer(row, name, where)
    if value < 0:
        raise SerializationError(f"{where}.{name}: is {value}, expected 0 or more")
    return value


def one_of(row: Any, name: str, allowed: Sequence[str], where: str) -> Any:
    value = text(row, name, where)
    if value not in allowed:
        raise SerializationError(f"{where}.{name}: is {value!r}, expected one of {', '.join(allowed)}")
    return value


def base64_bytes(value: Any, where: str) -> bytes:
    """The bytes of a base64 text."""
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise SerializationError(f"{where}: not base64 ({error})") from None

"""What the fields of rows may hold: one struct a kind of row, checked with msgspec where the row is read.

The structs stand in the modules of this package, here is what checks a row against one:

    columns = check(row.data, SampleColumns)    # FieldError, field 'language': ['en'] is not a language; give an ISO …

Fields that a struct does not name are not checked. The description of a type completes "3 is not …" and says what to do
after the semicolon. None is a field that is not given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from audiorl.languages import language_code

T = TypeVar("T")


class FieldError(ValueError):
    """A field that cannot be used, with the reason and the remedy.

    holding: a text of the field, where only the part of the sample is known that it became."""

    def __init__(self, field: str, message: str, holding: str = "") -> None:
        super().__init__(message)
        self.field, self.message, self.holding = field, message, holding


def check(data: Any, schema: type[T], prefix: str = "", decode: Callable[[type, Any], Any] | None = None) -> T:
    """Return `data` as `schema`, a struct or dataclass. Raises FieldError naming the field, after `prefix`, that is
    missing or wrong. `decode` makes values of types that are neither, and raises ValueError."""
    try:
        return msgspec.convert(data, schema, builtin_types=(bytes,), dec_hook=decode)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        reason, _, place = str(error).partition(" - at `")
    place = place.partition("[...]")[0]  # a key of a mapping is not named
    path: list[str | int] = [name or int(index) for name, index in re.findall(r"\.([\w-]+)|\[(\d+)\]", place)]
    missing = re.search(r"missing required field `(.+)`", reason)
    if missing:
        path.append(missing[1])
    if not re.match("Expected|Object|Invalid|Integer|Number|String|Length|Array", reason):  # of `decode` or a dataclass
        raise FieldError(_field(prefix, path), reason)
    depth, expected = max(_descriptions(schema, path), key=lambda described: described[0], default=(0, "an object"))
    value: Any = None if missing else data
    for step in () if missing else path[:depth]:
        value = value[step]
    field = _field(prefix, path[:depth])
    if value is not None:
        raise FieldError(field, f"{_short(value)} is not {expected}")
    columns = f" (the columns are {', '.join(map(str, data))})" if missing and len(path) == 1 else ""
    raise FieldError(field, f"missing; {expected.partition('; ')[2] or f'give {expected}'}{columns}")


def _field(prefix: str, path: Sequence[str | int]) -> str:
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return f"{prefix}{steps}".removeprefix(".")


def check_language(language: str | None, field: str = "language") -> None:
    """Raise FieldError for a language that nobody knows."""
    try:
        language_code(language or "und")
    except ValueError as error:
        raise FieldError(field, str(error)) from error


def check_limit(limit: int | None) -> None:
    """Raise ValueError for a number of rows below 1."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a whole number from 1, or None for all rows, got {limit!r}")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for what is not JSON or UTF-8, and for half a surrogate
    pair."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\ud" in text.lower():
        check_characters(value)
    return value


def check_characters(value: Any, field: str = "") -> None:
    """Raise FieldError for a text with half a surrogate pair, which JSON can escape and UTF-8 cannot hold."""
    if isinstance(value, str) and _HALF.search(value):
        raise FieldError(field, f"{_short(value)} holds half a character; write both halves of its surrogate pair")
    if isinstance(value, dict):
        for name, held in value.items():
            check_characters(name, field)
            check_characters(held, f"{field}.{name}".removeprefix("."))
    if isinstance(value, list):
        for number, held in enumerate(value):
            check_characters(held, f"{field}[{number}]")


_HALF = re.compile("[\ud800-\udfff]")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split("\n"))  # arrays have several lines
    return text if len(text) <= 200 else f"{text[:199]}…"


_PLAIN = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
"""Descriptions of the fields of dataclasses, which have none of their own."""


def _descriptions(
    hint: Any, path: Sequence[str | int], depth: int = 0, plain: bool = False
) -> Iterator[tuple[int, str]]:
    """(steps of `path`, description) of every type on the way to a place, each before the types that it consists of."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        yield from ((depth, meta.description) for meta in arguments[1:] if meta.description)
        yield from _descriptions(arguments[0], path, depth, plain)
    elif kind in (Union, UnionType):
        for member in arguments:
            yield from _descriptions(member, path, depth, plain)
    elif kind is Literal:
        yield depth, f"one of {', '.join(map(str, arguments))}"
    elif kind in (list, tuple):
        yield depth, "a list"
        if depth < len(path):
            yield from _descriptions(arguments[0], path, depth + 1, plain)
    elif isinstance(hint, type) and (issubclass(hint, Struct) or is_dataclass(hint)):
        if issubclass(hint, Struct):
            fields = {f.encode_name: f.type for f in msgspec.structs.fields(hint)}
        else:
            hints = get_type_hints(hint, include_extras=True)
            fields = {f.name: hints[f.name] for f in dataclass_fields(hint)}
        yield depth, f"an object; give {{{', '.join(fields)}}}"
        if depth < len(path) and path[depth] in fields:
            yield from _descriptions(fields[str(path[depth])], path, depth + 1, is_dataclass(hint))
    elif plain and kind in (dict, Mapping):
        yield depth, f"an object; give {{name: {_PLAIN.get(arguments[1], '…')}}}"
    elif plain and hint in _PLAIN:
        yield depth, _PLAIN[hint]

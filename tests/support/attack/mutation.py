"""Mutations of an input by a `random.Random`, which Hypothesis can also provide and shrink."""

from __future__ import annotations

import json
import math
import struct
from copy import deepcopy
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 99, -7, 2**31 - 1, 2**53 + 1, 2**63, 10**400, 0.5, -0.5, 1e-9, 1e9, 1e30, 1e308,
    -1e308, 5e-324, math.nan, math.inf, -math.inf, "", " ", "\n", "nan", "None", "0", "-1", "true", "A", "\ud800",
    "x\0y", "\u202e", "\ufeff", "a" * 5000, "../../etc/passwd", "/etc/passwd", "/dev/zero", "http://127.0.0.1/a.wav",
    [], [[]], [None], [""], ["a", "a"], [1, 2], ["en"], {}, {"path": 1}, {"": ""}, {"bytes": "x"}, {"array": [0, 1]},
    {"array": [0.5, math.nan], "sampling_rate": 16000}, {"array": [3, 32000], "sampling_rate": 16000},
    {"array": [[0.1] * 9], "sampling_rate": 2**31 - 1}, {"path": "a.wav", "sampling_rate": -1},
)  # fmt: skip
"""Values that a field seldom holds."""


def mutate_bytes(rng: Random, data: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """One to four edits: flipped bits, other bytes, cuts, repeats, NULs, a piece of the same or another seed."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        if not content:
            return bytes(content)
        start = rng.randrange(len(content))
        length = min(rng.choice((1, 2, 4, 8, 27, 64, 300, len(content))), len(content) - start)
        end = start + length
        match rng.randrange(9):
            case 0:
                content[start] ^= 1 << rng.randrange(8)
            case 1:
                content[start:end] = rng.randbytes(length)
            case 2:
                content[start] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 3:
                del content[start:]
            case 4:
                del content[start:end]
            case 5:
                content[end:end] = content[start:end] * rng.choice((1, 2, 50))
            case 6:
                content[start:start] = bytes(rng.choice((1, 2, 16, 4096)))
            case 7:
                content[start:end] = bytes(length)
            case _:
                other = rng.choice((*others, bytes(content)))
                cut = rng.randrange(len(other) + 1)
                content[start:] = other[cut:]
    return bytes(content)


def mutate_value(rng: Random, value: Any) -> Any:
    """A JSON value with one of its parts replaced, removed, repeated or of another type."""
    places = list(_places(value))
    if not places:
        return deepcopy(rng.choice(ODD))
    holder, key = rng.choice(places)
    old = deepcopy(holder[key])
    match rng.randrange(10):
        case 0 | 1 | 2 | 3 | 4:
            holder[key] = deepcopy(rng.choice(ODD))
        case 5:
            del holder[key]
        case 6:
            holder[key] = [old]
        case 7:
            holder[key] = str(old) if not isinstance(old, str) else _number(old, rng)
        case 8 if isinstance(old, list) and old:
            holder[key] = [*old, rng.choice(old)] if rng.random() < 0.5 else old[:-1]
        case 8 if isinstance(old, bool | int | float):
            holder[key] = rng.choice((-old, old + 1, old * 1000, float(old) if abs(old) < 1e300 else 0.0))
        case 8 | 9 if isinstance(holder, dict):
            holder[rng.choice((*holder, "id", "path", "duration", "channel", "choices", "seconds"))] = old
        case _:
            holder[key] = {"value": old}
    return value


def _number(text: str, rng: Random) -> Any:
    try:
        return float(text)
    except ValueError:
        return rng.choice((3, 0.0, [text]))


def _places(value: Any) -> Any:
    """(holder, key) of every part of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(items):
        yield value, key
        yield from _places(part)


def dump(value: Any) -> bytes:
    """JSON with everything that Python's own reader takes: NaN, lone surrogates, long numbers."""
    return json.dumps(value).encode()


def mutate_json(rng: Random, data: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """A JSON document, or one of JSON lines, with one to three changed values; sometimes changed bytes instead."""
    draw = rng.random()
    if draw < 0.25:
        return mutate_bytes(rng, data, others)
    if draw < 0.27:
        deep = rng.choice((b"[", b'{"a":', b"[[", b"-")) * 100_000
        return deep if rng.random() < 0.5 else data.rstrip() + b"\n" + deep
    changes = rng.choice((1, 1, 1, 2, 3))
    try:
        value = json.loads(data)
        for _ in range(changes):
            value = mutate_value(rng, value)
        return dump(value)
    except ValueError:
        lines = data.split(b"\n")
    numbers = [i for i, line in enumerate(lines) if line.strip().startswith((b"{", b"["))]
    if not numbers:
        return mutate_bytes(rng, data, others)
    for _ in range(changes):
        number = rng.choice(numbers)
        try:
            lines[number] = dump(mutate_value(rng, json.loads(lines[number])))
        except ValueError:
            lines[number] = mutate_bytes(rng, lines[number])
    if rng.random() < 0.1:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"\n".join(lines)


def mutate_safetensors(rng: Random, data: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """A safetensors file with another header of the right length, or other bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.5:
        return mutate_bytes(rng, data, others)
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.2:  # the values alone
        return data[: 8 + size] + mutate_bytes(rng, body)[: len(body)].ljust(len(body), b"\0")
    value = mutate_value(rng, json.loads(header))
    if rng.random() < 0.3 and isinstance(value, dict) and isinstance(value.get("__metadata__"), dict):
        value["__metadata__"] = mutate_value(rng, value["__metadata__"])
    header = dump(value)
    return struct.pack("<Q", len(header)) + header + body

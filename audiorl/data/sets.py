"""Data sets side by side: drawing rows of each, mixing them by weight, and holding rows out.

    sets = [("avqa.jsonl:5000", avqa), ("music.jsonl:x0.5", music)]        # as the options name them, with their rows
    training, held_out = split_held_out(sets, [], count=200)

Every draw follows a hash of a seed and a row's id: it is the same after a resumption, whatever the other rows are.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from audiorl.audio import AudioClip
from audiorl.types import Sample

T = TypeVar("T")
Sets = Sequence[tuple[str, Sequence[T]]]
"""Data sets in order: the name that the user gave, and its rows."""


def parse_set(given: str) -> tuple[str, int | None, float]:
    """(path, rows to draw, weight) of `PATH`, `PATH:COUNT`, `PATH:xWEIGHT` or `PATH:COUNTxWEIGHT`.

    A path that exists is one, whatever its name. Raises ValueError for a weight of 0.

    >>> parse_set("avqa.jsonl:5000x0.5")
    ('avqa.jsonl', 5000, 0.5)
    """
    match = re.fullmatch(r"(.+):(?=.)(\d+)?(?:x(\d+(?:\.\d+)?))?", given)
    if not match or Path(given).exists():
        return given, None, 1.0
    path, count, weight = match.groups()
    if weight is not None and float(weight) == 0:
        raise ValueError(f"{given}: a weight of 0 leaves the set out; leave it out of the options")
    return path, None if count is None else int(count), float(weight or 1)


def first_drawn(given: str, items: Sequence[T], count: int, seed: int, usable: Callable[[int], bool]) -> list[T]:
    """`count` rows in the order of the data: the first usable ones, by their index, in the order of their draw keys."""
    in_order = (i for i in _draw_order(items, seed) if usable(i))
    chosen = list(islice(in_order, count)) if count <= len(items) else []
    if not 1 <= count == len(chosen):
        rows = len(chosen) or len(items)
        raise ValueError(f"{given}: {count} rows are asked for, but {parse_set(given)[0]} has {rows} usable ones")
    return [items[i] for i in sorted(chosen)]


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return at most `count` items, evenly spaced; None: all."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


HELD_OUT = 200
"""Rows that are held out of a large set where nothing else is said."""
SET = "data_set"
"""Where the metadata of a sample in a mix names its set."""


def weighted(sets: Sets[T], seed: int = 0) -> list[T]:
    """Return one epoch: the rows of all sets in order, each set's as often as the weight in its name says.

    2.5 gives every row twice and a half, drawn by `seed`, a third time. Prints the shares of a mix, whose samples name
    their set in metadata["data_set"].
    """
    mix: list[list[T]] = []
    for name, items in sets:
        passes, fraction = divmod(parse_set(name)[2], 1)
        extra = set(_draw_order(items, seed)[: round(fraction * len(items))])
        mix.append([item for i, item in enumerate(items) for _ in range(int(passes) + (i in extra))])
    total = sum(map(len, mix))
    if len(mix) == 1:
        return mix[0]
    paths = [parse_set(name)[0] for name, _ in sets]
    labels = [Path(path).stem for path in paths]
    if len(set(labels)) < len(labels):
        labels = paths
    rows: list[T] = []
    for (name, items), label, part in zip(sets, labels, mix, strict=True):
        print(f"mix: {len(part)} rows ({len(part) / max(total, 1):.0%}) of {name}, which has {len(items)}", flush=True)
        for item in part:
            if isinstance(item, Sample):
                item = cast(T, replace(item, metadata={**item.metadata, SET: label}))
            rows.append(item)
    return rows


def split_held_out(sets: Sets[T], held_out: Sets[T], count: int | None, seed: int = 0) -> tuple[list[T], list[T]]:
    """(training rows by their sets' weights, held-out rows): where no set is held out, `count` training rows are.

    None: `HELD_OUT` of them, or a fifth where these are fewer. See `stratified` and `weighted`. A training row about a
    recording that `stratified` drew is left out. Prints how many rows of `held_out` are about recordings that are
    trained on.
    """
    if not sets:
        raise ValueError("name what to train on: --data FILE … (or --data bundled)")
    for name, _ in held_out:
        if parse_set(name)[2] != 1:
            raise ValueError(f"{name}: a weight is for training data; leave it out")
    rest: list[T]
    measured_rows = [item for _, items in held_out for item in items]
    rows = sum(len(items) for _, items in sets)
    if held_out:
        _compare_recordings(sets, held_out)
    else:
        count = min(HELD_OUT, max(rows // 5, 1)) if count is None else count
        rest, measured_rows = stratified(sets, count, seed)
        measured_recordings = {_recording(item) for item in measured_rows}
        training = {id(item) for item in rest if _recording(item) not in measured_recordings}
        if not training and hasattr(rest[0] if rest else None, "target_language"):
            print(
                "audiorl: held out are parts of the one talk that is trained on; they measure memory", file=sys.stderr
            )
            training = {id(item) for item in rest}
        if len(training) < len(rest):
            print(f"left out of training: {len(rest) - len(training)} rows about held-out recordings", flush=True)
        sets = [(name, [item for item in items if id(item) in training]) for name, items in sets]
    rest = weighted(sets, seed)
    for use, part in (("train on", rest), ("measure on", measured_rows)):
        if not part:
            how = "; give fewer by --held-out-count, or a set of its own by --held-out" if not held_out else ""
            raise ValueError(f"nothing left to {use}: {rows} rows read, {len(measured_rows)} held out{how}")
    return rest, measured_rows


def _compare_recordings(sets: Sets[T], held_out: Sets[T]) -> None:
    """Print how many held-out rows have a clip that is trained on, by what is in the files. See `split_held_out`."""

    def clips(of: Sets[T]) -> list[list[AudioClip]]:
        return [_clips(item) for _, items in of for item in items]

    @cache
    def glimpse(path: str | None) -> tuple[int, bytes] | None:
        """Return the size of a file and a piece of its middle, in which equal files agree."""
        if path is None or not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size // 2)
            return size, file.read(256)

    @cache
    def digest(path: str) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def content(clip: AudioClip) -> str:
        if clip.path is None or glimpse(clip.path) is None:
            return clip.key
        return f"{digest(clip.path)}#{clip.key.rpartition('#')[2]}"

    measured = clips(held_out)
    seen = {glimpse(clip.path) for row in measured for clip in row}  # whole corpora have clips of one size
    trained = {content(clip) for row in clips(sets) for clip in row if glimpse(clip.path) in seen}
    shared = [i for i, row in enumerate(measured) if any(content(clip) in trained for clip in row)]
    if not shared:
        return
    first = identity([item for _, items in held_out for item in items][shared[0]])[0]
    print(
        f"audiorl: {len(shared)} of {len(measured)} held-out rows are about recordings that are trained on, such as "
        f"{first!r}: they measure memory; hold other recordings out",
        file=sys.stderr,
    )


def _clips(item: Any) -> list[AudioClip]:
    """Return the recordings that a row is about: those of its prompt, or the one that a flow makes, or a whole talk."""
    row = getattr(item, "sample", item)
    if isinstance(row, Sample):
        found: Iterable[Any] = row.audio or (row.metadata.get("audio"), row.metadata.get("before"))
        return [clip for clip in found if isinstance(clip, AudioClip)]
    talk = getattr(row, "audio", None)  # the part that a stream is may lie anywhere in it
    return [replace(talk, start=0.0, duration=None, context=0.0)] if isinstance(talk, AudioClip) else []


def _recording(item: Any) -> str:
    """Return what tells a row's recording: `recording` in its metadata, else its first clip, else its id."""
    row = getattr(item, "sample", item)
    given = getattr(row, "metadata", {}).get("recording")
    if given is not None:
        return str(given)
    clips = _clips(row)
    return clips[0].key if clips else identity(row)[0]


def _several_talks(sets: Sets[Any]) -> bool:
    """Tell whether the rows are streams of two recordings at least. Parts of one talk can only be held out singly."""
    streams = [item for _, items in sets for item in items if hasattr(item, "target_language")]
    return len({_recording(item) for item in streams}) > 1


def stratified(sets: Sets[T], count: int, seed: int = 0) -> tuple[list[T], list[T]]:
    """(the other rows, `count` rows drawn of every set, task and frequent answer in proportion), in the data's order.

    An answer of choice questions is frequent if its share of `count` is a row or more. Rows of one prompt, and parts of
    one talk, stay together: a few more than `count` may be drawn. Prints the counts.
    """
    rows = [(name, item) for name, items in sets for item in items]
    keys = []
    for name, item in rows:
        sample = getattr(item, "sample", item)
        answers = sample.references if isinstance(sample, Sample) and sample.choices else ()
        keys.append((name, identity(item)[1], answers[0] if answers else ""))
    sizes = Counter(keys)
    strata: dict[tuple[str, str, str], list[int]] = {}
    for i, key in enumerate(keys):
        frequent = sizes[key] * count >= len(rows)
        strata.setdefault(key if frequent else (*key[:2], ""), []).append(i)
    # Each stratum gives rows in proportion to its size; what rounding leaves goes to the largest remainders.
    number = min(count, len(rows))
    shares = [number * len(members) / max(len(rows), 1) for members in strata.values()]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - shares[i])
    for i in by_remainder[: number - sum(quotas)]:
        quotas[i] += 1
    chosen_indices: set[int] = set()
    counts: dict[tuple[str, str], list[int]] = {}
    first: dict[str, str] = {}  # parts of a talk are drawn by the id of the first one
    together = [identity(item)[0] for _, item in rows]
    if _several_talks(sets):
        together = [first.setdefault(_recording(item), id) for (_, item), id in zip(rows, together, strict=True)]
    for (name, task, _), members, quota in zip(strata, strata.values(), quotas, strict=True):
        chosen = draw({i: together[i] for i in members}, quota, seed)
        chosen_indices |= chosen
        drawn_and_size = counts.setdefault((name, task), [0, 0])
        drawn_and_size[0] += len(chosen)
        drawn_and_size[1] += len(members)
    for (name, task), (drawn, size) in counts.items():
        print(f"held out: {drawn} of {size} rows of {name}{task and f', {task}'}", flush=True)
    items = [item for _, item in rows]
    return [item for i, item in enumerate(items) if i not in chosen_indices], [items[i] for i in sorted(chosen_indices)]


def _draw_key(id: str, seed: int) -> bytes:
    """Rows are drawn in the order of this hash: a row's place does not depend on the other rows."""
    return hashlib.sha256(f"{seed}:{id}".encode()).digest()


def _draw_order(items: Sequence[Any], seed: int) -> list[int]:
    return sorted(range(len(items)), key=lambda i: _draw_key(identity(items[i])[0], seed))


def draw(id_of: Mapping[int, str], quota: float, seed: int) -> set[int]:
    """Return the indices of at least `quota` rows, all of an id or none."""
    members: dict[str, set[int]] = {}
    for i, id in id_of.items():
        members.setdefault(id, set()).add(i)
    chosen: set[int] = set()
    for id in sorted(members, key=lambda id: _draw_key(id, seed)):
        if len(chosen) < quota:
            chosen |= members[id]
    return chosen


def identity(item: Any) -> tuple[str, str]:
    """(id, stratum) of a row: a sample's task, a text's or stream's language. Rows of one id share a prompt."""
    item = getattr(item, "sample", item)
    if isinstance(item, Sample):
        return item.id, item.task
    if hasattr(item, "target_language"):
        return item.id, item.target_language
    return item.name, item.language

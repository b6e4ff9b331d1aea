"""Which items a step sees: a function of (seed, step) alone, so that a resumed run sees what it would have seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from audiorl.algos.packing import sorted_batches
from audiorl.audio import AudioClip, seconds
from audiorl.types import Sample

T = TypeVar("T")


def batch_of_step(items: Sequence[T], step: int, size: int, seed: int | str) -> list[T]:
    """Return the items of one step: passes over a new shuffle each epoch. Raises ValueError without any item."""
    if not items:
        raise ValueError("nothing to train on: the data is empty")
    batch = []
    for k in range(step * size, (step + 1) * size):
        epoch, place = divmod(k, len(items))
        batch.append(items[_shuffled(len(items), seed, epoch)[place]])
    return batch


def sorted_batch_of_step(
    items: Sequence[T], lengths: tuple[int, ...], step: int, size: int, seed: int | str
) -> list[T]:
    """Return the same with batches of similar length, in random order; the last of an epoch may be smaller."""
    if not items:
        raise ValueError("nothing to train on: the data is empty")
    epoch, place = divmod(step, -(-len(items) // size))
    return [items[i] for i in _sorted(lengths, size, seed, epoch)[place]]


def rough_length(sample: Sample, *answers: str | AudioClip) -> int:
    """About how many tokens a prompt and its answers make, from the length of their audio: good enough to sort by."""
    parts = [*(c for m in sample.messages for c in m.content if isinstance(c, str)), *sample.audio, *answers]
    texts, clips = (p for p in parts if isinstance(p, str)), (p for p in parts if isinstance(p, AudioClip))
    return int(25 * sum(map(seconds, clips))) + sum(map(len, texts)) // 4


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int | str, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


@lru_cache(maxsize=2)
def _sorted(lengths: tuple[int, ...], size: int, seed: int | str, epoch: int) -> list[list[int]]:
    return sorted_batches(lengths, size, random.Random(f"{seed}/{epoch}"))

"""Bins of sequences."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiorl.algos.packing import pack


def best_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Tokens per bin of best fit decreasing, straight from its definition."""
    rooms: list[int] = []
    used = []
    for length in sorted(lengths, reverse=True):
        if length > budget:
            used.append(length)
            continue
        place = bisect.bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else budget
        bisect.insort(rooms, room - length)
    return sorted(used + [budget - room for room in rooms])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=60), st.integers(1, 20))
def test_pack_is_best_fit_decreasing(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in members) for members in bins]
    assert all(total <= budget or len(members) == 1 for total, members in zip(sums, bins, strict=True))
    assert sorted(s for s in sums if s) == [s for s in best_fit(lengths, budget) if s]


def test_pack_by_hand() -> None:
    # 6 and 5 open bins with room for 2 and 3; 3 fits the second only, 2 then fills the first
    assert pack([2, 6, 3, 5], 8) == [[0, 1], [2, 3]]
    assert pack([9, 4, 4], 8) == [[0], [1, 2]]
    assert pack([], 8) == []
    assert pack([0, 0], 8) == [[0, 1]]
    with pytest.raises(ValueError, match="budget"):
        pack([1], 0)
    with pytest.raises(ValueError, match="a length is -1"):
        pack([1, -1], 4)


def test_pack_fills_its_bins() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int).clip(1, 8192).tolist()
    assert sum(lengths) / (len(pack(lengths, 8192)) * 8192) > 0.998

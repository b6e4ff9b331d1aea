"""How work is cut: over ranks, into micro-batches that share prompts, into batches of similar length."""

from __future__ import annotations

import itertools
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiorl.algos.experience import Experience
from audiorl.algos.packing import balance, micro_batches, pack_experiences, sorted_batches
from audiorl.train.rl.processes import split_groups


def answer(prompt: int, sampled: int, group: str = "", first: int = 0) -> Experience:
    """`prompt` tokens first, first + 1, … and `sampled` more."""
    length = prompt + sampled
    return Experience(
        ids=torch.arange(first, first + length),
        loss_mask=torch.arange(length) >= prompt,
        prompt_length=prompt,
        group_id=group,
    )


def least_maximum(costs: list[int], ranks: int) -> int:
    """Over every assignment."""
    return min(
        max(sum(c for c, r in zip(costs, where, strict=True) if r == rank) for rank in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(costs))
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_within_grahams_bound(costs: list[int], ranks: int) -> None:
    shares = balance(costs, ranks)
    assert len(shares) == ranks and sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    fullest = max(sum(costs[i] for i in share) for share in shares)
    assert 3 * ranks * fullest <= (4 * ranks - 1) * least_maximum(costs, ranks)


def test_balance_by_hand() -> None:
    # Graham's worst case for two ranks: 3, 3, 2, 2, 2 gives 7 where 6 is possible
    assert balance([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
    assert balance([1, 9, 2, 3, 3], 2) == [[1], [0, 2, 3, 4]]
    assert balance([5], 3) == [[0], [], []]


def test_ranks_get_whole_groups_of_about_as_many_tokens() -> None:
    """Groups of 30, 12, 10 and 8 tokens, members not side by side."""
    batch = [answer(5, 10, "a"), answer(2, 4, "b"), answer(2, 2, "d"), answer(5, 10, "a")]
    batch += [answer(4, 6, "c"), answer(2, 4, "b"), answer(2, 2, "d")]
    assert split_groups(batch, 2) == [[0, 3], [1, 5, 2, 6, 4]]
    assert split_groups(batch, 1) == [[0, 3, 1, 5, 2, 6, 4]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9), st.integers(0, 99))
def test_sorted_batches_partition_by_length(lengths: list[int], size: int, seed: int) -> None:
    batches = sorted_batches(lengths, size, random.Random(seed))
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert sorted(map(len, batches), reverse=True) == [size] * (len(lengths) // size) + (
        [len(lengths) % size] if len(lengths) % size else []
    )
    ranges = sorted((min(lengths[i] for i in b), max(lengths[i] for i in b)) for b in batches)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(ranges))  # batches do not overlap in length
    assert batches == sorted_batches(lengths, size, random.Random(seed))


def test_sorted_batches_come_in_random_order() -> None:
    lengths = list(range(40))
    orders = {tuple(b[0] for b in sorted_batches(lengths, 4, random.Random(seed))) for seed in range(6)}
    assert len(orders) == 6 and {frozenset(o) for o in orders} == {frozenset(range(0, 40, 4))}
    members = {tuple(sorted(sorted_batches([7] * 8, 4, random.Random(seed))[0])) for seed in range(6)}
    assert len(members) > 1  # equal lengths do not always meet the same others


GROUPS = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 12), min_size=1, max_size=5)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(1, 40), st.booleans())
def test_micro_batches_keep_to_the_budget_and_share_prompts(
    groups: list[tuple[int, list[int]]], budget: int, share: bool
) -> None:
    batch = [answer(p, n, f"g{g}", 100 * g) for g, (p, responses) in enumerate(groups) for n in responses]
    packs = micro_batches(batch, budget, share)
    assert sorted(i for pack in packs for i in pack) == list(range(len(batch)))
    for members in packs:
        assert members == sorted(members)
        rows = len(pack_experiences([batch[i] for i in members], share).ids)
        assert rows <= budget or len(members) == 1
    start = 0
    for prompt, responses in groups:
        own = set(range(start, start + len(responses)))
        start += len(responses)
        if share and prompt + sum(responses) <= budget:
            assert any(own <= set(members) for members in packs)  # what fits is not split


def test_a_shared_prompt_counts_once_in_the_budget() -> None:
    """Prompt 4 and answers of 2, 3, 5: shared 4 + 2 + 3 = 9 rows, then 4 + 5; repeated 6, 7 and 9."""
    batch = [answer(4, n, "g") for n in (2, 3, 5)]
    assert sorted(micro_batches(batch, 9)) == [[0, 1], [2]]
    assert sorted(micro_batches(batch, 14)) == [[0, 1, 2]]
    assert sorted(micro_batches(batch, 13)) == [[0, 1], [2]]
    assert sorted(micro_batches(batch, 13, share_prompts=False)) == [[0, 1], [2]]
    assert sorted(micro_batches(batch, 12, share_prompts=False)) == [[0], [1], [2]]
    assert len(pack_experiences([batch[0], batch[1]]).ids) == 9

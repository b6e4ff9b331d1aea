"""The simulation of generation engines against cases that can be computed by hand."""

from __future__ import annotations

import pytest

from bench.engines import (
    POLICIES,
    Generated,
    Policy,
    Rates,
    Request,
    Roofline,
    generate,
    step_times,
)

SECOND = Rates((1,), (1.0,))
"""One token a second, whatever the batch... of one: a place more would take as long again."""
EVEN = Rates((1, 100), (1.0, 100.0))
"""A step takes a second at any batch size."""


def requests(*answers: int, prompt: int = 0) -> list[Request]:
    return [Request(i, prompt, n) for i, n in enumerate(answers)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_engine_one_place_takes_the_sum(policy: Policy) -> None:
    assert generate(requests(3, 5, 2), 1, EVEN, 1, policy) == Generated(10.0, 1.0, 10)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_engine_with_room_takes_the_longest(policy: Policy) -> None:
    assert generate(requests(3, 5, 2), 1, EVEN, 4, policy).seconds == 5.0


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_lengths_split_evenly(policy: Policy) -> None:
    for engines in (1, 2, 4, 8):
        assert generate(requests(*[7] * 8), engines, EVEN, 1, policy) == Generated(56 / engines, 1.0, 56)


def test_two_engines_by_policy() -> None:
    """Answers of 8, 1, 1, 6 tokens, one place each.

    Dealt out in turns: 8 + 1 and 1 + 6. In order to who is free: 8, and 1 + 1 + 6. Longest first: 8, and 6 + 1 + 1.
    """
    answers = requests(8, 1, 1, 6)
    dealt, least, oracle = (generate(answers, 2, EVEN, 1, policy) for policy in POLICIES)
    assert (dealt.seconds, dealt.busy) == (9.0, (9 + 7) / 18)
    assert (least.seconds, least.busy) == (8.0, 1.0)
    assert (oracle.seconds, oracle.busy) == (8.0, 1.0)


def test_longest_first_is_better_where_it_can_be() -> None:
    """1, 1, 2 to who is free: 1 + 2 and 1. Longest first: 2 and 1 + 1."""
    answers = requests(1, 1, 2)
    assert [generate(answers, 2, EVEN, 1, policy).seconds for policy in POLICIES] == [3.0, 3.0, 2.0]


def test_a_place_that_becomes_free_is_taken() -> None:
    """Two places, 4, 1 and 2 tokens: the third begins after one second and ends with the batch that has become one.

    A token takes a second alone and 1.5 s together: 1.5 s for the first, 2 x 1.5 s for the next two, 1 s for the last.
    """
    rates = Rates((1, 2), (1.0, 2 / 1.5))
    assert generate(requests(4, 1, 2), 1, rates, 2, "least").seconds == pytest.approx(5.5)


def test_a_groups_prompt_is_read_once_on_each_engine() -> None:
    speed = Rates((1, 100), (1.0, 100.0), prompt_tokens_per_second=10.0)
    group = [Request(0, 50, 3) for _ in range(4)]
    assert generate(group, 1, speed, 4, "least").seconds == 5 + 3
    assert generate(group, 2, speed, 4, "least").seconds == 5 + 3, "both read it"
    others = [Request(i, 50, 3) for i in range(4)]
    assert generate(others, 1, speed, 4, "least").seconds == 4 * 5 + 3


def test_a_cache_that_grows_is_read_token_by_token() -> None:
    """Against a loop over steps, with lengths that end in between."""
    speed = Roofline(weights=1000.0, cache=3.0, bandwidth=100.0, peak=1e9, reached=1.0, used=1.0)
    answers = [Request(0, 10, 4), Request(0, 10, 9), Request(0, 10, 6)]
    contexts, seconds, left = [10, 10, 10], 10 * 2 * 1000 / 1e9, [4, 9, 6]
    while any(left):
        seconds += (2000 + 3 * sum(c for c, n in zip(contexts, left, strict=True) if n)) / 100
        contexts = [c + 1 for c in contexts]
        left = [max(n - 1, 0) for n in left]
    assert generate(answers, 1, speed, 8, "least").seconds == pytest.approx(seconds)


def test_steps_on_and_one_off_policy() -> None:
    batches = [Generated(10.0, 0.5, 100), Generated(30.0, 1.0, 300)]
    step = step_times(batches, training=20.0, sync=1.0)
    assert (step.generating, step.busy, step.tokens) == (20.0, 0.75, 200.0)
    assert step.synchronous == 20 + 20 + 1
    assert step.overlapped == (20 + 30) / 2 + 1

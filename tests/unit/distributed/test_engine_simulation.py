"""The simulation of generation engines against cases that can be computed by hand."""

from __future__ import annotations

import pytest

from bench.engines import POLICIES, Generated, Policy, Rates, Request, Roofline, generate, step_times

EVEN = Rates((1, 100), (1.0, 100.0))
"""A step takes a second at any batch size."""


def requests(*answers: int, prompt: int = 0) -> list[Request]:
    return [Request(i, prompt, n) for i, n in enumerate(answers)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_engine_with_room_takes_the_longest(policy: Policy) -> None:
    assert generate(requests(3, 5, 2), 1, EVEN, 4, policy).seconds == 5.0


def test_two_engines_by_policy() -> None:
    """Answers of 8, 1, 1, 6 tokens, one place each.

    Dealt out in turns: 8 + 1 and 1 + 6. In order to who is free: 8, and 1 + 1 + 6. Longest first: 8, and 6 + 1 + 1.
    """
    answers = requests(8, 1, 1, 6)
    dealt, least, oracle = (generate(answers, 2, EVEN, 1, policy) for policy in POLICIES)
    assert (dealt.seconds, dealt.busy) == (9.0, (9 + 7) / 18)
    assert (least.seconds, least.busy) == (8.0, 1.0)
    assert (oracle.seconds, oracle.busy) == (8.0, 1.0)


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

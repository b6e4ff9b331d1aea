"""Mutated inputs end in acceptance that an independent judge agrees with, or in a clear error (tests/support/attack).

`make test-slow` tries some thousand inputs, new ones every time; `python tools/attack.py` tries any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.attack.process import Attacker
from tests.support.attack.targets import GOOD, SEEDS, Input, all_targets, draw

NAMES = sorted(all_targets())
FEW = 100
"""Inputs of a target of weight 1."""


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    with Attacker() as process:
        yield process


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (b"", "accepted", ""),
        (b"wrong", "silent", "wrong"),
        (b"unnamed", "unnamed", "ValueError"),
        (b"named", "error", "something is wrong"),
        (b"memory", "traceback", "MemoryError"),
        (b"die", "death", "Segmentation fault"),
        (b"", "accepted", ""),
    ],
)
def test_every_outcome_is_noticed(attacker: Attacker, data: bytes, kind: str, detail: str) -> None:
    ended = attacker.attack("bad", Input("x", data))
    assert ended.kind == kind and detail in ended.detail, ended


def test_an_input_that_takes_too_long_is_noticed() -> None:
    with Attacker(seconds=1.0) as attacker:
        assert attacker.attack("bad", Input("x", b"hang")).kind == "hang"


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_accepted(attacker: Attacker, name: str) -> None:
    """Otherwise mutations of them would not get far."""
    for seed in all_targets()[name].seeds():
        if seed.name == "busy":  # the answer of a server that refuses
            continue
        ended = attacker.attack(name, seed)
        assert ended.kind == "accepted", (seed.name, ended)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_once_ended_badly(attacker: Attacker, name: str) -> None:
    """seeds/regressions/TARGET/: NUMBER@NAME, where a slash of the name is a plus."""
    for path in sorted((SEEDS / "regressions" / name).glob("*@*")):
        ended = attacker.attack(name, Input(path.name.partition("@")[2].replace("+", "/"), path.read_bytes()))
        assert ended.kind in GOOD, (path.name, ended)


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs(attacker: Attacker, name: str) -> None:
    target = all_targets()[name]

    @settings(max_examples=max(5, round(FEW * target.weight)), suppress_health_check=list(HealthCheck), database=None)
    @given(st.randoms(use_true_random=False))
    def attack(rng: Random) -> None:
        mutated = draw(target, rng)
        ended = attacker.attack(name, mutated)
        assert ended.kind in GOOD, (mutated.name, mutated.data[:2000], ended)

    attack()

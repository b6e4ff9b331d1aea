"""What an attack consists of: inputs, targets that take them, and how a call ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.support.attack.mutation import mutate_json

SEEDS = Path(__file__).parents[2] / "attack" / "seeds"


@dataclass(frozen=True)
class Input:
    """What a target gets: a name, which tells it what to do with the content, and the content."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Outcome:
    """kind: "accepted", "error" (a clear one), "unnamed" (an error that does not name its input), "traceback",
    "hang", "death", or "silent" (accepted, but the judge objects)."""

    kind: str
    detail: str = ""


OUTCOMES = ("accepted", "error", "unnamed", "traceback", "hang", "death", "silent")
GOOD = ("accepted", "error")


@dataclass
class Target:
    """Something that reads inputs, and a judge of what it accepts.

    run: reads the input in a new folder; what it returns has been accepted. judge: what of an accepted input should not
    have been accepted, worked out from the input itself. more_seeds: besides the files of `tests/attack/seeds/NAME`.
    names: words of which an error has at least one; by default the input's folder.
    """

    name: str
    run: Callable[[Input, Path], Any]
    judge: Callable[[Input, Any], Iterator[str]]
    mutation: Callable[[Random, bytes, tuple[bytes, ...]], bytes] = mutate_json
    weight: float = 1.0
    more_seeds: Callable[[], Sequence[Input]] = field(default=lambda: ())
    names: Sequence[str] = ()

    def seeds(self) -> Sequence[Input]:
        files = sorted((SEEDS / self.name).glob("*"))
        return [*(Input(file.name, file.read_bytes()) for file in files if file.is_file()), *self.more_seeds()]


@cache
def all_targets() -> dict[str, Target]:
    """Every target by its name."""
    from tests.support.attack import checked, data, options, runs, servers

    targets = (*data.TARGETS, *checked.TARGETS, *runs.TARGETS, *servers.TARGETS, *options.TARGETS)
    return {target.name: target for target in targets}


def draw(target: Target, rng: Random) -> Input:
    """A mutated seed of the target."""
    seeds = _seeds(target.name)
    given = rng.choice(seeds)
    return Input(given.name, target.mutation(rng, given.data, tuple(seed.data for seed in seeds)))


@cache
def _seeds(name: str) -> tuple[Input, ...]:
    return tuple(all_targets()[name].seeds())

"""B1 to B17: what an attack on readers, servers, rewards and commands found."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from audiorl.audio import AudioClip
from audiorl.rewards import Gated, StandardisedSum, WeightedSum, load_reward
from audiorl.rewards.combine import score_rollouts
from audiorl.types import Message, Rollout, Sample, Score, Segment
from tests.cases import Case, Refused

# -- rewards that change what they are given ---------------------------------------------------------------------------


def _rollouts(*texts: str) -> list[Rollout]:
    """One group of answers with these texts, to a prompt with metadata of several levels."""
    sample = Sample("q", (Message("user", ("Which?",)),), ("b",), metadata={"words": ["x", "a"], "more": {"n": [1]}})
    return [
        Rollout(sample, (Segment(torch.zeros(0).long(), torch.tensor([i, 9]), torch.zeros(2), text),), "g", i)
        for i, text in enumerate(texts)
    ]


def _totals(reward: Any, rollouts: Sequence[Rollout]) -> list[float]:
    return [score.total for score in score_rollouts(reward, rollouts) if score is not None]


def _by_file(code: str) -> Callable[[Path], list[float]]:
    """Return the totals of two answers, "long" and "s", by a reward file."""

    def run(folder: Path) -> list[float]:
        (folder / "reward.py").write_text(code)
        try:
            return _totals(load_reward(folder / "reward.py"), _rollouts("long", "s"))
        except RuntimeError as error:  # a reward file that raises; `audiorl` shows its traceback
            raise ValueError(str(error)) from error

    return run


def _metadata_after(folder: Path) -> Any:
    rollouts = _rollouts("a", "b")

    def reward(given: Sequence[Rollout]) -> list[Score]:
        given[0].sample.metadata["words"].sort()
        given[0].sample.metadata["more"]["n"].clear()
        return [Score(0.0) for _ in given]

    score_rollouts(reward, rollouts)
    return rollouts[0].sample.metadata


def _scored_again(folder: Path) -> Any:
    (rollout,) = (r.with_score(Score(1.0, {"old": 1.0})) for r in _rollouts("a"))

    def reward(given: Sequence[Rollout]) -> list[Score]:
        assert given[0].score is not None
        given[0].score.parts["new"] = 2.0  # type: ignore[index]
        return [Score(0.0)]

    score_rollouts(reward, [rollout])
    assert rollout.score is not None
    return dict(rollout.score.parts)


def _sum(kind: Any) -> Callable[[Path], Any]:
    def zeroes(given: Sequence[Rollout]) -> list[Score]:
        for rollout in given:
            rollout.segments[0].ids.zero_()
        return [Score(0.0) for _ in given]

    def ids(given: Sequence[Rollout]) -> list[Score]:
        return [Score(float(r.segments[0].ids.sum())) for r in given]

    return lambda folder: _totals(kind(zeroes, ids), _rollouts("a", "b"))


CASES = [
    Case(
        "B1", "attack", "a reward that sorts its list of rollouts in place by length",
        _by_file("def reward(rollouts):\n    rollouts.sort(key=lambda r: len(r.text))\n"
                 "    return [float(len(r.text)) for r in rollouts]\n"),
        Refused("'tuple' object has no attribute 'sort'"), "[1.0, 4.0]: each answer has the score of another",
    ),
    Case(
        "B1", "own", "a reward object that reverses its list in place",
        _by_file("class R:\n    def __call__(self, rollouts):\n        rollouts.reverse()\n"
                 "        return [float(len(r.text)) for r in rollouts]\nreward = R()\n"),
        Refused("'tuple' object has no attribute 'reverse'"), "RewardError says that a float is no Score",
    ),
    Case(
        "B1", "own", "a reward with the signature of TRL that sorts `completions` in place",
        _by_file("def reward(prompts, completions):\n    completions.sort(key=len)\n"
                 "    return [float(len(c)) for c in completions]\n"),
        Refused("changes the list 'completions'"), "[1.0, 4.0]",
    ),
    Case(
        "B1", "own", "a reward with the signature of TRL that sorts a copy",
        _by_file("def reward(prompts, completions):\n    sorted(completions, key=len)\n"
                 "    return [float(len(c)) for c in completions]\n"),
        [4.0, 1.0], "right",
    ),
    Case(
        "B1", "own", "a reward that sorts a list in the metadata of its sample", _metadata_after,
        {"words": ["x", "a"], "more": {"n": [1]}}, "the sample of the data set is changed for the next epoch",
    ),
    Case(
        "B1", "own", "a reward that adds a part to the score that a rollout has already", _scored_again,
        {"old": 1.0}, "the recorded score has the part too",
    ),
    *(
        Case(
            "B1", "own", f"a term of a {kind.__name__} that writes to the tokens which the next term reads",
            _sum((lambda a, b, kind=kind: Gated(a, b, 0.0)) if kind is Gated
                 else (lambda a, b, kind=kind: kind.of(a=a, b=b))),
            Refused("writes to the rollouts, which other rewards see too"), "the next term scores zeros",
        )
        for kind in (WeightedSum, StandardisedSum, Gated)
    ),
]  # fmt: skip

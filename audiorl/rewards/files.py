"""A reward from the user's own Python file, by path."""

from __future__ import annotations

import inspect
import math
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import Parameter
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

import audiorl
from audiorl.errors import RewardError
from audiorl.protocols import Reward
from audiorl.rewards.chat import JudgeError
from audiorl.rewards.combine import check_scores
from audiorl.rewards.concurrency import gather_all, run_async, semaphore_for
from audiorl.rewards.remote import RewardServerError
from audiorl.types import Rollout, Score
from audiorl.user_files import load_name

# Code in these folders is a library's. Frozen modules, such as importlib's, have names in angle brackets.
_LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), Path(audiorl.__file__).parent)
_NOT_OF_USERS = (*(f"{folder}{os.sep}" for folder in _LIBRARIES), "<")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where` before any error's message, and after it the line of the user's code that raised it.

    ValueError, which blames the rollouts, and JudgeError keep their kind; others become RewardError.
    """
    try:
        yield
    except RewardServerError:
        raise
    except Exception as error:
        kind = next((kind for kind in (ValueError, JudgeError) if isinstance(error, kind)), RewardError)
        name = "" if type(error) is kind else f"{type(error).__name__}: "
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_OF_USERS)]
        line = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
        raise kind(f"{where}: {name}{error}{line}") from error


@dataclass(frozen=True)
class FunctionReward:
    """Score with a plain function. The names of its parameters say what it is called with:

        def f(rollout): ...                             # one Rollout; returns a value
        def f(rollouts): ...                            # all rollouts of a step; returns a list of values, in order
        def f(prompts, completions, **columns): ...     # TRL's signature: lists of texts; returns a list of values

    A value is a float, a Score, or None to skip the rollout. A function with a parameter `completions` gets, by name,
    those of these columns that it takes, each a list with one entry a rollout: `prompts` (texts, without audio),
    `completions`, `completion_ids`, `references`, `answer` (the first of these), `choices`, `audio`, `id`, `task`, and
    every field of the samples' metadata (None where a sample lacks it).

    An `async def` is awaited; one of a single rollout runs for up to `concurrency` rollouts at a time. `name` stands
    before the function's in errors. Raises ValueError for a function of any other signature, and, naming function and
    sample, for one that returns anything else.
    """

    function: Callable[..., Any]
    name: str = ""
    concurrency: int = 32

    def __post_init__(self) -> None:
        assert self.takes

    @cached_property
    def takes(self) -> Literal["rollout", "rollouts", "completions"]:
        """The kind of arguments that the function is called with."""
        parameters = inspect.signature(self.function).parameters
        if "completions" in parameters:
            return "completions"
        required = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if len(required) != 1 or required[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            raise ValueError(
                f"{self._where}: must take one argument, a rollout (or all of them, if it is called 'rollouts'), or "
                f"prompts and completions; its signature is {inspect.signature(self.function)}"
            )
        return "rollouts" if required[0].name == "rollouts" else "rollout"

    @property
    def by_group(self) -> bool:
        """Return whether groups may be scored early: an `async def` of one rollout waits, and sees no other rollout."""
        return self.takes == "rollout" and inspect.iscoroutinefunction(self.function)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        if self.by_group:
            return run_async(self._score_all(rollouts))
        if self.takes == "rollout":
            return [self._score(r, self._call(f"{self._where}, sample {r.name}", r)) for r in rollouts]
        if self.takes == "completions":
            columns = self._columns(rollouts)
            before = {name: list(values) for name, values in columns.items()}
            values = self._call(self._where, **columns)
            for name, held in before.items():  # sorted in place, say: which score belongs to which rollout is lost
                if len(held) != len(columns[name]) or any(a is not b for a, b in zip(held, columns[name], strict=True)):
                    raise ValueError(f"{self._where}: changes the list {name!r} that it is given; change a copy")
        else:
            values = self._call(self._where, tuple(rollouts))
        values = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise ValueError(
                f"{self._where}: returned {type(values).__name__} {values!r}, expected a list of floats or Scores"
            )
        if len(values) != len(rollouts):
            raise ValueError(f"{self._where}: returned {len(values)} scores for {len(rollouts)} rollouts")
        return [self._score(r, value) for r, value in zip(rollouts, values, strict=True)]

    def _call(self, where: str, *arguments: Any, **columns: Any) -> Any:
        with naming(where):
            value = self.function(*arguments, **columns)
            return run_async(value) if inspect.iscoroutine(value) else value

    async def _score_all(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        semaphore = semaphore_for(self, self.concurrency)

        async def score(rollout: Rollout) -> Score | None:
            async with semaphore:
                with naming(f"{self._where}, sample {rollout.name}"):
                    value = await self.function(rollout)
            return self._score(rollout, value)

        return await gather_all(score(r) for r in rollouts)

    def _columns(self, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        samples = [r.sample for r in rollouts]
        names = dict.fromkeys(name for s in samples for name in s.metadata)
        columns: dict[str, list[Any]] = {name: [s.metadata.get(name) for s in samples] for name in names}
        columns |= {
            "prompts": ["\n".join(c for m in s.messages for c in m.content if isinstance(c, str)) for s in samples],
            "completions": [r.text for r in rollouts],
            "completion_ids": [[i for segment in r.segments for i in segment.ids.tolist()] for r in rollouts],
            "answer": [next(iter(s.references), None) for s in samples],
        }
        columns |= {n: [getattr(s, n) for s in samples] for n in ("references", "choices", "audio", "id", "task")}
        parameters = inspect.signature(self.function).parameters.values()
        wanted = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for p in wanted:
            if p.default is p.empty and p.name not in columns:
                raise ValueError(f"{self._where}: no column is called {p.name!r}; there are {', '.join(columns)}")
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return columns
        return {p.name: columns[p.name] for p in wanted if p.name in columns}

    def _score(self, rollout: Rollout, value: Any) -> Score | None:
        if value is None or isinstance(value, Score):
            return value
        where = f"{self._where}, sample {rollout.name}"
        if not isinstance(value, Real):
            raise ValueError(f"{where}: returned {type(value).__name__} {value!r}, expected a float, a Score or None")
        if not math.isfinite(value):
            raise ValueError(f"{where}: returned {float(value)}")
        return Score(float(value))

    @property
    def _where(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{self.name}, function {name!r}" if self.name else f"function {name!r}"


@dataclass(frozen=True)
class FileReward:
    """The reward of the file at `path`; every call checks what it returns and names the file in errors."""

    path: str
    reward: Reward = field(repr=False)

    @property
    def by_group(self) -> bool:
        return bool(getattr(self.reward, "by_group", False))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return check_scores(self.path, self._call(self.reward, rollouts), rollouts, undefined=True)

    def begin(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return what the reward's own `begin` gives for a group, for `finish`; without one, its scores."""
        begin = getattr(self.reward, "begin", None)
        return self(rollouts) if begin is None else self._call(begin, rollouts)

    def finish(self, rollouts: Sequence[Rollout], values: Sequence[Any]) -> list[Score | None]:
        """Return the scores of a step by what `begin` gave for each rollout."""
        finish = getattr(self.reward, "finish", None)
        scores = values if finish is None else self._call(finish, rollouts, values)
        return check_scores(self.path, scores, rollouts, undefined=True)

    def _call(self, function: Callable[..., Any], rollouts: Sequence[Rollout], *arguments: Any) -> Any:
        if isinstance(function, FunctionReward):  # it names file, function and sample itself
            return function(rollouts)
        with naming(f"reward file {self.path!r}, {type(self.reward).__name__}"):
            given = function(tuple(rollouts), *arguments)
            return run_async(given) if inspect.iscoroutine(given) else given


def as_reward(reward: Any, name: str = "") -> Reward:
    """Return a reward object as it is, and a function as a `FunctionReward` of that `name`; ValueError for the rest."""
    where = f"{name}: " if name else ""
    if isinstance(reward, type):
        raise ValueError(f"{where}'reward' is the class {reward.__name__}; write reward = an instance")
    if not callable(reward):
        raise ValueError(f"{where}'reward' is a {type(reward).__name__}, expected a callable")
    plain = inspect.isroutine(reward) or isinstance(reward, partial)
    return FunctionReward(reward, name) if plain else reward


def load_reward(path: str | Path) -> FileReward:
    """Import the Python file at `path` and return its module-level `reward`.

    `reward` may be a Reward object or a function of any signature that `FunctionReward` takes. Raises ValueError for a
    file that does not exist, is not Python or has no usable `reward`.
    """
    where = f"reward file {str(path)!r}"
    return FileReward(str(path), as_reward(load_name(path, "reward", "reward file"), where))

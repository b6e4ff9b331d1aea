"""A reward from the user's own Python file, by path."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from audiorl.protocols import Reward
from audiorl.rewards.chat import JudgeError
from audiorl.rewards.check import check_scores
from audiorl.rewards.concurrency import gate, gather_all, run_async
from audiorl.rewards.remote import RewardServerError
from audiorl.types import Rollout, Score
from audiorl.user_files import load_name


class RewardError(RuntimeError):
    """A reward file that raised anything but a ValueError; the message names file, function and sample."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where` before the message of any error; a ValueError stays one, since it blames the rollouts, and a
    JudgeError, since it is no fault of the file."""
    try:
        yield
    except RewardServerError:
        raise
    except Exception as error:
        kind = next((kind for kind in (ValueError, JudgeError) if isinstance(error, kind)), RewardError)
        name = "" if type(error) is kind else f"{type(error).__name__}: "
        raise kind(f"{where}: {name}{error}") from error


@dataclass(frozen=True)
class FunctionReward:
    """A plain function `f(rollout)` as a reward: it returns a float, a Score, or None to skip the rollout.

    An `async def` is awaited for `concurrency` rollouts at a time. `name`: what errors call the file.
    """

    function: Callable[[Rollout], Any]
    name: str
    concurrency: int = 32

    @property
    def by_group(self) -> bool:
        """An `async def` waits; see `audiorl.rewards.early`."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        if inspect.iscoroutinefunction(self.function):
            return run_async(self._score_all(rollouts))
        return [self._score(r) for r in rollouts]

    async def _score_all(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        passing = gate(self, self.concurrency)
        return await gather_all(self._awaited(passing, r) for r in rollouts)

    async def _awaited(self, passing: asyncio.Semaphore, rollout: Rollout) -> Score | None:
        async with passing:
            with naming(self._where(rollout)):
                value = await self.function(rollout)
        return self._as_score(value, rollout)

    def _score(self, rollout: Rollout) -> Score | None:
        with naming(self._where(rollout)):
            value = self.function(rollout)
        return self._as_score(value, rollout)

    def _where(self, rollout: Rollout) -> str:
        return f"reward file {self.name!r}, function {self.function.__name__!r}, sample {rollout.name}"

    def _as_score(self, value: Any, rollout: Rollout) -> Score | None:
        where = self._where(rollout)
        if value is None or isinstance(value, Score):
            return value
        if not isinstance(value, Real):
            raise ValueError(f"{where}: returned {type(value).__name__} {value!r}, expected a float, a Score or None")
        if not math.isfinite(value):
            raise ValueError(f"{where}: returned {float(value)}")
        return Score(float(value))


@dataclass(frozen=True)
class FileReward:
    """The reward of the file at `path`; every call checks what it returns and names the file in errors."""

    path: str
    reward: Reward = field(repr=False)

    @property
    def by_group(self) -> bool:
        return bool(getattr(self.reward, "by_group", False))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        if isinstance(self.reward, FunctionReward):  # it names file, function and sample itself
            return check_scores(self.path, self.reward(rollouts), rollouts)
        name = getattr(self.reward, "__name__", None)
        kind = f"function {name!r}" if name else type(self.reward).__name__
        with naming(f"reward file {self.path!r}, {kind}"):
            scores: Any = self.reward(rollouts)
            if inspect.iscoroutine(scores):
                scores = run_async(scores)
        return check_scores(self.path, scores, rollouts)


def load_reward(path: str | Path) -> FileReward:
    """Import the Python file at `path` and return its module-level `reward`.

    `reward` may be a Reward object, a function `reward(rollout)` that returns a float, a Score or None (skip this
    rollout), or a function whose one parameter is called `rollouts` and which returns a list of Score and None. Both
    may be `async def`; a function of one rollout then runs for up to 32 of them at a time. An exception that the file
    itself raises on import passes through.

    Raises ValueError for a file that does not exist, is not Python or has no usable `reward`.
    """
    return FileReward(str(path), _as_reward(str(path), load_name(path, "reward", "reward file")))


def _as_reward(path: str, reward: Any) -> Reward:
    if isinstance(reward, type):
        raise ValueError(f"reward file {path!r}: 'reward' is the class {reward.__name__}; write reward = an instance")
    if not callable(reward):
        raise ValueError(f"reward file {path!r}: 'reward' is a {type(reward).__name__}, expected a callable")
    if not inspect.isfunction(reward):
        return reward
    required = [p for p in inspect.signature(reward).parameters.values() if p.default is p.empty]
    positional = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(required) != 1 or len(positional) != 1:
        raise ValueError(
            f"reward file {path!r}: 'reward' must take one argument, a rollout (or all of them, if it is called "
            f"'rollouts'); its signature is {inspect.signature(reward)}"
        )
    return reward if positional[0].name == "rollouts" else FunctionReward(reward, path)

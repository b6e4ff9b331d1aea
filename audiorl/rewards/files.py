"""A reward from the user's own Python file, by path."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from audiorl.rewards.check import check_scores
from audiorl.types import Reward, Rollout, Score


@dataclass(frozen=True)
class FunctionReward:
    """A plain function `f(rollout) -> float` (or Score) as a reward; `name` is what errors call it."""

    function: Callable[[Rollout], Any]
    name: str

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(r) for r in rollouts]

    def _score(self, rollout: Rollout) -> Score:
        value = self.function(rollout)
        if isinstance(value, Score):
            return value
        where = f"reward {self.name!r}, sample {rollout.sample.id!r}"
        if not isinstance(value, Real):
            raise ValueError(f"{where}: returned {type(value).__name__} {value!r}, expected a float or a Score")
        if not math.isfinite(value):
            raise ValueError(f"{where}: returned {float(value)}")
        return Score(float(value))


@dataclass(frozen=True)
class FileReward:
    """The reward of the file at `path`; every call checks what it returns."""

    path: str
    reward: Reward = field(repr=False)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return check_scores(self.path, self.reward(rollouts), rollouts)


def load_reward(path: str | Path) -> FileReward:
    """Import the Python file at `path` and return its module-level `reward`.

    `reward` may be a Reward object, a function `reward(rollout) -> float`, or a function whose one parameter is called
    `rollouts` and which returns a list of Score. An exception that the file itself raises on import passes through.

    Raises ValueError for a file that does not exist, is not Python or has no usable `reward`.
    """
    return FileReward(str(path), _as_reward(str(path), _named(path, "reward", "reward file")))


def load_function(path: str | Path, name: str) -> Callable[..., Any]:
    """Import the Python file at `path` and return its function `name`. Raises ValueError like `load_reward`."""
    function = _named(path, name, "file")
    if not callable(function):
        raise ValueError(f"file {str(path)!r}: {name!r} is a {type(function).__name__}, expected a function")
    return function


def _named(path: str | Path, name: str, what: str) -> Any:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{what} {str(path)!r}: no such file")
    if file.suffix != ".py":
        raise ValueError(f"{what} {str(path)!r}: not a Python file (.py)")
    module = _import(file.resolve())
    if not hasattr(module, name):
        raise ValueError(f"{what} {str(path)!r}: defines no module-level name {name!r}")
    return getattr(module, name)


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


def _import(file: Path) -> ModuleType:
    # The name carries the path: two files called reward.py must not replace each other.
    name = f"audiorl_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward file {str(file)!r}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""Inputs from public bug reports, each with the value that is right, worked out by hand. `python tools/cases.py` prints
them; a kind is a module with a list CASES."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Refused:
    """The right outcome is an error (ValueError, OSError or exit code 2) whose message holds this text."""

    text: str


@dataclass(frozen=True)
class Case:
    """One input and its right outcome."""

    kind: str
    """Such as "A6": a kind of error in which programs are alike."""
    source: str
    """The public report (owner/name#number); "own" for inputs made for the kind."""
    given: str
    """The input in words."""
    run: Callable[[Path], Any]
    """Return what audiorl makes of the input; its argument is an empty folder."""
    right: Any
    """A value, compared to 1e-6, or `Refused`."""

    def outcome(self, folder: Path) -> Any:
        """Return the value, or `Refused` with the message of the error."""
        try:
            return self.run(folder)
        except (ValueError, OSError) as error:
            return Refused(str(error))

    def holds(self, outcome: Any) -> bool:
        """Return whether an outcome is the right one."""
        if isinstance(self.right, Refused):
            return isinstance(outcome, Refused) and self.right.text in outcome.text
        return not isinstance(outcome, Refused) and _close(outcome, self.right)


def _close(a: Any, b: Any) -> bool:
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    return math.isclose(a, b, abs_tol=1e-6) if isinstance(b, float) else a == b


def all_cases() -> list[Case]:
    """Return the cases of every module of this package, in the order of their kinds."""
    names = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.name.startswith("test_"))
    cases = [case for name in names for case in importlib.import_module(f"{__name__}.{name}").CASES]
    return sorted(cases, key=lambda case: (case.kind[0], int(case.kind[1:])))

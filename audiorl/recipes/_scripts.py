"""Recipes and evaluations by name or path: the Python files of `recipes/` and `eval/`."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Kind = Literal["recipes", "eval"]
_WORDS: dict[Kind, str] = {"recipes": "recipe", "eval": "evaluation"}


class UnknownScript(ValueError):
    """No recipe or evaluation has this name. `listing` has a line for each that exists."""

    def __init__(self, kind: Kind, name: str):
        super().__init__(f"no {_WORDS[kind]} {name!r}; there are:")
        self.listing = listing(kind)


def folder(kind: Kind) -> Path:
    """The package audiorl.KIND: of the checkout that `audiorl` was imported from, otherwise as it is installed."""
    spec = find_spec(f"audiorl.{kind}")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"audiorl.{kind} is not installed; reinstall audiorl")
    return Path(next(iter(spec.submodule_search_locations)))


def scripts(kind: Kind) -> dict[str, Path]:
    """{name as written on the command line, such as "mmau-grpo": file}."""
    files = sorted(folder(kind).glob("*.py"))
    # rl_loop.py is run by itself, for readers: it has no run folder.
    return {f.stem.replace("_", "-"): f for f in files if not f.stem.startswith("_") and f.stem != "rl_loop"}


def find_script(kind: Kind, name: str | Path) -> Path:
    """The file of a name ("mmau-grpo" or "mmau_grpo") or of a path, which has a slash or ends in .py.

    Raises UnknownScript for an unknown name and ValueError for a path without a file.
    """
    if str(name).endswith(".py") or "/" in str(name):
        if not Path(name).is_file():
            raise ValueError(f"{name}: no such {_WORDS[kind]}; give its name or the path of a Python file")
        return Path(name)
    files = scripts(kind)
    file = files.get(str(name).replace("_", "-"))
    if file is None:
        raise UnknownScript(kind, str(name))
    return file


def listing(kind: Kind) -> str:
    """A line for each: its name and the first line of its docstring."""
    files = scripts(kind)
    width = max(map(len, files), default=0)
    return "\n".join(f"  {name:{width}}  {summary(file)}" for name, file in files.items())


def summary(file: Path) -> str:
    """The first line of the file's docstring. The file is not imported: recipes import torch."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]

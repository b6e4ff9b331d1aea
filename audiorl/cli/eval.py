"""Evaluate a model, or score recorded results: audiorl eval mmau --model MODEL --data FILE --out OUT."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from audiorl.options import HELP, LIST, options_module, parse
from audiorl.recipes._loader import find_script, listing, scripts


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate a model, or score recorded results."""

    name: Positional[str]
    """A name, such as mmau, or the path of a Python file. `audiorl eval NAME --help` lists the evaluation's options,
    which `--config FILE` reads from a YAML file."""


def main(args: list[str]) -> int:
    """Run the evaluation; return the exit code."""
    if not args:
        raise ValueError(f"eval: name an evaluation: {', '.join(scripts('eval'))}")
    if args[0] in HELP:
        parse(EvalOptions, args, prog="audiorl eval", description=f"{EvalOptions.__doc__}\n\n{listing('eval')}")
    file = find_script("eval", args[0])
    if file == scripts("eval").get(file.stem):
        # Help and wrong options end here, before torch is imported.
        (takes,) = re.findall(r"^def main\(options: (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        module = options_module(file, [takes])
        read: type[Any] = getattr(module, takes)
        prog = f"audiorl eval {file.stem}"
        parse(read, args[1:], prog=prog, description=module.__doc__, run_file=True, quiet=True)
        from audiorl.eval._common import run_evaluation

        run_evaluation(importlib.import_module(f"audiorl.eval.{file.stem}"), args[1:])
        return 0
    if LIST in args:  # a key that completes words runs no script
        return 0
    sys.argv = [str(file), *args[1:]]
    runpy.run_path(str(file), run_name="__main__")
    return 0

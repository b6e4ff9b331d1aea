"""The command line: `audiorl NAME …` calls `main(args)` of the module here that is called NAME.

The first line of its docstring is the command's summary. Other packages add commands as entry points of the group
`audiorl.commands`: functions that take the arguments and return the exit code. No command imports torch before its
options are read, except where a recipe or an evaluation brings the options.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import audiorl
from audiorl.errors import Interrupted, RankError, RewardError, install, says_what_to_do
from audiorl.recipes._loader import UnknownScript, summary

COMMANDS = (
    "train", "resume", "report", "view", "eval", "audit", "rewards", "codec", "export", "chat", "say", "sound",
    "interpret", "doctor", "completion",
)  # fmt: skip
EXTENSIONS = {
    "data": "Show what will be trained on, build a corpus of human speech, split it, or build questions about audio.",
    "annotate": "Find, transcribe and describe the speech in recordings: rows to train on.",
    "graft": "Make a speech model from a text model and a Whisper encoder, before any training.",
}
"""Commands of the package `corpora`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Bad input ends with one line on stderr and exit code 2; an interrupted run with 130."""
    # OpenMP reads this when torch is loaded. By default its threads spin at barriers and, on a machine with other work,
    # keep the processor from the thread that they wait for (bench/threads.py, docs/performance.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    name, *args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help", "--version", "version"):
        print(audiorl.__version__ if name.endswith("version") else usage())
        return 0
    try:
        return _command(name)(args)
    except KeyboardInterrupt:
        further = "; 'audiorl resume' continues from the last checkpoint" if name in ("train", "resume") else ""
        print(f"audiorl: stopped at once{further}", file=sys.stderr)
        return 130
    except Interrupted as stop:
        print(f"audiorl: {stop}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError, RankError, RewardError) as error:
        if not says_what_to_do(error):
            raise
        print(f"audiorl: {' '.join(str(error).split())}", file=sys.stderr)  # some libraries write paragraphs
        if isinstance(error, UnknownScript) and error.listing:
            print(error.listing, file=sys.stderr)
        return 2


def usage() -> str:
    """Return the commands, each with its summary."""
    summaries = {name: summary(Path(__file__).parent / f"{name}.py") for name in COMMANDS} | EXTENSIONS
    lines = [f"  {name:10} {text}" for name, text in summaries.items()]
    head = f"usage: audiorl COMMAND [OPTIONS]\n\n{audiorl.__doc__}\n"
    return "\n".join([head, *lines, "", "`audiorl COMMAND --help` lists the options of a command."])


def _command(name: str) -> Callable[[list[str]], int]:
    if name in COMMANDS:
        function: Callable[[list[str]], int] = importlib.import_module(f"audiorl.cli.{name}").main
        return function
    for point in entry_points(group="audiorl.commands", name=name):
        loaded: Callable[[list[str]], int] = point.load()
        return loaded
    if name in EXTENSIONS:
        raise ValueError(f"audiorl {name} belongs to the package corpora, which is not installed: {install()}")
    near = difflib.get_close_matches(name, [*COMMANDS, *EXTENSIONS], 1)
    hint = f"did you mean audiorl {near[0]}?" if near else "see audiorl --help"
    raise ValueError(f"unknown command {name!r}; {hint}")

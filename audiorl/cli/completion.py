"""Print what makes a shell complete commands, recipes and options: audiorl completion bash | zsh | fish."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from audiorl.options import LIST, parse
from audiorl.recipes._loader import PRESETS, scripts

SCRIPTS = {
    "bash": """\
_audiorl() {
    local IFS=$'\\n'
    COMPREPLY=($(audiorl completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _audiorl audiorl""",
    "zsh": """\
#compdef audiorl
_audiorl() {
    local -a found
    found=("${(@f)$(audiorl completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _audiorl audiorl""",
    "fish": """\
complete -c audiorl -a '(audiorl completion words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'""",
}
"""They ask `audiorl completion words`; where it knows nothing, the shell completes the names of files."""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that makes a shell complete commands, recipes and options. For bash, add to ~/.bashrc:
    eval "$(audiorl completion bash)"; for zsh the same in ~/.zshrc, below compinit; for fish:
    audiorl completion fish > ~/.config/fish/completions/audiorl.fish"""

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def main(args: list[str]) -> int:
    """Print the script, or for `words -- WORD …` what the last word may become. Return the exit code."""
    if args[:2] == ["words", "--"]:
        print("\n".join(completions(args[2:])))
        return 0
    print(SCRIPTS[parse(CompletionOptions, args or ["--help"], prog="audiorl completion").shell])
    return 0


def completions(words: Sequence[str]) -> list[str]:
    """Return what the last of the words after `audiorl` may become; nothing where it is the name of a file.

    >>> completions(["train", "mmau"]), completions(["train", "mmau-grpo", "--rl.adv"])
    (['mmau-grpo'], ['--rl.advantage'])
    """
    from audiorl.cli import COMMANDS, EXTENSIONS
    from audiorl.cli import main as run

    *before, word = words or [""]
    named = {"train": [*scripts("recipes"), *PRESETS], "eval": list(scripts("eval"))}
    if not before:
        found = [*COMMANDS, *EXTENSIONS]
    elif len(before) == 1 and before[0] in named:
        found = named[before[0]]
    else:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            run([*before, LIST])
        # Each line is an option, or a subcommand, and the values that it takes.
        values = {line.split()[0]: line.split()[1:] for line in out.getvalue().splitlines() if line.strip()}
        subcommands = [name for name in values if not name.startswith("-")]
        if not word.startswith("-"):
            found = values.get(before[-1], []) or (subcommands if len(before) == 1 else [])
        else:
            found = [name for name in values if name.startswith("-")]
    return [name for name in found if name.startswith(word)]

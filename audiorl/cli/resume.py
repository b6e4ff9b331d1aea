"""Continue an interrupted run: audiorl resume runs/mmau."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from audiorl.cli.train import TrackerName, finished
from audiorl.config.distributed import RuntimeConfig
from audiorl.options import first_word, parse
from audiorl.recipes import _loader as loader


@dataclass(frozen=True)
class ResumeOptions:
    """Continue an interrupted run."""

    folder: Positional[Path]
    """The run folder."""
    log: tuple[TrackerName, ...] = ()
    """Experiment trackers, as of audiorl train; others than before are allowed."""
    trust: tuple[str, ...] = ()
    """Python files that the folder's config.json names and that may be run: a recipe, reward or judge that is not part
    of audiorl. By default none: the error for a run that needs some names them."""
    runtime: RuntimeConfig = RuntimeConfig()


def main(args: list[str]) -> int:
    """Continue the run; return the exit code."""
    first_word(args, "resume: name one run folder, for example: audiorl resume runs/quickstart")
    options = parse(ResumeOptions, args, prog="audiorl resume")
    if (options.folder / "seeds.json").is_file():
        raise ValueError(f"{options.folder}: holds runs of several seeds; give the command that began them once more")
    from audiorl.distributed import use_runtime
    from audiorl.distributed.torchrun import relaunch

    use_runtime(options.runtime)
    relaunch(options.runtime, ["resume", *args])
    return finished(loader.resume(options.folder, options.log, options.trust))

"""Score recorded rollouts with a reward file, study several rewards, or serve one: rewards score | study | serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from audiorl.config import RewardServerConfig
from audiorl.errors import install
from audiorl.options import HELP, parse, subcommands


@dataclass(frozen=True)
class ScoreRewardsOptions:
    """Score recorded rollouts again, and compare with the recorded scores."""

    file: Positional[Path]
    """A Python file that defines `reward`."""
    rollouts: Positional[tuple[str, ...]]
    """Run folders, files of rollouts that runs wrote, or patterns in quotes such as 'runs/*/rollouts/*.jsonl'."""


@dataclass(frozen=True)
class StudyRewardsOptions:
    """Compare rewards on recorded rollouts: distributions, correlation, agreement with labels, signs of hacking."""

    files: Positional[tuple[Path, ...]] = ()
    """Python files that define `reward`. The recorded scores are studied too; without files, they alone."""
    rollouts: tuple[str, ...] = ()
    """Run folders, files of rollouts that runs wrote, or patterns in quotes. Required."""
    out: Path = Path("study.html")
    """The page to write."""
    probe: int = 100
    """Rollouts whose answers are changed and scored again, to see what raises the score; 0: none."""
    audio_root: tuple[Path, ...] = ()
    """Folders whose audio may be embedded, besides the run folders and the runs' data."""


@dataclass(frozen=True)
class ServeRewardOptions(RewardServerConfig):
    """Serve the reward of a file over HTTP, for runs on other machines."""

    file: Positional[str]
    """A Python file that defines `reward`."""


OPTIONS = subcommands({"score": ScoreRewardsOptions, "study": StudyRewardsOptions, "serve": ServeRewardOptions})


def main(args: list[str]) -> int:
    """Run the command; return the exit code."""
    if args and args[0] not in ("score", "study", "serve", *HELP):
        raise ValueError(f"rewards: name a command first: audiorl rewards score {args[0]} RUN …")
    if args[:1] == ["score"] and not set(HELP) & set(args) and len(args) < 3:
        raise ValueError(
            "rewards: name a reward file and recorded rollouts: audiorl rewards score FILE RUN …; or "
            "serve the file: audiorl rewards serve FILE"
        )
    options = parse(OPTIONS, args or ["--help"], prog="audiorl rewards", description=__doc__)
    if isinstance(options, StudyRewardsOptions):
        from audiorl.report.study.page import run_study

        run_study(options.files, options.rollouts, options.out, options.probe, options.audio_root)
        return 0
    if isinstance(options, ScoreRewardsOptions):
        from audiorl.rewards.replay import print_replay, replay

        print_replay(replay(options.file, options.rollouts))
        return 0
    try:
        from audiorl.rewards.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ValueError(f"rewards serve: needs fastapi and uvicorn: {install('serve')}") from error
    serve(options)
    return 0

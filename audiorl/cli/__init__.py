"""The command line: audiorl train | resume | report | eval | rewards | codec | doctor."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence

from audiorl.recipe.scripts import UnknownScript, find_script, scripts

USAGE = """audiorl: reinforcement learning for speech language models

  audiorl train RECIPE --out DIR [--tiny] [--key.path value …]   run a recipe (a name or a file); --help lists options
  audiorl resume DIR                                           continue an interrupted run
  audiorl report DIR                                           write DIR/report.html again
  audiorl eval NAME [options]                                  run an evaluation: mmau, asr, simul, codec, tts
  audiorl rewards FILE ROLLOUTS.jsonl                          score recorded rollouts with the reward in FILE
  audiorl rewards serve FILE [options]                         the reward in FILE for other machines, over HTTP
  audiorl codec encode|decode|train …                          audio to codes and back, train our tokenizer
  audiorl doctor                                               what is installed, what is missing, a self-test
  audiorl doctor --plan MODEL [options]                        the GPU memory that a run would need
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Bad input ends with one line on stderr and exit code 2; an interrupted run with 130."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "resume": _resume,
        "report": _report,
        "eval": _eval,
        "rewards": _rewards,
        "codec": _codec,
        "doctor": _doctor,
    }
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if args[0] == "--version":
        from audiorl import __version__

        print(__version__)
        return 0
    if args[0] not in commands:
        print(f"audiorl: unknown command {args[0]!r}; see audiorl --help", file=sys.stderr)
        return 2
    try:
        return _command(commands[args[0]], args[1:])
    except KeyboardInterrupt:
        print("audiorl: stopped at once; 'audiorl resume' continues from the last checkpoint", file=sys.stderr)
        return 130


def _command(command: Callable[[list[str]], int], args: list[str]) -> int:
    from audiorl.errors import Interrupted
    from audiorl.runtime.torchrun import RankError  # takes seconds, in which Ctrl-C may come

    try:
        return command(args)
    except Interrupted as stop:
        print(f"audiorl: {stop}", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError, RankError) as error:
        if os.environ.get("AUDIORL_TRACEBACK"):
            raise
        print(f"audiorl: {' '.join(str(error).split())}", file=sys.stderr)  # some libraries write paragraphs
        if isinstance(error, UnknownScript):
            print(error.listing, file=sys.stderr)
        return 2


def run_recipe(file: str) -> None:
    """What `python -m recipes.NAME` does."""
    sys.exit(main(["train", file, *sys.argv[1:]]))


def _train(args: list[str]) -> int:
    from audiorl.recipe import loader as recipe
    from audiorl.runtime.launch import parse_runtime_options, relaunch

    if not args or args[0].startswith("-"):
        raise ValueError("train: name a recipe first, for example: audiorl train recipes/quickstart.py --out runs/one")
    path, rest = find_script("recipes", args[0]), args[1:]
    command = ["train", *args]
    runtime = parse_runtime_options(rest)
    if "--help" in rest or "-h" in rest:
        print("Also: --out DIR (required); --tiny or --full: start from the recipe's tiny() or full() configuration;")
        print("--runtime.kind local|torchrun|ray, --runtime.ranks N and more: docs/scaling.md\n")
        recipe.parse_config(recipe.load_recipe(path), rest)
    out = _take(rest, "--out")
    if out is None:
        raise ValueError(f"train: say where the run is written: --out runs/{path.stem}")
    relaunch(runtime, command)
    run = recipe.start(path, rest, out)
    if run is not None:
        print(f"finished: {run.dir}")
    return 0


def _resume(args: list[str]) -> int:
    from audiorl.recipe import loader as recipe
    from audiorl.runtime.launch import parse_runtime_options, relaunch

    command = ["resume", *args]
    runtime = parse_runtime_options(args)
    if len(args) != 1:
        raise ValueError("resume: name one run folder, for example: audiorl resume runs/quickstart")
    relaunch(runtime, command)
    run = recipe.resume(args[0])
    if run is not None:
        print(f"finished: {run.dir}")
    return 0


def _report(args: list[str]) -> int:
    from audiorl.report import write_report

    if len(args) != 1:
        raise ValueError("report: name one run folder, for example: audiorl report runs/quickstart")
    print(write_report(args[0]))
    return 0


def _eval(args: list[str]) -> int:
    if not args:
        raise ValueError(f"eval: name an evaluation: {', '.join(scripts('eval'))}")
    file = find_script("eval", args[0])
    sys.argv = [f"audiorl eval {args[0]}", *args[1:]]
    runpy.run_path(str(file), run_name="__main__")
    return 0


def _rewards(args: list[str]) -> int:
    if args[:1] == ["serve"]:
        return _rewards_serve(args[1:])
    from audiorl.rewards.replay import print_replay, replay

    if len(args) != 2:
        raise ValueError(
            "rewards: name a reward file and recorded rollouts: audiorl rewards FILE ROLLOUTS.jsonl; or serve it: "
            "audiorl rewards serve FILE"
        )
    print_replay(replay(args[0], args[1]))
    return 0


def _rewards_serve(args: list[str]) -> int:
    try:
        from audiorl.rewards import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ValueError("rewards serve: needs fastapi and uvicorn: pip install 'audiorl[serve]'") from error
    serve.main(args)
    return 0


def _codec(args: list[str]) -> int:
    from audiorl.cli.codec import codec

    if args[:1] == ["train"]:
        return _train(["codec", *args[1:]])
    return codec(args)


def _doctor(args: list[str]) -> int:
    if args[:1] == ["--plan"]:
        from audiorl.cli.plan import plan

        return plan(args[1:])
    if args:
        raise ValueError(
            "doctor takes no arguments but --plan MODEL, which has options of its own: see audiorl doctor --plan --help"
        )
    from audiorl.cli.doctor import run_doctor
    from audiorl.cli.selftest import self_test

    return run_doctor(self_test)


def _take(args: list[str], name: str) -> str | None:
    """Remove `name VALUE` or `name=VALUE` from args and return the value."""
    for i, arg in enumerate(args):
        if arg == name:
            if i + 1 >= len(args):
                raise ValueError(f"{name} needs a value")
            value = args[i + 1]
            del args[i : i + 2]
            return value
        if arg.startswith(name + "="):
            del args[i]
            return arg.split("=", 1)[1]
    return None

"""The command line: for each command a frozen dataclass, whose fields are its options, and a function that runs it.

Help appears without importing torch, except where a recipe, an evaluation or the planner brings the options.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

import audiorl
from audiorl.cli.chat import Chat
from audiorl.cli.codec import Decode, Encode, run_codec
from audiorl.cli.graft import Graft, run_graft
from audiorl.cli.interpret import Interpret, run_interpret
from audiorl.cli.say import Say, run_say
from audiorl.config import RewardServerConfig
from audiorl.config.distributed import RuntimeConfig
from audiorl.errors import Interrupted, RankError
from audiorl.options import parse, parse_known
from audiorl.recipes._scripts import UnknownScript, find_script, folder, listing, scripts

HELP = ("-h", "--help")
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Bad input ends with one line on stderr and exit code 2; an interrupted run with 130."""
    # OpenMP reads this when torch is loaded. By default its threads spin at barriers and, on a machine with other work,
    # keep the processor from the thread that they wait for (bench/threads.py, docs/performance.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if args[0] == "--version":
        print(audiorl.__version__)
        return 0
    installed = {point.name: point for point in entry_points(group="audiorl.commands")}
    if args[0] not in (*COMMANDS, *installed, *HELP):
        print(f"audiorl: unknown command {args[0]!r}; see audiorl --help", file=sys.stderr)
        return 2
    try:
        if args[0] in HELP:
            commands = {name: options for name, (options, _) in COMMANDS.items()}
            for name, point in installed.items():
                commands[name] = make_dataclass(name, [], namespace={"__doc__": point.load().__doc__})
            parse(_union(commands), args, prog="audiorl", description=audiorl.__doc__)
        run: Callable[[list[str]], int] = COMMANDS[args[0]][1] if args[0] in COMMANDS else installed[args[0]].load()
        return run(args[1:])
    except KeyboardInterrupt:
        print("audiorl: stopped at once; 'audiorl resume' continues from the last checkpoint", file=sys.stderr)
        return 130
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
    """What `python -m audiorl.recipes.NAME` does."""
    sys.exit(main(["train", file, *sys.argv[1:]]))


def _union(commands: dict[str, Any]) -> Any:
    return reduce(or_, (Annotated[kind, subcommand(name, prefix_name=False)] for name, kind in commands.items()))


@dataclass(frozen=True)
class Train:
    """Run a recipe in a new folder."""

    recipe: Positional[str]
    """A name, such as mmau-grpo, or the path of a Python file. `audiorl train NAME --help` adds its options."""
    out: Path | None = None
    """Folder of the run, which must not exist yet. Required."""
    tiny: bool = False
    """Start from the recipe's tiny() configuration, which ends within a minute on a CPU, instead of its defaults."""
    full: bool = False
    """Start from the recipe's full() configuration, where it has one: real data on GPUs."""
    log: tuple[TrackerName, ...] = ()
    """Experiment trackers that get curves, rollouts and audio, for example --log wandb tensorboard."""
    runtime: RuntimeConfig = RuntimeConfig()


def _train(args: list[str]) -> int:
    if not args or (args[0].startswith("-") and args[0] not in HELP):
        raise ValueError("train: name a recipe first, for example: audiorl train quickstart --out runs/one")
    if args[0] in HELP:
        parse(Train, args, prog="audiorl train", description=f"{Train.__doc__}\n\n{listing('recipes')}")
    file = find_script("recipes", args[0])
    from audiorl.distributed.placement import use_runtime
    from audiorl.distributed.torchrun import relaunch
    from audiorl.recipes import _loader as loader

    if set(HELP) & set(args):
        recipe = loader.load_recipe(file)
        default = loader.default_config(recipe, args)
        options = make_dataclass(
            "Options", [("config", Annotated[recipe.Config, arg(name="")], default)], bases=(Train,), frozen=True
        )
        parse(options, ["--help"], prog="audiorl train", description=recipe.__doc__)
    command, rest = parse_known(Train, args, prog="audiorl train")
    if command.out is None:
        raise ValueError(f"train: say where the run is written: --out runs/{file.stem}")
    use_runtime(command.runtime)
    relaunch(command.runtime, ["train", *args])
    start = [f"--{name}" for name in ("tiny", "full") if getattr(command, name)]
    return _finished(loader.start(file, [*start, *rest], command.out, command.log))


@dataclass(frozen=True)
class Resume:
    """Continue an interrupted run."""

    folder: Positional[Path]
    """The run folder."""
    log: tuple[TrackerName, ...] = ()
    """Experiment trackers, as of audiorl train; others than before are allowed."""
    trust: tuple[str, ...] = ()
    """Python files that the folder's config.json names and that may be run: a recipe, reward or judge that is not part
    of audiorl. By default none: the error for a run that needs some names them."""
    runtime: RuntimeConfig = RuntimeConfig()


def _resume(args: list[str]) -> int:
    if not args:
        raise ValueError("resume: name one run folder, for example: audiorl resume runs/quickstart")
    options: Resume = parse(Resume, args, prog="audiorl resume")
    from audiorl.distributed.placement import use_runtime
    from audiorl.distributed.torchrun import relaunch
    from audiorl.recipes import _loader as loader

    use_runtime(options.runtime)
    relaunch(options.runtime, ["resume", *args])
    return _finished(loader.resume(options.folder, options.log, options.trust))


def _finished(run: Any) -> int:
    """Says where the run is. Processes that torchrun started besides the first have none."""
    if run is not None:
        from audiorl.cli.results import print_results

        print_results(run.dir)
        print(f"finished: {run.dir}")
    return 0


@dataclass(frozen=True)
class Report:
    """Write the report of a run, FOLDER/report.html, again."""

    folder: Positional[Path]
    """The run folder."""
    audio_root: tuple[Path, ...] = ()
    """Folders whose audio may be embedded, besides the run folder and the run's data: see `audiorl.report`."""


def _report(args: list[str]) -> int:
    if not args:
        raise ValueError("report: name one run folder, for example: audiorl report runs/quickstart")
    options: Report = parse(Report, args, prog="audiorl report")
    from audiorl.report import write_report

    print(write_report(options.folder, options.audio_root))
    return 0


@dataclass(frozen=True)
class View:
    """Look at runs in a browser while they train: curves, rollouts with their audio, evaluations; and label answers."""

    runs: Positional[tuple[Path, ...]]
    """Run folders."""
    port: int = 8310
    """Port on this machine; 0: any free one."""
    labels: Path | None = None
    """File to which labels are appended; by default there is nothing to label, and nothing is written."""
    label: Literal["pairs", "scores"] = "pairs"
    """What to ask: which of two answers is better, or a score from 1 to 5."""


def _view(args: list[str]) -> int:
    if not args:
        raise ValueError("view: name run folders, for example: audiorl view runs/*")
    options: View = parse(View, args, prog="audiorl view")
    if not options.runs:
        raise ValueError("view: name run folders, for example: audiorl view runs/*")
    try:
        from audiorl.report.view.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ValueError("view: needs fastapi and uvicorn: pip install 'audiorl[serve]'") from error
    serve(options.runs, options.port, options.labels, options.label)
    return 0


@dataclass(frozen=True)
class Eval:
    """Evaluate a model, or score recorded results."""

    name: Positional[str]
    """A name, such as mmau, or the path of a Python file. `audiorl eval NAME --help` lists the evaluation's options."""


def _eval(args: list[str]) -> int:
    if not args:
        raise ValueError(f"eval: name an evaluation: {', '.join(scripts('eval'))}")
    if args[0] in HELP:
        parse(Eval, args, prog="audiorl eval", description=f"{Eval.__doc__}\n\n{listing('eval')}")
    file = find_script("eval", args[0])
    if file.parent == folder("eval"):
        from audiorl.eval._common import run_evaluation

        run_evaluation(import_module(f"audiorl.eval.{file.stem}"), args[1:])
        return 0
    sys.argv = [str(file), *args[1:]]
    runpy.run_path(str(file), run_name="__main__")
    return 0


@dataclass(frozen=True)
class Audit:
    """Does a model use its audio, and the right audio? The short form of audiorl eval audit --model MODEL."""

    model: Positional[str]
    """A Hugging Face model folder or hub id, a checkpoint, or a run folder (its newest checkpoint). `audiorl audit
    --help` lists more options."""


def _audit(args: list[str]) -> int:
    if args and args[0] in HELP:
        return _eval(["audit", *args])
    if not args or args[0].startswith("-"):
        raise ValueError("audit: name a model first: audiorl audit MODEL --data held_out.jsonl --out audits/one")
    return _eval(["audit", "--model", *args])


@dataclass(frozen=True)
class Rewards:
    """Score recorded rollouts with a reward file, study several rewards on them, or serve one over HTTP:
    rewards score | study | serve."""


@dataclass(frozen=True)
class Score:
    """Score recorded rollouts again, and compare with the recorded scores."""

    file: Positional[Path]
    """A Python file that defines `reward`."""
    rollouts: Positional[tuple[str, ...]]
    """Files of rollouts that runs wrote, or patterns in quotes such as 'runs/*/rollouts/*.jsonl'."""


@dataclass(frozen=True)
class StudyRewards:
    """Compare rewards on recorded rollouts: distributions, correlation, agreement with labels, signs of hacking."""

    files: Positional[tuple[Path, ...]] = ()
    """Python files that define `reward`. The recorded scores are studied too; without files, they alone."""
    rollouts: tuple[str, ...] = ()
    """Files of rollouts that runs wrote, or patterns in quotes such as 'runs/*/rollouts/*.jsonl'. Required."""
    out: Path = Path("study.html")
    """The page to write."""
    probe: int = 100
    """Rollouts whose answers are changed and scored again, to see what raises the score; 0: none."""
    audio_root: tuple[Path, ...] = ()
    """Folders whose audio may be embedded, besides the run folders and the runs' data."""


@dataclass(frozen=True)
class Serve(RewardServerConfig):
    """Serve the reward of a file over HTTP, for runs on other machines."""

    file: Positional[str]
    """A Python file that defines `reward`."""


def _rewards(args: list[str]) -> int:
    if args and args[0] not in (*REWARDS, *HELP):
        args = ["score", *args]  # as in 0.1
    if args[:1] == ["score"] and not set(HELP) & set(args) and len(args) < 3:
        raise ValueError(
            "rewards: name a reward file and recorded rollouts: audiorl rewards score FILE ROLLOUTS.jsonl …; or "
            "serve the file: audiorl rewards serve FILE"
        )
    options: Any = parse(_union(REWARDS), args or ["--help"], prog="audiorl rewards")
    if isinstance(options, StudyRewards):
        from audiorl.report.study.command import run_study

        run_study(options.files, options.rollouts, options.out, options.probe, options.audio_root)
        return 0
    if isinstance(options, Score):
        from audiorl.rewards.replay import print_replay, replay

        print_replay(replay(options.file, options.rollouts))
        return 0
    try:
        from audiorl.rewards.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ValueError("rewards serve: needs fastapi and uvicorn: pip install 'audiorl[serve]'") from error
    serve(options)
    return 0


@dataclass(frozen=True)
class Codec:
    """Audio files to codes and back, or train a tokenizer: codec encode | decode | train."""


@dataclass(frozen=True)
class TrainCodec:
    """Train our own tokenizer: the same as audiorl train codec."""


def _codec(args: list[str]) -> int:
    if args[:1] == ["train"]:
        return _train(["codec", *args[1:]])
    kinds = _union({"encode": Encode, "decode": Decode, "train": TrainCodec})
    run_codec(parse(kinds, args or ["--help"], prog="audiorl codec"))
    return 0


def _graft(args: list[str]) -> int:
    run_graft(parse(Graft, args or ["--help"], prog="audiorl graft"))
    return 0


@dataclass(frozen=True)
class Export:
    """Write the model of a checkpoint to a folder that transformers and vLLM load, with a model card."""

    checkpoint: Positional[Path]
    """A checkpoint, such as RUN/checkpoints/grpo/step_000100, or a run folder (its newest checkpoint)."""
    out: Path
    """The new folder."""
    merge: bool = False
    """Add a low-rank adapter to the weights of its base model, instead of exporting the adapter."""
    push: str | None = None
    """Repository on the Hugging Face hub to upload to, such as me/my-model; by default nothing is uploaded."""
    scores: tuple[Path, ...] = ()
    """Folders that `audiorl eval asr` wrote of this model: their results by language and speaker go into the card."""


def _export(args: list[str]) -> int:
    options: Export = parse(Export, args or ["--help"], prog="audiorl export")
    from audiorl.eval.asr import model_card_section
    from audiorl.models.export import export, run_of
    from audiorl.recipes._loader import recorded_defaults
    from audiorl.run.folder import checkpoint_of

    checkpoint = Path(checkpoint_of(str(options.checkpoint)))
    run = run_of(checkpoint)
    defaults = None if run is None else recorded_defaults(run)
    sections = [model_card_section(folder) for folder in options.scores]
    print(export(checkpoint, options.out, options.merge, options.push, defaults, sections))
    return 0


def _chat(args: list[str]) -> int:
    if not args or (args[0].startswith("-") and args[0] not in HELP):
        raise ValueError("chat: name a model first, for example: audiorl chat runs/quickstart")
    from audiorl.cli.chat import run_chat

    return run_chat(parse(Chat, args, prog="audiorl chat"))


def _say(args: list[str]) -> int:
    if not args or (args[0].startswith("-") and args[0] not in HELP):
        raise ValueError(
            'say: name a model first, for example: audiorl say runs/tts --text "Good morning." --out a.wav'
        )
    return run_say(parse(Say, args, prog="audiorl say"))


def _interpret(args: list[str]) -> int:
    return run_interpret(parse(Interpret, args, prog="audiorl interpret"))


@dataclass(frozen=True)
class Doctor:
    """What is installed and what is missing, with one training step as a test; or the GPU memory that a run needs."""

    plan: str | None = None
    """A model's folder or name: print the GPU memory of a run with it. `audiorl doctor --plan MODEL --help` lists more
    options."""
    gpu: bool = False
    """Compare a GPU with the CPU and measure it; write gpu-report.json. `audiorl doctor --gpu --help` lists more
    options."""


def _doctor(args: list[str]) -> int:
    if args[:1] == ["--gpu"]:
        from audiorl.gpu_check.run import main as gpu_check

        return gpu_check(args[1:])
    if args[:1] == ["--plan"]:
        from audiorl.cli.plan import plan

        return plan(args[1:])
    if args and args[0] not in HELP:
        raise ValueError(
            "doctor takes no arguments but --plan MODEL and --gpu, which have options of their own: see audiorl doctor "
            "--plan --help, audiorl doctor --gpu --help"
        )
    parse(Doctor, args, prog="audiorl doctor")
    from audiorl.cli.doctor import run_doctor
    from audiorl.cli.selftest import self_test

    return run_doctor(self_test)


REWARDS: dict[str, Any] = {"score": Score, "study": StudyRewards, "serve": Serve}
COMMANDS: dict[str, tuple[type, Callable[[list[str]], int]]] = {
    "train": (Train, _train),
    "resume": (Resume, _resume),
    "report": (Report, _report),
    "view": (View, _view),
    "eval": (Eval, _eval),
    "audit": (Audit, _audit),
    "rewards": (Rewards, _rewards),
    "codec": (Codec, _codec),
    "graft": (Graft, _graft),
    "export": (Export, _export),
    "chat": (Chat, _chat),
    "say": (Say, _say),
    "interpret": (Interpret, _interpret),
    "doctor": (Doctor, _doctor),
}

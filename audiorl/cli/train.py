"""Run a recipe in a new folder.

audiorl train mmau-grpo --data avqa.jsonl --held-out mmau-test-mini.json --out runs/mmau
audiorl train audio-qa --config recipes/ke-omni-r/qwen2.5-omni-3b.yaml --out runs/mmau
"""

from __future__ import annotations

import difflib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from audiorl.config import to_json
from audiorl.config.distributed import RuntimeConfig
from audiorl.options import HELP, LIST, TWO_FILES, RunFile, first_word, parse, parse_known, shortened, words_of
from audiorl.recipes import _loader as loader
from audiorl.run.records import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from audiorl.run.folder import Run

USUAL = frozenset(
    (
        "out", "config", "tiny", "preset", "seeds", "log", "path", "data", "held-out", "unseen", "seed", "epochs",
        "max-steps", "lora", "reward-file", "control", "codec", "judge", "language", "model.device", "model.dtype",
        "rl.steps", "rl.group-size", "rl.prompts-per-step", "rl.kl-beta", "optim.lr", "sft.batch-size", "dpo.loss",
        "dpo.batch-size", "dpo.beta", "sampling.temperature", "sampling.max-new-tokens", "runtime.ranks",
    )
)  # fmt: skip
"""Options that `audiorl train NAME --help` shows, besides those that are the recipe's own."""
UNUSUAL = frozenset(
    (
        "check-audio", "on-error", "audio-root", "threads", "max-rate", "repetition-n", "repetition-weight",
        "no-speech", "no-speech-held-out", "hallucination-weight",
    )
)  # fmt: skip
"""The recipe's own options that it does not show."""
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


@dataclass(frozen=True)
class TrainOptions:
    """Run a recipe in a new folder."""

    recipe: Positional[str]
    """A name, such as mmau-grpo, or the path of a Python file. `audiorl train NAME --help` adds its options."""
    out: Path | None = None
    """Folder of the run, which must not exist yet. Required."""
    config: Path | None = None
    """A YAML file with options of the recipe, nested as on the command line, which overrides them; its group `runtime`
    has those of --runtime."""
    print_config: bool = False
    """Print all options of the recipe as such a file, and train nothing."""
    tiny: bool = False
    """Start from the recipe's tiny() configuration, which ends within a minute on a CPU, instead of its defaults."""
    full: bool = False
    """Start from the recipe's full() configuration, where it has one: real data on GPUs."""
    preset: str | None = None
    """Start from one of the recipe's presets, where it has some: audio-qa has grpo and ppo."""
    log: tuple[TrackerName, ...] = ()
    """Experiment trackers that get curves, rollouts and audio, for example --log wandb tensorboard."""
    seeds: tuple[int, ...] = ()
    """Train once with each of these seeds, in OUT/seed_N, and report means and intervals over them; the same command
    continues."""
    runtime: RuntimeConfig = RuntimeConfig()


def main(args: list[str]) -> int:
    """Run the recipe; return the exit code."""
    first_word(args, "train: name a recipe first, for example: audiorl train quickstart --out runs/one")
    if args[0] in HELP:
        parse(TrainOptions, args, prog="audiorl train", description=f"{__doc__}\n{loader.listing('recipes')}")
    file = loader.find_script("recipes", args[0])
    if set(HELP) & set(args):
        _help(args)
    command, words = read(args)
    # Help and wrong options end here, before torch is imported.
    asked = ["--print-config"] * command.print_config
    options, also = loader.load_options(file), list(words_of(TrainOptions))
    config = loader.parse_config(options, [*words, *asked], quiet=True, also=also)
    if command.out is None:
        raise ValueError(f"train: say where the run is written: --out runs/{file.stem}")
    _check_paths(config)
    if command.seeds:
        trusted = [str(file), *loader.python_files(to_json(config))]  # the user's own words name them
        going_on = [*_runtime_words(command.runtime), *(["--log", *command.log] if command.log else [])]
        going_on += ["--trust", *trusted]
        return _train_seeds(command.out, args, command.seeds, going_on)
    from audiorl.distributed import use_runtime
    from audiorl.distributed.torchrun import relaunch

    use_runtime(command.runtime)
    relaunch(command.runtime, ["train", *args])
    return finished(loader.start(args[0], words, command.out, command.log))


def read(args: list[str]) -> tuple[TrainOptions, list[str]]:
    """Return the command's options, and the words that are left for `parse_config` of the recipe."""
    command, words = parse_known(TrainOptions, args, prog="audiorl train")
    if sum(word.partition("=")[0] == "--config" for word in args) > 1:
        raise ValueError(TWO_FILES)
    if command.config is not None:
        runtime = RunFile(command.config).group("runtime", RuntimeConfig())
        command, words = parse_known(
            TrainOptions, args, prog="audiorl train", default=TrainOptions(args[0], runtime=runtime)
        )
        words = ["--config", str(command.config), *words]
    start = loader.starting_words(args[0], tiny=command.tiny, full=command.full, preset=command.preset)
    return command, [*start, *words]


def _help(args: list[str]) -> None:
    """Show options of the command and of the recipe together, the usual ones or with --help-all every one, and end."""
    recipe = loader.load_options(args[0])
    words = [word for arg in args for word in arg.split("=", 1)]
    preset = next((name for word, name in pairwise(words) if word == "--preset" and not name.startswith("-")), None)
    start = loader.starting_words(args[0], tiny="--tiny" in args, full="--full" in args, preset=preset)
    default = loader.default_config(recipe, start)
    every = {**words_of(TrainOptions), **words_of(type(default))}
    base, prog, about = TrainOptions, "audiorl train", recipe.__doc__ or ""
    if LIST not in args and "--help-all" not in args:
        own = {name.replace("_", "-") for name in type(default).__annotations__} - UNUSUAL
        command, default = (shortened(o, lambda path: path in own | USUAL) for o in (TrainOptions(args[0]), default))
        first, *more = about.split("\n\n")
        example = next((part for part in more if part.startswith("    ")), "")
        about = f"{first}\n\n{example}\n\nThe usual options; --help-all shows all {len(every)}."
        base, prog = type(command), f"audiorl train {args[0]}"
    options = make_dataclass(
        "Options", [("options", Annotated[type(default), arg(name="")], default)], bases=(base,), frozen=True
    )
    parse(options, [LIST if LIST in args else "--help"], prog=prog, description=about)


def _check_paths(config: Any) -> None:
    """Raise ValueError for a file that the options name and that is not there, naming one that is called alike."""
    from audiorl.data.sets import parse_set

    for name in ("data", "held_out", "unseen", "ptx_data", "retention", "reward_file", "outside_file"):
        value = getattr(config, name, None)
        for given in [value] if isinstance(value, str) else value if isinstance(value, tuple) else ():
            path = Path(parse_set(given)[0]).expanduser()
            named = given.startswith("bundled") or "://" in given or set(given) & set("*?[")
            if named or path.exists():
                continue
            there = [f.name for f in path.parent.iterdir()] if path.parent.is_dir() else []
            near = difflib.get_close_matches(path.name, there, 1)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            raise ValueError(f"--{name.replace('_', '-')} {given}: no such file or folder{hint}")


# -- several seeds -----------------------------------------------------------------------------------------------------


def _runtime_words(runtime: RuntimeConfig) -> list[str]:
    """Return the options that differ from the defaults, as `audiorl resume` takes them."""
    words = []
    for field in fields(runtime):
        if (value := getattr(runtime, field.name)) != field.default:
            words += [f"--runtime.{field.name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def _train_seeds(out: Path, args: list[str], seeds: Sequence[int], going_on: Sequence[str]) -> int:
    """Train once with each seed in a process of its own; then print means and intervals, and write OUT/report.html.

    A seed whose run is interrupted is resumed by the same command, with the options `going_on`; one that has finished
    is not run again. Further seeds may be given then. Return the exit code.
    """
    words, skip = [], False
    for word in args:  # without the seeds and the folder
        skip = word.partition("=")[0] in ("--seeds", "--out") or (skip and not word.startswith("--"))
        words += [] if skip else [word]
    if any(word.partition("=")[0] == "--seed" for word in words):
        raise ValueError("--seeds: leave --seed out")
    record = out / "seeds.json"
    state: dict[str, Any] = {"args": words, "finished": []}
    if record.is_file():
        state = json.loads(record.read_text(encoding="utf-8"))
        if state["args"] != words:
            raise ValueError(f"{record}: began with other options: {shlex.join(state['args'])}; give another --out")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} exists already; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(record, state)  # first, so that a seed which is killed leaves what the same command continues
    running: list[subprocess.Popen[bytes]] = []
    # A terminal's Ctrl-C reaches the run too, which saves and ends; SIGTERM is passed on.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: running[-1].terminate()}
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()}
    try:
        for seed in dict.fromkeys(seeds):
            folder = out / f"seed_{seed}"
            if seed in state["finished"]:
                continue
            print(f"seed {seed}: {folder}", flush=True)
            command = ["train", *words, "--seed", str(seed), "--out", str(folder)]
            if (folder / "state.json").is_file():
                command = ["resume", str(folder), *going_on]
            running.append(subprocess.Popen([sys.executable, "-m", "audiorl", *command]))
            code = running[-1].wait()
            if code:
                if not any(out.glob("seed_*")):
                    record.unlink()
                print(f"audiorl: seed {seed} ended with exit code {code}; the same command continues", file=sys.stderr)
                return code
            state["finished"].append(seed)
            write_json(record, state)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    from audiorl.report import write_report

    print_results(out)
    print(f"means of {len(state['finished'])} seeds, 95% intervals over seeds; each seed: {write_report(out)}")
    return 0


# -- the end -----------------------------------------------------------------------------------------------------------


def finished(run: Run | None) -> int:
    """Say where the run is. Processes that torchrun started besides the first have none."""
    if run is not None:
        print_results(run.dir)
        print(f"finished: {run.dir}")
    return 0


def print_results(folder: Path, console: Console | None = None) -> None:
    """Print a table of the held-out numbers: before → after → control, then the other evaluations and the change.

    Below it stands what did not get better, and why that matters. Prints nothing for a run
    without evaluations. Raises ValueError for a damaged eval.json.
    """
    from rich.console import Console
    from rich.table import Table

    from audiorl.report.summary import doubts, entry_names, evaluation_rows, read_entries
    from audiorl.run.metrics_log import read_metrics

    rows = [row for row in evaluation_rows(folder) if "/" not in row.metric]  # parts of parts are in the report
    if not rows:
        return
    columns = entry_names(rows)
    table = Table(title="held out: " + " → ".join(columns))
    table.add_column("")
    for name in (*columns, "change"):
        table.add_column(name, justify="right")
    for row in rows:
        change = row.change_text()
        table.add_row(row.label, *map(row.cell, columns), f"[red]{change}[/]" if row.worse else change)
    console = console or Console()
    console.print(table)
    metrics = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    rise, found = doubts(read_entries(folder), metrics)
    if found:
        console.print(f"[red]▼ What did not get better{f', although {rise}' if rise else ''}:[/]")
    for doubt in found:
        numbers = ", ".join(f"{row.label} {row.change_text()}" for row in doubt.rows)
        console.print(f"  {doubt.title}: {numbers}. {doubt.why}", highlight=False, markup=False)

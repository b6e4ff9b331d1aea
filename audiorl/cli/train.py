"""Run a recipe in a new folder.

audiorl train mmau-grpo --data avqa.jsonl --held-out mmau-test-mini.json --out runs/mmau
audiorl train audio-qa --config recipes/ke-omni-r/qwen2.5-omni-3b.yaml --out runs/mmau
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from audiorl.config.distributed import RuntimeConfig
from audiorl.options import RunFile, first_word, parse, parse_known
from audiorl.recipes import _loader as loader

if TYPE_CHECKING:
    from rich.console import Console

    from audiorl.run.folder import Run

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
    runtime: RuntimeConfig = RuntimeConfig()


def main(args: list[str]) -> int:
    """Run the recipe; return the exit code."""
    first_word(args, "train: name a recipe first, for example: audiorl train quickstart --out runs/one")
    if args[0] in ("-h", "--help"):
        parse(TrainOptions, args, prog="audiorl train", description=f"{__doc__}\n{loader.listing('recipes')}")
    file = loader.find_script("recipes", args[0])
    if {"-h", "--help"} & set(args):
        _help(args)
    command, words = read(args)
    # Help and wrong options end here, before torch is imported.
    asked = ["--print-config"] * command.print_config
    loader.parse_config(loader.load_options(file), [*words, *asked], quiet=True)
    if command.out is None:
        raise ValueError(f"train: say where the run is written: --out runs/{file.stem}")
    from audiorl.distributed import use_runtime
    from audiorl.distributed.torchrun import relaunch

    use_runtime(command.runtime)
    relaunch(command.runtime, ["train", *args])
    return finished(loader.start(args[0], words, command.out, command.log))


def read(args: list[str]) -> tuple[TrainOptions, list[str]]:
    """Return the command's options, and the words that are left for `parse_config` of the recipe."""
    command, words = parse_known(TrainOptions, args, prog="audiorl train")
    if command.config is not None:
        runtime = RunFile(command.config).group("runtime", RuntimeConfig())
        command, words = parse_known(
            TrainOptions, args, prog="audiorl train", default=TrainOptions(args[0], runtime=runtime)
        )
        words = ["--config", str(command.config), *words]
    start = loader.starting_words(args[0], tiny=command.tiny, full=command.full, preset=command.preset)
    return command, [*start, *words]


def _help(args: list[str]) -> None:
    """Show the options of the command and of the recipe together, and end."""
    recipe = loader.load_options(args[0])
    start = loader.starting_words(args[0], tiny="--tiny" in args, full="--full" in args)
    default = loader.default_config(recipe, start)
    options = make_dataclass(
        "Options", [("options", Annotated[type(default), arg(name="")], default)], bases=(TrainOptions,), frozen=True
    )
    parse(options, ["--help"], prog="audiorl train", description=recipe.__doc__)


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

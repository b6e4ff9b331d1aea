"""What experiments with several arms from one start share: the start, runs, CPU time, samples, answers, tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from audiorl.cli import main as audiorl
from audiorl.eval._common import read_rows
from audiorl.eval._listening import DEFAULT_VIEWS, audio_gains, verdict
from audiorl.eval._phases import measures_of
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.run.folder import Run, newest_checkpoint
from audiorl.run.records import RunConfig, RunState, read_record, write_json

T = TypeVar("T")


def train_recipe(folder: Path, command: str, trust: Sequence[str] = ()) -> None:
    """`audiorl train COMMAND --out FOLDER`, continued where it was stopped; nothing where it is done.

    trust: Python files that the command names, which a resumed run does not run unasked.
    """
    if begun := (folder / "state.json").exists():
        control = read_record(folder / "config.json", RunConfig).config.get("control")
        if ("control" if control else "after") in read_record(folder / "state.json", RunState).finished:
            return
    trusted = ["--trust", *trust] if trust else []
    arguments = ["resume", str(folder), *trusted] if begun else ["train", *command.split(), "--out", str(folder)]
    if status := audiorl(arguments):
        sys.exit(status)


def supervised_start(folder: Path, seed: int = 0, quick: bool = False) -> Path:
    """The checkpoint of the quickstart's supervised phase, made if it is not there."""
    command = f"quickstart --control False --rl.steps 1 --threads 1 --seed {seed}"
    if quick:  # as short as a start can be whose answers are right now and then
        command += (
            " --tiny --max-phrases 12 --sft.steps 60 --sft.save-every 60 --sft-optim.lr 3e-3 --sft-optim.warmup-steps 0"
        )
    train_recipe(folder, command)
    return max((folder / "checkpoints" / "sft").glob("step_*"))


def timed(run: Run, arm: str, train: Callable[[], None]) -> None:
    """Train, and add the CPU seconds to cpu.json of the run; an arm that has finished is only loaded."""
    finished, begin = run.finished(arm), time.process_time()
    try:
        train()
    finally:
        if not finished:
            seconds = cpu_seconds(run.dir)
            write_json(run.dir / "cpu.json", seconds | {arm: seconds.get(arm, 0.0) + time.process_time() - begin})


def cpu_seconds(folder: Path) -> dict[str, float]:
    """What `timed` has written: seconds by arm."""
    file = folder / "cpu.json"
    return read_record(file, dict[str, float]) if file.exists() else {}


def seconds_of(folder: Path) -> float:
    """The CPU seconds that the training of a run took."""
    state = read_record(folder / "state.json", RunState)
    return float(sum(state.cpu_seconds.values()))


def equal_steps(start: Path, folder: Path, arms: Iterable[str]) -> int:
    """The updates of SFT, at the pace of the run `start`, that cost as many CPU seconds as the longest other arm."""
    updates = int(Path(newest_checkpoint(start)).name.removeprefix("step_"))
    longest = max(seconds_of(folder / arm) for arm in arms if arm != "SFT")
    return max(1, round(longest * updates / seconds_of(start)))


def seeds_with(out: Path, entry: str) -> list[Path]:
    """The run folders of the seeds that have this evaluation."""
    return [folder for folder in sorted(out.glob("seed_*")) if (folder / "eval" / f"{entry}.jsonl").exists()]


def hits(folders: Sequence[Path], entry: str, measure: str = "accuracy") -> np.ndarray:
    """Right answers of an evaluation, or another measure of it, [question], the mean over the seeds."""
    rows = [measures_of(folder / "eval" / f"{entry}.jsonl") for folder in folders]
    return np.mean([[row[id][measure] for id in rows[0]] for row in rows], axis=0)


def places(path: Path, group: Callable[[Mapping[str, Any]], str]) -> dict[str, list[int]]:
    """The places of the rows of an evaluation's file by their group."""
    by_group: dict[str, list[int]] = {}
    for place, row in enumerate(read_rows(path)):
        by_group.setdefault(group(row), []).append(place)
    return by_group


def spaced(samples: Sequence[T], most: int | None) -> list[T]:
    """At most so many of the samples, evenly spaced; None: all."""
    return list(samples if most is None else samples[:: max(len(samples) // most, 1)][:most])


def percent(values: np.ndarray, sign: str = "") -> str:
    """`number` of 100 times the values."""
    return number(100 * values, sign)


def number(values: np.ndarray, sign: str = "") -> str:
    """The mean with its 95 % bootstrap interval over questions."""
    low, high = bootstrap_interval(list(values))
    return f"{values.mean():{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


def check_listening(run: Run, name: str, policy: AudioPolicy, examples: Sequence[Example]) -> None:
    """What the right audio adds to the labels of `examples`: the phase listening_NAME."""
    phase = f"listening_{name}"
    if not run.finished(phase):
        gains = audio_gains(policy, examples)
        run.finish(phase, {gain.view: gain.nats for gain in gains} | {"verdict": verdict(gains).word})


def listening_table(folders: Mapping[str, Sequence[Path]]) -> str:
    """Of the run folders by name the verdicts of `check_listening`, and the smallest and largest gain over each view in
    nats per token."""
    rows = []
    for name, runs in folders.items():
        phase = f"listening_{name}"
        finished = [read_record(folder / "state.json", RunState).finished for folder in runs]  # runs may be training
        results = [phases[phase] for phases in finished if phase in phases]
        if results:
            ranges = [f"{min(r[v] for r in results):.2f} to {max(r[v] for r in results):.2f}" for v in DEFAULT_VIEWS]
            rows.append((name, ", ".join(r["verdict"] for r in results), *ranges))
    return f"## Does it listen?\n\n{markdown(('', 'verdicts', *DEFAULT_VIEWS), rows)}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"

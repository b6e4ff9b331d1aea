"""`audiorl rewards study`: the table in the terminal and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from audiorl.eval.metrics.corpus import Estimate
from audiorl.report.study.rollouts import Rollouts
from audiorl.report.study.study import Study, study
from audiorl.rewards.files import load_reward


def run_study(
    files: Sequence[Path], patterns: Sequence[str], out: Path, probe: int = 100, audio_root: Sequence[Path] = ()
) -> Study:
    """Score the rollouts with each reward file, print the table and write the page."""
    if not patterns:
        raise ValueError("rewards study: no rollouts; give --rollouts 'runs/*/rollouts/*.jsonl'")
    if out.is_dir():
        raise ValueError(f"{out}: a folder; name the page to write, such as --out study.html")
    if probe < 0:
        raise ValueError(f"--probe is {probe}; it must be 0 or more")
    rewards = [load_reward(file) for file in files]  # a bad file is reported before any rollout is read
    rollouts = Rollouts.load(patterns)
    for reward in rewards:
        rollouts = rollouts.score(reward)
    result = study(rollouts, probe)
    print_study(result)
    print(result.write(out, audio_root))
    return result


LABELLED = ("labels: rank correlation", "pairs in order")


def print_study(result: Study, show: int = 3) -> None:
    """Print a row a reward, what is wrong with it, and `show` rollouts on which the least similar rewards differ."""
    console = Console()
    labelled = any(one.agreement for one in result.rewards)
    head = ["reward", "scored", "skipped", "mean", "std", "groups without signal"]
    table = Table(
        *head, *(["labels: rank correlation", "pairs in order"] if labelled else []), title=f"{result.rollouts!r}"
    )
    for one in result.rewards:
        row = [one.name, str(one.scored), str(one.skipped), f"{one.mean:.3f}", f"{one.std:.3f}"]
        row.append(f"{len(one.lost)} of {one.groups}")
        if labelled:
            agreement = one.agreement
            values = (agreement.spearman, agreement.pairwise) if agreement else (None, None)
            row += [_interval(value) for value in values]
        table.add_row(*row)
    console.print(table)
    for one in result.rewards:
        for text in one.hacks:
            console.print(f"{one.name}: may be hacked: {text}", markup=False, highlight=False)
        for text in one.notes:
            console.print(f"{one.name}: {text}", markup=False, highlight=False)
    for first, second in result.pairs()[:1]:
        for i in result.disagreements(first, second, show):
            rollout, file = result.rollouts[i], result.rollouts.files[i]
            scores = ", ".join(f"{name} {result.columns[name][i]:.3f}" for name in (first, second))
            line = f"{scores}  {file}  {rollout.name}  {json.dumps(rollout.text)}"
            console.print(line, markup=False, highlight=False)


def _interval(value: Estimate | None) -> str:
    return "" if value is None else f"{value.value:.2f} ({value.low:.2f} … {value.high:.2f})"

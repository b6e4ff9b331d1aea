"""`audiorl rewards study`: the table in the terminal, and the page with distributions and the rollouts on which rewards
disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from audiorl.data.rollout_rows import rollout_row
from audiorl.eval.metrics.corpus import Estimate
from audiorl.report.audio import Allowed, Players, allowed_audio
from audiorl.report.charts import PAGE, draw_histogram, svg
from audiorl.report.kit import asset, chip, document, macros
from audiorl.report.kit import write_page as write_file
from audiorl.report.rollouts import is_stream, question, response
from audiorl.report.streams import Band, stream
from audiorl.report.study.study import RISE, Rollouts, Study, study
from audiorl.report.summary import read_json_object, show
from audiorl.rewards.files import load_reward

_PAIRS, _SHOWN = 6, 4
_parts = macros("study.html")


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
    _print(result)
    print(write_page(result, out, audio_root))
    return result


def _print(result: Study) -> None:
    """Print a row a reward, and what is wrong with it."""
    console = Console()
    head, rows = _summary(
        result, lambda value: "–" if value is None else f"{value.value:.2f} {value.low:.2f} … {value.high:.2f}"
    )
    kept = [i for i, name in enumerate(head) if name not in ("lowest", "highest", "at highest")]  # for 80 columns
    shown = Table(*(head[i] for i in kept), title=f"{result.rollouts!r}")
    for row in rows:
        shown.add_row(*(row[i] for i in kept))
    console.print(shown)
    for one in result.rewards:
        for text in (*(f"may be hacked: {hack}" for hack in one.hacks), *one.notes):
            console.print(f"{one.name}: {text}", markup=False, highlight=False)


def _summary(result: Study, interval: Callable[[Estimate | None], str]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of rewards; `interval` writes a value with its interval."""
    head = ["reward", "scored", "skipped", "mean", "std", "lowest", "highest", "at highest", "groups without signal"]
    labelled = any(one.agreement for one in result.rewards)
    head += ["labels: rank correlation", "labels: pairs in order"] if labelled else []
    rows = []
    for one in result.rewards:
        row = [one.name, str(one.scored), str(one.skipped), *(show(v) for v in (one.mean, one.std, one.low, one.high))]
        row += [f"{one.at_high:.0%}" if one.scored else "–", f"{len(one.lost)} of {one.groups}"]
        if labelled:
            agreed = (one.agreement.spearman, one.agreement.pairwise) if one.agreement else (None, None)
            row += map(interval, agreed)
        rows.append(row)
    return head, rows


# -- the page ----------------------------------------------------------------------------------------------------------


def write_page(study: Study, path: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """Write the page, one HTML file with audio. Audio is embedded as in a run's report (`write_report`)."""
    return write_file(Path(path), page(study, audio_root))


def page(study: Study, audio_root: Sequence[Path] = ()) -> str:
    """Return the page as text."""
    runs = list(dict.fromkeys(file.resolve().parent.parent for file in study.rollouts.files))
    players = Players(runs[0], allowed=_allowed(runs, audio_root))
    head, rows = _summary(study, _parts.interval)
    shown, pairs = _histograms(study), _disagreements(study, players)
    body = _parts.page(study, head, rows, shown, _signs(study), pairs, players.skipped)
    return document("Rewards on recorded rollouts", body, asset("study.css"))


def _allowed(runs: Iterable[Path], audio_root: Sequence[Path]) -> Allowed:
    """Return what the reports of all runs may embed."""
    folders: list[Path] = []
    manifests: list[Path] = []
    for run in runs:
        try:
            config = (read_json_object(run / "config.json") or {}).get("config")
        except (OSError, ValueError):
            config = None  # rollouts without their run: the recordings in its folder remain
        allowed = allowed_audio(run, config, audio_root)
        folders += allowed.folders
        manifests += allowed.manifests
    return Allowed(tuple(dict.fromkeys(folders)), tuple(dict.fromkeys(manifests)))


def _histograms(study: Study) -> list[tuple[str, Markup]]:
    shown = []
    for one in study.rewards:
        if one.scored:
            figure, scores = Figure(figsize=(3.9, 1.5)), study.columns[one.name]
            draw_histogram(figure.add_axes((0.115, 0.2, 0.87, 0.7)), scores[~np.isnan(scores)], PAGE)
            shown.append((one.name, svg(figure)))
    return shown


def _signs(study: Study) -> tuple[list[str], list[list[str]]]:
    """Return head and rows; what looks like a hack is flagged."""
    signs = list(study.rewards[0].signs)
    kinds = [kind for kind in RISE if any(kind in one.probes for one in study.rewards)]
    head = ["reward", *(f"follows {name}" for name in signs), *(f"probe: {kind}" for kind in kinds)]
    rows = []
    for one in study.rewards:
        cells = [(one.name, bool(one.hacks)), *((_parts.interval(one.signs[name]), False) for name in signs)]
        cells += [(_parts.interval(one.probes.get(kind)), one.pays_for(kind)) for kind in kinds]
        rows.append([Markup("<span class='flag'>{}</span>").format(c) if flagged else c for c, flagged in cells])
    return head, rows


def _disagreements(study: Study, players: Players) -> list[tuple[str, list[Markup]]]:
    """Return per pair of rewards a title and cards."""
    blocks = []
    for first, second in study.pairs()[:_PAIRS]:
        if indices := study.disagreements(first, second, _SHOWN):
            value = study.correlation[first, second]
            title = f"{first} and {second}: " + ("undefined" if math.isnan(value) else f"rank correlation {value:.2f}")
            blocks.append((title, [_card(study, i, (first, second), players) for i in indices]))
    return blocks


def _card(study: Study, i: int, pair: tuple[str, str], players: Players) -> Markup:
    rollout = study.rollouts[i]
    scores = {one.name: float(study.columns[one.name][i]) for one in study.rewards}
    line = Markup("").join(
        chip(name, v, "total" if name in pair else "") for name, v in scores.items() if not math.isnan(v)
    )
    row = rollout_row(rollout, 0, 0.0)
    if rollout.spoken_audio is not None:
        row["spoken_audio"] = {"path": rollout.spoken_audio.path}
    sample = row["sample"]
    if is_stream(sample):
        body = stream(sample, [Band(row, line, "response")], players)
    else:
        body = response(row, players, score=line)
    card: Markup = _parts.card(f"{study.rollouts.files[i]}, {rollout.name}", question(sample, players), body)
    return card

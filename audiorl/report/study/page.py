"""`audiorl rewards study`: the table in the terminal, and the page with distributions and the rollouts on which rewards
disagree."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from audiorl.data.rollout_rows import rollout_row
from audiorl.eval.metrics.corpus import Estimate
from audiorl.report.audio import Allowed, Players, allowed_audio
from audiorl.report.charts import PAGE, draw_histogram, svg
from audiorl.report.kit import asset, chip, document, note, section, sign_of, table
from audiorl.report.kit import write_page as write_file
from audiorl.report.rollouts import is_stream, question, response
from audiorl.report.streams import Band, stream
from audiorl.report.study.study import RISE, Rollouts, Study, study
from audiorl.report.summary import read_json_object, show
from audiorl.rewards.files import load_reward
from audiorl.types import Rollout

_PAIRS, _SHOWN, _LOST = 6, 4, 8


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
    head, rows = _summary(result, " ")
    kept = [i for i, name in enumerate(head) if name not in ("lowest", "highest", "at highest")]  # for 80 columns
    shown = Table(*(head[i] for i in kept), title=f"{result.rollouts!r}")
    for row in rows:
        shown.add_row(*(row[i] for i in kept))
    console.print(shown)
    for one in result.rewards:
        for text in (*(f"may be hacked: {hack}" for hack in one.hacks), *one.notes):
            console.print(f"{one.name}: {text}", markup=False, highlight=False)


def _summary(result: Study, gap: str = "<small>") -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of rewards; `gap` stands between a value and its interval."""
    head = ["reward", "scored", "skipped", "mean", "std", "lowest", "highest", "at highest", "groups without signal"]
    labelled = any(one.agreement for one in result.rewards)
    head += ["labels: rank correlation", "labels: pairs in order"] if labelled else []
    rows = []
    for one in result.rewards:
        row = [one.name, str(one.scored), str(one.skipped), *(show(v) for v in (one.mean, one.std, one.low, one.high))]
        row += [f"{one.at_high:.0%}" if one.scored else "–", f"{len(one.lost)} of {one.groups}"]
        if labelled:
            agreed = (one.agreement.spearman, one.agreement.pairwise) if one.agreement else (None, None)
            row += [interval(value, gap) for value in agreed]
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
    sections = (_header, _rewards, _distributions, _correlation, _signs, _lost)
    body = "".join(make(study) for make in sections) + _disagreements(study, players)
    more = f" {players.skipped} more recordings are not embedded." if players.skipped else ""
    body += f"<footer>Written by audiorl rewards study.{more}</footer>"
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


def _header(study: Study) -> str:
    rollouts = study.rollouts
    files, groups = len(set(rollouts.files)), len(set(rollouts.groups()))
    labelled = sum(label is not None for label in rollouts.labels)
    worse = "".join(
        f"<p class='worse'>▼ {escape(one.name)}: {escape(text)}</p>" for one in study.rewards for text in one.hacks
    )
    notes = "".join(note(f"{one.name}: {text}") for one in study.rewards for text in one.notes)
    return (
        "<header><p class='over'>audiorl rewards study</p><h1>Rewards on recorded rollouts</h1>"
        f"<div class='hero alone'><div><p class='say'>{len(study.rewards)} rewards on {len(rollouts)} rollouts of "
        f"{groups} groups in {files} file(s){f', {labelled} with labels' if labelled else ''}.</p>{worse}{notes}"
        "</div></div></header>"
    )


def _rewards(study: Study) -> str:
    head, rows = _summary(study)
    lead = (
        "A group whose scores are all equal has no group-relative advantage. Intervals are 95 % bootstrap intervals "
        "over groups."
    )
    return section("Rewards", table(head, ([escape(row[0]), *row[1:]] for row in rows)), lead)


def _distributions(study: Study) -> str:
    cards = ""
    for one in study.rewards:
        if one.scored:
            figure = Figure(figsize=(3.9, 1.5))
            scores = study.columns[one.name]
            draw_histogram(figure.add_axes((0.115, 0.2, 0.87, 0.7)), scores[~np.isnan(scores)], PAGE)
            cards += f"<article class='card'><h3>{escape(one.name)}</h3>{svg(figure)}</article>"
    return section("Distributions", f"<div class='panels'>{cards}</div>" if cards else "")


def _correlation(study: Study) -> str:
    rows = []
    for a in study.columns:
        cells = []
        for value in (study.correlation[a, b] for b in study.columns):
            style = "" if math.isnan(value) else f" {sign_of(value)}' style='--strength:{abs(value):.2f}"
            cells.append(f"<span class='cell{style}'>{'–' if math.isnan(value) else f'{value:.2f}'}</span>")
        rows.append([escape(a), *cells])
    lead = "Spearman's rank correlation of all rewards and their parts, over all rollouts."
    return section("Correlation", table(["", *map(escape, study.columns)], rows, "matrix"), lead)


def _signs(study: Study) -> str:
    signs = list(study.rewards[0].signs)
    kinds = [kind for kind in RISE if any(kind in one.probes for one in study.rewards)]
    head = ["reward", *(f"follows {name}" for name in signs), *(f"probe: {kind}" for kind in kinds)]
    rows = []
    for one in study.rewards:
        cells = [(escape(one.name), bool(one.hacks)), *((interval(one.signs[name]), False) for name in signs)]
        cells += [(interval(one.probes.get(kind)), one.pays_for(kind)) for kind in kinds]
        rows.append([f"<span class='flag'>{text}</span>" if flagged else text for text, flagged in cells])
    lead = (
        "Left: the rank correlation of the score with a property of the answer, within groups. Right: "
        "how much the mean score changes when answers are changed: the thought or the answer written three times, the "
        "answer written three times, the prompt in place of the answer, the most frequent words in place of it. "
        "No change makes an answer better; a probe that surely raises the score is red."
    )
    return section("Signs of hacking", table(head, rows, "numbers signs"), lead)


def interval(value: Estimate | None, gap: str = "<small>") -> str:
    """Return a value and its interval, which is small in HTML."""
    if value is None:
        return "–"
    end = "</small>" if gap == "<small>" else ""
    return f"{value.value + 0.0:.2f}{gap}{value.low + 0.0:.2f} … {value.high + 0.0:.2f}{end}"


def _lost(study: Study) -> str:
    """List per reward the groups with equal scores."""
    first: dict[Hashable, Rollout] = {}
    for group, rollout in zip(study.rollouts.groups(), study.rollouts, strict=True):
        first.setdefault(group, rollout)
    blocks = ""
    for one in study.rewards:
        shown = [first[group] for group in list(one.lost)[:_LOST]]
        items = "".join(f"<li>{escape(r.sample.id)} (group {escape(r.group_id)})</li>" for r in shown)
        items += f"<li>{len(one.lost) - len(shown)} more</li>" * (len(one.lost) > len(shown))
        count = f"{len(one.lost)} of {one.groups}"
        blocks += f"<details><summary>{escape(one.name)}: {count}</summary><ul>{items}</ul></details>" if shown else ""
    return section("Groups without signal", blocks, "Groups whose answers all get the same score.")


def _disagreements(study: Study, players: Players) -> str:
    blocks = ""
    for first, second in study.pairs()[:_PAIRS]:
        indices = study.disagreements(first, second, _SHOWN)
        if indices:
            value = study.correlation[first, second]
            title = f"{first} and {second}: " + ("undefined" if math.isnan(value) else f"rank correlation {value:.2f}")
            cards = "".join(_card(study, i, (first, second), players) for i in indices)
            blocks += f"<div class='disagree'><h3>{escape(title)}</h3><div class='pairs'>{cards}</div></div>"
    lead = "The rollouts whose ranks under two rewards differ most. Pairs of rewards that agree least come first."
    return section("Disagreements", blocks, lead)


def _card(study: Study, i: int, pair: tuple[str, str], players: Players) -> str:
    rollout = study.rollouts[i]
    scores = {one.name: float(study.columns[one.name][i]) for one in study.rewards}
    line = "".join(chip(name, v, "total" if name in pair else "") for name, v in scores.items() if not math.isnan(v))
    row = rollout_row(rollout, 0, 0.0)
    if rollout.spoken_audio is not None:
        row["spoken_audio"] = {"path": rollout.spoken_audio.path}
    sample = row["sample"]
    if is_stream(sample):
        body = stream(sample, [Band(row, line, "response")], players)
    else:
        body = response(row, players, score=line)
    where = note(f"{study.rollouts.files[i]}, {rollout.name}")
    return f"<article class='card'>{where}{question(sample, players)}{body}</article>"

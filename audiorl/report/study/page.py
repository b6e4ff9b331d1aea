"""The page of a study: one HTML file with tables, distributions, and the rollouts on which rewards disagree."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from audiorl.data.rollout_rows import rollout_row
from audiorl.eval.metrics.corpus import Estimate
from audiorl.report.audio import Allowed, Players, allowed_audio
from audiorl.report.recordings import spoken_player
from audiorl.report.rollouts import question, timeline
from audiorl.report.run import Row
from audiorl.report.streams import Band, is_stream, stream
from audiorl.report.study.study import BINS, RISE, RewardStudy, Study
from audiorl.report.style import STREAM_SCRIPT, document
from audiorl.report.summary import show
from audiorl.report.text import chip, marked
from audiorl.types import Rollout

_PAIRS, _SHOWN, _LOST, _TEXT = 6, 4, 8, 2000
_WIDTH, _HEIGHT = 320, 90  # of a histogram
_STYLE = """
.signs td { white-space: nowrap; } .flag { color: var(--bad); font-weight: 600; } .disagree { margin-top: 24px; }
.matrix .cell { --tone: var(--muted); display: block; padding: 2px 6px; border-radius: 4px; text-align: center;
  background: color-mix(in srgb, var(--tone) calc(6% + 44% * var(--strength)), transparent); }
.matrix .plus { --tone: var(--good); } .matrix .minus { --tone: var(--bad); }
.histogram rect { fill: var(--line0); } .histogram text { fill: var(--muted); font: 11px var(--sans); }
"""


def write(study: Study, path: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """See `Study.write`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page(study, audio_root), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def page(study: Study, audio_root: Sequence[Path] = ()) -> str:
    """The page as text."""
    runs = list(dict.fromkeys(file.resolve().parent.parent for file in study.rollouts.files))
    players = Players(runs[0], allowed=_allowed(runs, audio_root))
    body = "".join(
        (_header(study), _rewards(study), _distributions(study), _correlation(study), _signs(study), _lost(study))
    )
    body += _disagreements(study, players)
    more = f" {players.skipped} more recordings are not embedded." if players.skipped else ""
    body += f"<footer>Written by audiorl rewards study.{more}</footer>"
    return document("Rewards on recorded rollouts", body, _STYLE, STREAM_SCRIPT if "class='stream'" in body else "")


def _allowed(runs: Iterable[Path], audio_root: Sequence[Path]) -> Allowed:
    """What the reports of all runs may embed."""
    folders: list[Path] = []
    manifests: list[Path] = []
    for run in runs:
        try:
            config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            config = {}  # rollouts without their run: the recordings in its folder remain
        allowed = allowed_audio(run, config.get("config") if isinstance(config, dict) else None, audio_root)
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
    notes = "".join(
        f"<p class='note'>{escape(one.name)}: {escape(text)}</p>" for one in study.rewards for text in one.notes
    )
    return (
        "<header><p class='over'>audiorl rewards study</p><h1>Rewards on recorded rollouts</h1>"
        f"<div class='hero alone'><div><p class='say'>{len(study.rewards)} rewards on {len(rollouts)} rollouts of "
        f"{groups} groups in {files} file(s){f', {labelled} with labels' if labelled else ''}.</p>{worse}{notes}"
        "</div></div></header>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr><th>{first}</th>{''.join(f'<td>{c}</td>' for c in rest)}</tr>" for first, *rest in rows)
    table = f"<table class='{kind}'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='card scroll-x'>{table}</div>"


def _rewards(study: Study) -> str:
    labelled = any(one.agreement for one in study.rewards)
    head = ["reward", "scored", "skipped", "mean", "std", "lowest", "highest", "at highest", "groups without signal"]
    head += ["labels: rank correlation", "labels: pairs in order"] if labelled else []
    rows = []
    for one in study.rewards:
        row = [
            escape(one.name),
            str(one.scored),
            str(one.skipped),
            *(show(float(v)) for v in (one.mean, one.std, one.low, one.high)),
            f"{one.at_high:.0%}" if one.scored else "–",
            f"{len(one.lost)} of {one.groups}",
        ]
        if labelled:
            agreement = one.agreement
            values = (agreement.spearman, agreement.pairwise) if agreement else (None, None)
            row += [interval(value) for value in values]
        rows.append(row)
    sub = (
        "<p class='sub'>A group whose scores are all equal has no group-relative advantage. Intervals are 95 % "
        "bootstrap intervals over groups.</p>"
    )
    return f"<section><h2>Rewards</h2>{sub}{_table(head, rows)}</section>"


def _distributions(study: Study) -> str:
    cards = "".join(
        f"<article class='card'><h3>{escape(one.name)}</h3>{histogram(study.columns[one.name])}</article>"
        for one in study.rewards
        if one.scored
    )
    return f"<section><h2>Distributions</h2><div class='panels'>{cards}</div></section>"


def histogram(values: np.ndarray) -> str:
    """An SVG of `BINS` bars, or of one bar for each value where there are fewer."""
    values = values[~np.isnan(values)]
    distinct, counts = np.unique(values, return_counts=True)
    low, high = float(distinct[0]), float(distinct[-1])
    if len(distinct) > BINS:
        counts, _ = np.histogram(values, BINS)
        places = (np.arange(BINS) + 0.5) / BINS
    else:
        places = (distinct - low) / (high - low) if high > low else np.array([0.5])
    width = _WIDTH * 0.9 / BINS
    bars = "".join(
        f"<rect x='{place * (_WIDTH - width):.1f}' y='{_HEIGHT * (1 - count / counts.max()):.1f}' width='{width:.1f}' "
        f"height='{_HEIGHT * count / counts.max():.1f}'><title>{count} rollouts</title></rect>"
        for place, count in zip(places, counts, strict=True)
    )
    ends = (
        f"<text x='0' y='{_HEIGHT + 14}'>{show(low)}</text>"
        f"<text x='{_WIDTH}' y='{_HEIGHT + 14}' text-anchor='end'>{show(high)}</text>"
    )
    return f"<svg class='histogram' viewBox='0 0 {_WIDTH} {_HEIGHT + 18}'>{bars}{ends}</svg>"


def _correlation(study: Study) -> str:
    names = list(study.columns)
    rows = [[escape(a), *(_cell(study.correlation[a, b]) for b in names)] for a in names]
    sub = "<p class='sub'>Spearman's rank correlation of all rewards and their parts, over all rollouts.</p>"
    table = _table(["", *map(escape, names)], rows, "matrix")
    return f"<section><h2>Correlation</h2>{sub}{table}</section>"


def _cell(value: float) -> str:
    if math.isnan(value):
        return "<span class='cell'>–</span>"
    sign = "plus" if value > 0 else "minus"
    return f"<span class='cell {sign}' style='--strength:{abs(value):.2f}'>{value:.2f}</span>"


def _signs(study: Study) -> str:
    signs = list(study.rewards[0].signs)
    kinds = [kind for kind in RISE if any(kind in one.probes for one in study.rewards)]
    head = ["reward", *(f"follows {name}" for name in signs), *(f"probe: {kind}" for kind in kinds)]
    rows = [
        [
            f"<span class='flag'>{escape(one.name)}</span>" if one.hacks else escape(one.name),
            *(interval(one.signs[name]) for name in signs),
            *(_probe(one, kind) for kind in kinds),
        ]
        for one in study.rewards
    ]
    sub = (
        "<p class='sub'>Left: the rank correlation of the score with a property of the answer, within groups. Right: "
        "how much the mean score changes when answers are changed: the thought or the answer written three times, the "
        "answer written three times, the prompt in place of the answer, the most frequent words in place of it. "
        "No change makes an answer better; a probe that surely raises the score is red.</p>"
    )
    return f"<section><h2>Signs of hacking</h2>{sub}{_table(head, rows, 'numbers signs')}</section>"


def _probe(one: RewardStudy, kind: str) -> str:
    change = one.probes.get(kind)
    text = interval(change)
    return f"<span class='flag'>{text}</span>" if change is not None and one.pays_for(kind) else text


def interval(value: Estimate | None) -> str:
    if value is None:
        return "–"
    return f"{value.value + 0.0:.2f}<small>{value.low + 0.0:.2f} … {value.high + 0.0:.2f}</small>"


def _lost(study: Study) -> str:
    """Per reward the groups with equal scores."""
    first: dict[Hashable, Rollout] = {}
    for group, rollout in zip(study.rollouts.groups(), study.rollouts, strict=True):
        first.setdefault(group, rollout)
    blocks = ""
    for one in study.rewards:
        shown = [first[group] for group in list(one.lost)[:_LOST]]
        items = "".join(f"<li>{escape(r.sample.id)} (group {escape(r.group_id)})</li>" for r in shown)
        more = len(one.lost) - len(shown)
        items += f"<li>{more} more</li>" if more else ""
        count = f"{len(one.lost)} of {one.groups}"
        blocks += f"<details><summary>{escape(one.name)}: {count}</summary><ul>{items}</ul></details>" if shown else ""
    sub = "<p class='sub'>Groups whose answers all get the same score.</p>"
    return f"<section><h2>Groups without signal</h2>{sub}{blocks}</section>" if blocks else ""


def _disagreements(study: Study, players: Players) -> str:
    blocks = ""
    for first, second in study.pairs()[:_PAIRS]:
        indices = study.disagreements(first, second, _SHOWN)
        if indices:
            value = study.correlation[first, second]
            title = f"{first} and {second}: " + ("undefined" if math.isnan(value) else f"rank correlation {value:.2f}")
            cards = "".join(_card(study, i, (first, second), players) for i in indices)
            blocks += f"<div class='disagree'><h3>{escape(title)}</h3><div class='pairs'>{cards}</div></div>"
    sub = (
        "<p class='sub'>The rollouts whose ranks under two rewards differ most. Pairs of rewards that agree least come "
        "first.</p>"
    )
    return f"<section><h2>Disagreements</h2>{sub}{blocks}</section>" if blocks else ""


def _card(study: Study, i: int, pair: tuple[str, str], players: Players) -> str:
    rollout = study.rollouts[i]
    scores = {one.name: float(study.columns[one.name][i]) for one in study.rewards}
    line = "".join(chip(name, v, "total" if name in pair else "") for name, v in scores.items() if not math.isnan(v))
    where = f"<p class='note'>{escape(str(study.rollouts.files[i]))}, {escape(rollout.name)}</p>"
    return f"<article class='card'>{where}{rollout_html(rollout, line, players)}</article>"


def rollout_html(rollout: Rollout, chips: str, players: Players) -> str:
    """Prompt, audio, answer and speech of a rollout; of a stream its timeline. `chips`: HTML of its scores."""
    row = _row(rollout)
    sample: Row = row["sample"]
    if is_stream(sample):
        return question(sample, players) + stream(sample, [Band(row, chips, "response")], players)
    cut = (
        f" <span class='note'>… {len(rollout.text) - _TEXT} more characters</span>" if len(rollout.text) > _TEXT else ""
    )
    written = marked(rollout.text[:_TEXT]) + cut or "<span class='note'>wrote nothing</span>"
    return (
        f"{question(sample, players)}<div class='response'><p class='written'>{written}</p>"
        f"{spoken_player(row, players)}{timeline(row['segments'])}<p class='chips'>{chips}</p></div>"
    )


def _row(rollout: Rollout) -> Row:
    """As a run records it, for the parts of the report."""
    row = rollout_row(rollout, 0, 0.0)
    if rollout.spoken_audio is not None:
        row["spoken_audio"] = {"path": rollout.spoken_audio.path}
    return row

"""Held-out results: bars with intervals, tables, and the answers that changed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from audiorl.report.audio import Players
from audiorl.report.figures import draw_bars, draw_tradeoff, svg
from audiorl.report.recordings import is_codec_copy, is_spoken
from audiorl.report.rollouts import question
from audiorl.report.run import Row, Run
from audiorl.report.streams import is_stream
from audiorl.report.summary import (
    EvaluationRow,
    changes,
    entry_names,
    headline,
    measures,
    metric_name,
    points,
    rows_of_entries,
)
from audiorl.report.text import marked
from audiorl.report.theme import PAGE

_EXAMPLES = 6


def bars(run: Run) -> str:
    """The chart next to the headline: bars, for interpreters quality against latency; empty without an evaluation."""
    if len(points(run.evals)) > 1:
        return tradeoff(run)
    evaluations = measures(run.evals)
    if not evaluations:
        return ""
    figure = Figure(figsize=(5.0, 0.45 + 0.52 * len(evaluations)), layout="constrained")  # room for long names
    draw_bars(figure.subplots(), evaluations, headline(run.evals) or "", PAGE)
    lines = "; lines are 95% intervals" if any(m.low is not None for m in evaluations) else ""
    metric = escape(metric_name(headline(run.evals) or ""))
    return f"<figure class='card bars'><h3>Held-out {metric}{lines}</h3>{svg(figure)}</figure>"


def tradeoff(run: Run) -> str:
    """Each evaluation as a point: how late it translated, and how well."""
    figure = Figure(figsize=(5.0, 3.3))
    draw_tradeoff(figure.add_axes((0.1, 0.13, 0.87, 0.84)), points(run.evals), PAGE)
    return (
        f"<figure class='card'><h3>Held-out quality against latency; up and left is better</h3>{svg(figure)}</figure>"
    )


def table(run: Run) -> str:
    """Every number of eval.json, overall and by task, one column per evaluation; what got worse is marked."""
    rows = rows_of_entries(run.evals)
    if not rows:
        return ""
    entries = entry_names(rows)
    compared = {"before", "after"} <= set(entries)
    head = ["", *entries, *(["after − before"] if compared else ())]
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(_table_row(row, entries, compared) for row in rows)
    marked = "<p class='note'>▼ is worse after training than before.</p>" if any(row.worse for row in rows) else ""
    return (
        "<section><h2>Held-out evaluation</h2><div class='card scroll-x'><table class='numbers'>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{marked}</div></section>"
    )


def _table_row(row: EvaluationRow, entries: Sequence[str], compared: bool) -> str:
    """The number of samples stands at the row's name when it is the same everywhere, else at each value."""
    shared = len(set(row.samples.values())) == 1 and len(row.samples) == len(row.values)
    cells = [escape(row.cell(e)) + ("" if shared else _samples(row.samples.get(e))) for e in entries]
    if compared:
        cells.append(("▼ " if row.worse else "") + escape(row.change_text()))
    heading = escape(row.label) + (_samples(next(iter(row.samples.values()))) if shared else "")
    kind = " ".join(name for name, holds in (("task", row.task), ("worse", row.worse)) if holds)
    values = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr class='{kind}'><th scope='row'>{heading}</th>{values}</tr>"


def _samples(n: int | None) -> str:
    return "" if n is None else f"<small>n = {n}</small>"


def changed(run: Run, players: Players) -> str:
    """Answers that went from wrong to right and from right to wrong, with the audio; empty without both files."""
    before, after = run.answers.get("before"), run.answers.get("after")
    if not before or not after or is_stream(after[0].get("sample")):
        return ""
    if is_spoken(after) or is_codec_copy(after):
        return ""
    pairs = changes(before, after)
    body = (
        f"<p class='sub'>Of {pairs.compared} examples answered before and after, <b>{len(pairs.fixed)}</b> went from "
        f"wrong to right and <b>{len(pairs.broken)}</b> from right to wrong (sign test: p = {pairs.p_value:.2g}).</p>"
    )
    for title, changed_answers in (("Wrong → right", pairs.fixed), ("Right → wrong", pairs.broken)):
        if changed_answers:
            shown = "".join(_pair(b, a, players) for b, a in changed_answers[:_EXAMPLES])
            more = len(changed_answers) - _EXAMPLES
            note = f"<p class='note'>{more} more in eval/after.jsonl</p>" if more > 0 else ""
            body += f"<h3>{title}</h3><div class='pairs'>{shown}</div>{note}"
    return f"<section><h2>Answers that changed</h2>{body}</section>"


def _pair(before: Row, after: Row, players: Players) -> str:
    def side(label: str, row: Row) -> str:
        mark = "right" if row.get("correct") else "wrong"
        text = marked(str(row.get("text") or "")) or "<span class='note'>wrote nothing</span>"
        return f"<div class='side {mark}'><span class='when'>{label}</span><p class='written'>{text}</p></div>"

    return (
        f"<article class='card'>{question(before, players)}"
        f"<div class='sides'>{side('before', before)}{side('after', after)}</div></article>"
    )

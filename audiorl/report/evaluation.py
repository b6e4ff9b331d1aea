"""Held-out results: bars with intervals, tables, and the answers that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from audiorl.report.audio import Players
from audiorl.report.copies import is_copy
from audiorl.report.figures import draw_bars, draw_tradeoff, svg
from audiorl.report.result import called, changes, headline, measures, points, show
from audiorl.report.rollouts import question
from audiorl.report.run import Row, Run
from audiorl.report.speech import is_speech
from audiorl.report.streams import is_stream
from audiorl.report.text import marked
from audiorl.report.theme import PAGE

_EXAMPLES = 6


def bars(run: Run) -> str:
    """The picture beside the headline; empty without an evaluation. For interpreters quality against latency."""
    if len(points(run.evals)) > 1:
        return tradeoff(run)
    found = measures(run.evals)
    if not found:
        return ""
    figure = Figure(figsize=(5.0, 0.45 + 0.52 * len(found)))
    draw_bars(figure.add_axes((0.17, 0.03, 0.81, 0.94)), found, headline(run.evals) or "", PAGE)
    lines = "; lines are 95% intervals" if any(m.low is not None for m in found) else ""
    metric = escape(called(headline(run.evals) or ""))
    return f"<figure class='card bars'><h3>Held-out {metric}{lines}</h3>{svg(figure)}</figure>"


def tradeoff(run: Run) -> str:
    """Each evaluation as a point: how late it translated, and how well."""
    figure = Figure(figsize=(5.0, 3.3))
    draw_tradeoff(figure.add_axes((0.1, 0.13, 0.87, 0.84)), points(run.evals), PAGE)
    return (
        f"<figure class='card'><h3>Held-out quality against latency; up and left is better</h3>{svg(figure)}</figure>"
    )


def tables(run: Run) -> str:
    """Accuracy by task and every other number of eval.json, one column per evaluation."""
    entries = {name: e for name, e in run.evals.items() if isinstance(e, Mapping)}
    tasks = list(dict.fromkeys(t for e in entries.values() for t in e.get("by_task") or {}))
    metrics = list(dict.fromkeys(k for e in entries.values() for k, v in e.items() if isinstance(v, int | float)))
    body = ""
    if tasks:
        rows = [_task_row(task, list(entries.values())) for task in tasks]
        body += _table(["task", *entries], rows, "By task")
    others = [m for m in metrics if m not in ("low", "high")]
    if others:
        rows = [
            [escape(called(m))] + [escape(show(e[m], m)) if m in e else "–" for e in entries.values()] for m in others
        ]
        body += _table(["number", *entries], rows, "All numbers")
    return f"<section><h2>Held-out evaluation</h2><div class='tables'>{body}</div></section>" if body else ""


def changed(run: Run, players: Players) -> str:
    """Answers that went from wrong to right and from right to wrong, with the audio; empty without both files."""
    before, after = run.answers.get("before"), run.answers.get("after")
    if not before or not after or is_stream(after[0].get("sample")):
        return ""
    if is_speech(after) or is_copy(after):
        return ""
    found = changes(before, after)
    body = (
        f"<p class='sub'>Of {found.compared} examples answered before and after, <b>{len(found.fixed)}</b> went from "
        f"wrong to right and <b>{len(found.broken)}</b> from right to wrong (sign test: p = {found.p_value:.2g}).</p>"
    )
    for title, pairs in (("Wrong → right", found.fixed), ("Right → wrong", found.broken)):
        if pairs:
            shown = "".join(_pair(b, a, players) for b, a in pairs[:_EXAMPLES])
            left = len(pairs) - _EXAMPLES
            note = f"<p class='note'>{left} more in eval/after.jsonl</p>" if left > 0 else ""
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


def _task_row(task: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracies of one task; its n beside the name when it is the same everywhere, else beside each accuracy."""
    cells = [(e.get("by_task") or {}).get(task) or {} for e in entries]
    sizes = {c.get("n") for c in cells if c}
    shared = len(sizes) == 1 and sizes != {None}
    row = [escape(task) + (_n(sizes.pop()) if shared else "")]
    for c in cells:
        row.append((show(c.get("accuracy", "–"), "accuracy") + ("" if shared else _n(c.get("n")))) if c else "–")
    return row


def _n(n: Any) -> str:
    return "" if n is None else f"<small>n = {escape(str(n))}</small>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> str:
    """The cells of `rows` are HTML already."""
    top = "".join(f"<th>{escape(str(h))}</th>" for h in head)
    body = "".join(f"<tr><th>{r[0]}</th>" + "".join(f"<td>{c}</td>" for c in r[1:]) + "</tr>" for r in rows)
    return (
        f"<div class='card'><h3>{title}</h3><table class='numbers'><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )

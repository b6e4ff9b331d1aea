"""The curves of a run as small multiples, each with its legend in HTML."""

from __future__ import annotations

from html import escape

from matplotlib.figure import Figure

from audiorl.report.figures import draw_lines, svg
from audiorl.report.panels import Panel, arrange, short
from audiorl.report.run import Run
from audiorl.report.series import Series, is_control, names, offsets, series
from audiorl.report.summary import show
from audiorl.report.theme import PAGE


def curves(run: Run) -> str:
    """The section; empty when nothing was recorded."""
    main, more = arrange(names(run.metrics))
    if not main and not more:
        return ""
    body = f'<div class="panels">{"".join(_panel(run, p) for p in main)}</div>'
    if more:
        rest = "".join(_panel(run, p) for p in more)
        body += f'<details><summary>{len(more)} more curves</summary><div class="panels">{rest}</div></details>'
    return f"<section><h2>Curves</h2><p class='sub'>{_explain(run)}</p>{body}</section>"


def _panel(run: Run, panel: Panel) -> str:
    lines = [s for s in (series(run.metrics, name) for name in panel.names) if s]
    if not lines:  # a metric that was never finite
        return f'<figure class="card"><h3>{escape(panel.title)}</h3><p class="note">never a finite value</p></figure>'
    figure = Figure(figsize=(3.9, 2.2))
    ax = figure.add_axes((0.115, 0.17, 0.87, 0.755))
    draw_lines(ax, lines, offsets(run.metrics), PAGE, style=panel.style)
    return (
        f'<figure class="card"><h3>{escape(panel.title)}</h3>'
        f'<div class="legend">{_legend(lines, panel)}</div>{svg(figure)}</figure>'
    )


def _legend(lines: list[list[Series]], panel: Panel) -> str:
    """Name and end of each line. A control has a key of its own."""
    keys = []
    for place, phases in enumerate(lines):
        main = [one for one in phases if not is_control(one.phase)]
        for one in main[-1:] + [one for one in phases if is_control(one.phase)]:
            control = is_control(one.phase)
            tint = "var(--control)" if control else f"var(--line{place % 8})"
            name = short(one.name, panel) if len(lines) > 1 else "at the end"
            if control:
                name = f"{name}, {one.phase}" if len(lines) > 1 else one.phase
            value = show(one.end if panel.style == "average" else one.y[-1], one.name)
            keys.append(f'<span><i style="background:{tint}"></i>{escape(name)} <b>{value}</b></span>')
    return "".join(keys)


def _explain(run: Run) -> str:
    phases = list(offsets(run.metrics))
    text = "Faint: each step. Strong: moving average. Points: measured on held-out examples."
    if any(is_control(p) for p in phases):
        text += " Dashed: the control, from the point where it branches off."
    return text

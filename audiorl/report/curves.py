"""The curves of a run: metrics.jsonl as small line charts, each with its legend in HTML.

`arrange` says which metrics share a chart. Every recorded metric is in exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape

from matplotlib.figure import Figure

from audiorl.report.figures import Style, draw_lines, svg
from audiorl.report.run import Run
from audiorl.report.series import Series, is_control, names, offsets, series
from audiorl.report.summary import numbers, show
from audiorl.report.theme import PAGE

Rule = tuple[str, tuple[str, ...], Style]


@dataclass(frozen=True)
class Panel:
    """A small picture of a few metrics on one axis."""

    title: str
    names: tuple[str, ...]
    style: Style = "average"


# (title, patterns, style): the first rule that matches a name takes it.
_MAIN: tuple[Rule, ...] = (
    ("Reward", ("reward/mean",), "average"),
    ("Held-out accuracy", ("eval/accuracy",), "points"),
    ("Held-out chrF", ("eval/chrf",), "points"),
    ("Held-out mel distance", ("eval/mel_distance",), "points"),
    ("Mel loss", ("loss/mel",), "average"),
    ("Codes in use (perplexity)", ("codebook/perplexity",), "average"),
    ("Held-out latency (s)", ("eval/laal", "eval/stream_laal"), "points"),
    ("Reward parts", ("reward/*",), "average"),
    ("Pairs put in the right order", ("preference/accuracy", "reward_model/accuracy"), "average"),
    ("Steps judged right", ("process_reward/accuracy",), "average"),
    ("Margin between the answers", ("preference/margin", "reward_model/margin"), "average"),
    ("Log-prob of the answers", ("preference/*_logprob",), "average"),
    ("Variance explained by the critic", ("critic/explained_variance",), "average"),
    ("KL to the reference", ("kl",), "average"),
    ("Entropy", ("policy/entropy", "entropy"), "average"),
    ("Response length (tokens)", ("response/length",), "average"),
    ("Clip fraction", ("policy/clip_frac", "*/clip_frac"), "average"),
    ("Throughput (tokens/s)", ("tokens_per_s", "*/tokens_per_s"), "average"),
)
_MORE: tuple[Rule, ...] = (
    ("Spread of the reward", ("reward/std", "reward/min", "reward/max"), "average"),
    ("Held-out, other", ("eval/*",), "points"),
    ("KL coefficient", ("kl/beta",), "exact"),
    ("Groups dropped, refilled, trained", ("group/dropped", "group/refilled", "group/trained"), "average"),
    ("Loss", ("loss", "*/loss"), "average"),
    ("Learning rate", ("lr", "lr/*", "critic/lr"), "exact"),
    ("Seconds per step", ("time/*",), "average"),
)


def arrange(names: Sequence[str]) -> tuple[list[Panel], list[Panel]]:
    """(the panels to look at first, the rest), each in a fixed order; a name without a rule gets a panel of its own."""
    named_in_more = {name for name in names if any(name in patterns for _, patterns, _ in _MORE)}
    remaining = list(names)

    def panels_of(rules: tuple[Rule, ...], skip: set[str]) -> list[Panel]:
        panels = []
        for title, patterns, style in rules:
            matching = [n for n in remaining if n not in skip and any(fnmatchcase(n, p) for p in patterns)]
            if matching:
                panels.append(Panel(title, tuple(matching), style))
                remaining[:] = [n for n in remaining if n not in matching]
        return panels

    main = panels_of(_MAIN, named_in_more)
    more = panels_of(_MORE, set())
    return main, more + [Panel(name, (name,)) for name in remaining]


def curves(run: Run) -> str:
    """The section; empty when nothing was recorded."""
    main, more = arrange(names(run.metrics))
    if not main and not more:
        return ""
    body = f'<div class="panels">{"".join(_panel(run, p) for p in main)}</div>'
    if more:
        rest = "".join(_panel(run, p) for p in more)
        title = f"{len(more)} more chart{'s' * (len(more) > 1)}"
        body += f'<details><summary>{title}</summary><div class="panels">{rest}</div></details>'
    return f"<section><h2>Curves</h2><p class='sub'>{_how_to_read(run)}</p>{body}</section>"


def _panel(run: Run, panel: Panel) -> str:
    lines = [s for s in (series(run.metrics, name) for name in panel.names) if s]
    if not lines:  # a metric that was never finite
        return f'<figure class="card"><h3>{escape(panel.title)}</h3><p class="note">never a finite value</p></figure>'
    figure = Figure(figsize=(3.9, 2.2))
    ax = figure.add_axes((0.115, 0.17, 0.87, 0.755))
    draw_lines(ax, lines, offsets(run.metrics), PAGE, style=panel.style)
    return (
        f'<figure class="card"><h3>{escape(panel.title)}</h3>'
        f'<div class="legend">{_legend(run, lines, panel)}</div>{svg(figure)}</figure>'
    )


def _legend(run: Run, lines: Sequence[Sequence[Series]], panel: Panel) -> str:
    """One key per line, and one per control: its colour, its name and where it ended."""
    keys = []
    for place, phases in enumerate(lines):
        main = [one for one in phases if not is_control(one.phase)]
        for one in main[-1:] + [one for one in phases if is_control(one.phase)]:
            control = is_control(one.phase)
            colour = "var(--control)" if control else f"var(--line{place % 8})"
            name = ", ".join([_short(one.name, panel)] * (len(lines) > 1) + [one.phase] * control)
            keys.append(f'<span><i style="background:{colour}"></i>{_end(run, one, panel.style, name)}</span>')
    return "".join(keys)


def _end(run: Run, one: Series, style: Style, name: str) -> str:
    """Name and end of a line. A held-out metric ends with the final evaluation, which is not the last probe."""
    prefix = f"{escape(name)} " if name else ""
    if not one.name.startswith("eval/"):
        return f"{prefix or 'at the end '}<b>{show(one.end if style == 'average' else one.y[-1], one.name)}</b>"
    last_probe = show(one.y[-1], one.name)
    final = numbers(run.evals.get("control" if is_control(one.phase) else "after") or {})
    metric = one.name.removeprefix("eval/")
    if metric not in final:
        return f"{prefix}last probe <b>{last_probe}</b>"
    return f"{prefix}final evaluation <b>{show(final[metric], metric)}</b> (last probe {last_probe})"


def _short(name: str, panel: Panel) -> str:
    """The name without the group that all names of its panel share: ``reward/format`` is ``format``."""
    groups = {n.partition("/")[0] for n in panel.names}
    return name.partition("/")[2] if len(groups) == 1 and "/" in name else name


def _how_to_read(run: Run) -> str:
    phases = list(offsets(run.metrics))
    text = "Faint: each step. Strong: moving average. Points: probes on held-out samples during training."
    if any(is_control(p) for p in phases):
        text += " Dashed: the control, from the point where it branches off."
    return text

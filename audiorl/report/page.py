"""The whole page of a run: header, evaluation, curves, examples, settings, in one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from audiorl.report import charts, rollouts, summary
from audiorl.report.audio import CONTOUR_NOTE, Players, allowed_audio
from audiorl.report.charts import LineStyle, Series
from audiorl.report.kit import document, more, note, section, write_page
from audiorl.report.rollouts import Kind, Side
from audiorl.report.run import RunContents, checked_rows, load_run
from audiorl.report.streams import STREAM_LEAD, Band, stream
from audiorl.report.summary import Row, show

_CHANGED = 6
_GROUPS, _MEMBERS = 6, 8  # of the first and the last step
_GROUPS_BETWEEN, _MEMBERS_BETWEEN = 3, 4  # of the other steps
_BYTES = 4_000_000  # of HTML of rollouts, audio not counted


def write(run_dir: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """See `audiorl.report.write_report`."""
    run = load_run(run_dir)
    return write_page(run.path / "report.html", page(run, audio_root))


def page(run: RunContents, audio_root: Sequence[Path] = ()) -> str:
    """Return the page as text."""
    players = Players(run.path, allowed=allowed_audio(run.path, run.config.get("config"), audio_root))
    body = _header(run) + _evaluations(run) + _curves(run) + _examples(run, players) + _rollouts(run, players)
    sound = f"{players.embedded} audio players, {players.bytes_used / 1e6:.1f} MB of sound"
    skipped = f"; {players.skipped} more clips were left out to keep the page small" if players.skipped else ""
    footer = f"<footer>Written by audiorl. {sound}{skipped}.</footer>"
    return document(f"{run.recipe} · {run.name}", f"{body}{_settings(run)}{footer}")


# -- header and settings -----------------------------------------------------------------------------------------------


def _header(run: RunContents) -> str:
    picture = _picture(run)
    warnings = [*filter(None, [summary.worse_tasks(run.evals)]), *summary.disagreements(run.evals, run.metrics)]
    worse = "".join(f"<p class='worse'>▼ {escape(text)}</p>" for text in warnings)
    items = "".join(f"<li>{escape(text)}</li>" for text in (*run.missing, *summary.not_measured(run.evals)))
    missing = f"<div class='missing'><b>Not in this report</b><ul>{items}</ul></div>" if items else ""
    said = escape(summary.sentence(run.evals))
    return (
        f"<header><p class='over'>audiorl run · {escape(run.name)}</p><h1>{escape(run.recipe)}</h1>"
        f"<div class='hero{'' if picture else ' alone'}'><div><p class='say'>{said}</p>{worse}"
        f"<p class='facts-line'>{_facts(run)}</p></div>{picture}</div>{missing}</header>"
    )


def _picture(run: RunContents) -> str:
    """Draw the chart next to the headline: bars, for interpreters quality and latency; "" without an evaluation."""
    places, evaluations = summary.points(run.evals), summary.measures(run.evals)
    if len(places) > 1:
        figure = Figure(figsize=(5.0, 3.3))
        charts.draw_tradeoff(figure.add_axes((0.1, 0.13, 0.87, 0.84)), places, charts.PAGE)
        title = "Held-out quality against latency; up and left is better"
        return f"<figure class='card'><h3>{title}</h3>{charts.svg(figure)}</figure>"
    if not evaluations:
        return ""
    metric = summary.headline(run.evals) or ""
    figure = Figure(figsize=(5.0, 0.45 + 0.52 * len(evaluations)), layout="constrained")  # room for long names
    charts.draw_bars(figure.subplots(), evaluations, metric, charts.PAGE)
    lines = "; lines are 95% intervals" if any(m.low is not None for m in evaluations) else ""
    title = f"Held-out {escape(summary.metric_name(metric))}{lines}"
    return f"<figure class='card bars'><h3>{title}</h3>{charts.svg(figure)}</figure>"


def _facts(run: RunContents) -> str:
    """Steps of each phase, the length of the run, and where the numbers that people ask for first ended."""
    facts = []
    for phase in charts.offsets(run.metrics):
        of_phase = [r.get("step") for r in run.metrics if r.get("phase", "") == phase]
        facts.append((phase or "steps", f"{max(s for s in of_phase if isinstance(s, int | float)):.0f} steps"))
    if times := [r["time"] for r in run.metrics if isinstance(r.get("time"), int | float)]:
        minutes, seconds = divmod(round(max(times)), 60)
        short = f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
        facts.append(("time", f"{minutes // 60} h {minutes % 60:02d} min" if minutes > 59 else short))
    for label, name in (("reward", "reward/mean"), ("KL", "kl"), ("tokens/s", "tokens_per_s")):
        if ends := [s for s in charts.series(run.metrics, name) if not charts.is_control(s.phase)]:
            facts.append((label, show(ends[-1].end)))
    return "".join(f"<span>{escape(label)} <b>{escape(value)}</b></span>" for label, value in facts)


def _settings(run: RunContents) -> str:
    """Show the command that repeats the run, its resolved configuration, and the versions it ran with."""
    body = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    for title, values in (("Resolved configuration", "config"), ("Versions", "versions")):
        if settings := run.config.get(values):
            rows = "".join(f"<div><span>{escape(k)}</span><b>{escape(v)}</b></div>" for k, v in _flat(settings))
            body += f"<details><summary>{title}</summary><div class='settings'>{rows}</div></details>"
    return section("Settings", body)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names, the way the command line overrides them."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- evaluations -------------------------------------------------------------------------------------------------------


def _evaluations(run: RunContents) -> str:
    """Return every number of eval.json, overall and by task, one column per evaluation; what got worse is marked."""
    rows = summary.rows_of_entries(run.evals)
    entries, body = summary.entry_names(rows), ""
    compared = {"before", "after"} <= set(entries)
    for row in rows:
        # The number of samples stands at the name when it is the same everywhere, else at each value.
        samples = {name: f"<small>n = {n}</small>" for name, n in row.samples.items()}
        shared = len(set(samples.values())) == 1 and len(samples) == len(row.values)
        cells = [escape(row.cell(e)) + ("" if shared else samples.get(e, "")) for e in entries]
        cells += [("▼ " if row.worse else "") + escape(row.change_text())] if compared else []
        heading = escape(row.label) + (next(iter(samples.values())) if shared else "")
        kind = " ".join(name for name, holds in (("task", row.task), ("worse", row.worse)) if holds)
        body += f"<tr class='{kind}'><th scope='row'>{heading}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in ("", *entries, *["after − before"] * compared))
    legend = note("▼ is worse after training than before.") if any(row.worse for row in rows) else ""
    table = f"<table class='numbers'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return section("Held-out evaluation", f"<div class='card scroll-x'>{table}{legend}</div>")


# -- curves ------------------------------------------------------------------------------------------------------------

Rule = tuple[str, tuple[str, ...], LineStyle]
"""(title, patterns, style): the first rule that matches a name takes it."""
_MAIN: tuple[Rule, ...] = (
    ("Reward", ("reward/mean",), "average"),
    ("Held-out accuracy", ("eval/accuracy",), "points"),
    ("Held-out error rate", ("eval/wer", "eval/cer", "eval/*/wer", "eval/*/cer"), "points"),
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


@dataclass(frozen=True)
class Panel:
    """A small picture of a few metrics on one axis."""

    title: str
    names: tuple[str, ...]
    style: LineStyle = "average"


def arrange(names: Sequence[str]) -> tuple[list[Panel], list[Panel]]:
    """Return (the panels to look at first, the rest), each in a fixed order. Every metric is in exactly one; a name
    without a rule gets a panel of its own."""
    remaining = list(names)
    later = {name for name in names if any(name in patterns for _, patterns, _ in _MORE)}
    groups: tuple[list[Panel], list[Panel]] = ([], [])
    for panels, rules, skip in zip(groups, (_MAIN, _MORE), (later, ()), strict=True):
        for title, patterns, style in rules:
            matching = [n for n in remaining if n not in skip and any(fnmatchcase(n, p) for p in patterns)]
            if matching:
                panels.append(Panel(title, tuple(matching), style))
                remaining = [n for n in remaining if n not in matching]
    return groups[0], groups[1] + [Panel(name, (name,)) for name in remaining]


def _curves(run: RunContents) -> str:
    main, rest = ([_panel(run, panel) for panel in panels] for panels in arrange(charts.metric_names(run.metrics)))
    body = f'<div class="panels">{"".join(main)}</div>' if main or rest else ""
    if rest:
        title = f"{len(rest)} more chart{'s' * (len(rest) > 1)}"
        body += f'<details><summary>{title}</summary><div class="panels">{"".join(rest)}</div></details>'
    lead = "Faint: each step. Strong: moving average. Points: probes on held-out samples during training."
    if any(charts.is_control(phase) for phase in charts.offsets(run.metrics)):
        lead += " Dashed: the control, from the point where it branches off."
    return section("Curves", body, lead)


def _panel(run: RunContents, panel: Panel) -> str:
    title = f"<h3>{escape(panel.title)}</h3>"
    lines = [s for s in (charts.series(run.metrics, name) for name in panel.names) if s]
    if not lines:  # a metric that was never finite
        return f'<figure class="card">{title}{note("never a finite value")}</figure>'
    figure = Figure(figsize=(3.9, 2.2))
    charts.draw_lines(
        figure.add_axes((0.115, 0.17, 0.87, 0.755)), lines, charts.offsets(run.metrics), charts.PAGE, panel.style
    )
    # One key per line, and one per control: its colour, its name and where it ended. Where all names of the panel share
    # a group it is left out: ``reward/format`` is ``format``.
    keys, groups = "", {n.partition("/")[0] for n in panel.names}
    for place, phases in enumerate(lines):
        main = [one for one in phases if not charts.is_control(one.phase)]
        for one in main[-1:] + [one for one in phases if charts.is_control(one.phase)]:
            control = charts.is_control(one.phase)
            colour = "var(--control)" if control else f"var(--line{place % 8})"
            short = one.name.partition("/")[2] if len(groups) == 1 and "/" in one.name else one.name
            name = escape(", ".join([short] * (len(lines) > 1) + [one.phase] * control))
            keys += f'<span><i style="background:{colour}"></i>{_end(run, one, panel.style, name)}</span>'
    return f'<figure class="card">{title}<div class="legend">{keys}</div>{charts.svg(figure)}</figure>'


def _end(run: RunContents, one: Series, style: LineStyle, name: str) -> str:
    """Name and end of a line. A held-out metric ends with the final evaluation, which is not the last probe."""
    prefix, last = f"{name} " if name else "", show(one.y[-1], one.name)
    if not one.name.startswith("eval/"):
        return f"{prefix or 'at the end '}<b>{show(one.end, one.name) if style == 'average' else last}</b>"
    final = summary.numbers(run.evals.get("control" if charts.is_control(one.phase) else "after") or {})
    metric = one.name.removeprefix("eval/")
    if metric not in final:
        return f"{prefix}last probe <b>{last}</b>"
    return f"{prefix}final evaluation <b>{show(final[metric], metric)}</b> (last probe {last})"


# -- held-out examples -------------------------------------------------------------------------------------------------

_EXAMPLES: dict[Kind, tuple[str, str, int]] = {
    "spoken": (
        "Spoken texts",
        "The same held-out texts as each evaluation spoke them, with what the recogniser understood. Texts whose "
        f"character error rate (CER) changed the most come first. {CONTOUR_NOTE}",
        8,
    ),
    "codec": ("Through the codec", "Held-out recordings, and the same after encoding and decoding.", 8),
    "stream": ("Held-out streams", STREAM_LEAD, 4),
}
"""By kind: title, lead, and how many are shown."""


def _examples(run: RunContents, players: Players) -> str:
    """Held-out examples as each evaluation has them."""
    kinds: dict[Kind, dict[str, dict[Any, Row]]] = {}
    for name, rows in run.answers.items():
        if rows:
            by_id = {(row.get("sample") or row).get("id"): row for row in rows}
            kinds.setdefault(rollouts.kind_of(rows[0]), {})[name] = by_id
    answers = kinds.get("text", {})
    body = (
        _changed_answers(answers["before"], answers["after"], players) if {"before", "after"} <= answers.keys() else ""
    )
    for kind, (title, lead, limit) in _EXAMPLES.items():
        held = kinds.get(kind, {})
        ids = list(dict.fromkeys(id for rows in held.values() for id in rows))
        if kind == "spoken" and held:
            ends = (
                ("before", "after") if {"before", "after"} <= held.keys() else (next(iter(held)), next(reversed(held)))
            )
            change = {
                id: abs(float(held[ends[0]][id].get("cer") or 0.0) - float(held[ends[1]][id].get("cer") or 0.0))
                for id in held[ends[1]]
                if id in held[ends[0]]
            }
            ids = sorted(change, key=lambda id: -change[id])
        elif kind == "codec" and held:
            ids = [id for id, row in next(reversed(held.values())).items() if row.get("decoded")]
        cards = ""
        for id in ids[:limit]:
            cards += rollouts.example_card(
                [(name, rows[id], players) for name, rows in held.items() if id in rows], kind
            )
        body += section(title, cards + more(len(ids) - limit, "in eval/"), lead)
    return body


def changed_pairs(before: Mapping[Any, Row], after: Mapping[Any, Row]) -> tuple[list[tuple[Row, Row]], ...]:
    """Pair answers by sample id; return those that went from wrong to right, from right to wrong, and all pairs."""
    pairs = [(row, after[id]) for id, row in before.items() if id in after]
    fixed = [(b, a) for b, a in pairs if not b.get("correct") and a.get("correct")]
    broken = [(b, a) for b, a in pairs if b.get("correct") and not a.get("correct")]
    return fixed, broken, pairs


def _changed_answers(before: Mapping[Any, Row], after: Mapping[Any, Row], players: Players) -> str:
    fixed, broken, pairs = changed_pairs(before, after)
    lead = (
        f"Of {len(pairs)} examples answered before and after, <b>{len(fixed)}</b> went from wrong to right and "
        f"<b>{len(broken)}</b> from right to wrong (sign test: p = {summary.sign_test(len(fixed), len(broken)):.2g})."
    )
    body = f"<p class='sub'>{lead}</p>"
    for title, changed in (("Wrong → right", fixed), ("Right → wrong", broken)):
        cards = ""
        for pair in changed[:_CHANGED]:
            sides: list[Side] = [(name, row, players) for name, row in zip(("before", "after"), pair, strict=True)]
            cards += rollouts.example_card(sides, "text")
        if cards:
            rest = more(len(changed) - _CHANGED, "in eval/after.jsonl")
            body += f"<h3>{title}</h3><div class='pairs'>{cards}</div>{rest}"
    return section("Answers that changed", body)


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _rollouts(run: RunContents, players: Players) -> str:
    """Recorded steps with a selector; "" when none were recorded.

    The last step and the first come first, then the middle of every gap, until the section holds `_BYTES`: a long run
    is thinned out evenly. The page says how many steps were left out.
    """
    steps: dict[int, str] = {}
    size, files = 0, run.rollout_files
    order, gaps = [len(files) - 1, 0][: len(files)], [(0, len(files) - 1)]
    for low, high in gaps:  # grows while it is read
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    for place in order:
        if size > _BYTES:
            break
        number, file = files[place]
        if rows := checked_rows(file):
            ends = place in (0, len(files) - 1)
            groups, members = (_GROUPS, _MEMBERS) if ends else (_GROUPS_BETWEEN, _MEMBERS_BETWEEN)
            before = players.bytes_used
            steps[number] = _step(f"rollouts/{file.name}", rows, groups, members, players)
            size += len(steps[number]) - (players.bytes_used - before)
    if not steps:
        return ""
    shown = sorted(steps)
    body = _selector(shown) if len(shown) > 1 else f"<h3>Step {shown[0]}</h3>"
    body += more(len(files) - len(shown), "recorded steps are left out to keep the page small: rollouts/step_*.jsonl")
    for number in shown:
        hidden = "" if number == shown[-1] else " hidden"
        body += f"<div class='step' data-step='{number}'{hidden}>{steps[number]}</div>"
    lead = (
        "Each card is one prompt with its group of sampled responses, best first. Chips are reward parts; the "
        "advantage compares a response with its group."
    )
    return section("Rollouts", body, lead).replace("<section>", "<section class='rollouts'>", 1)


def _selector(steps: Sequence[int]) -> str:
    options = "".join(f"<option value='{n}'{' selected' if n == steps[-1] else ''}>{n}</option>" for n in steps)
    return (
        "<p class='chooser'><button type='button' data-move='-1' aria-label='previous recorded step'>◀</button>"
        f"<label>Step <select>{options}</select></label>"
        "<button type='button' data-move='1' aria-label='next recorded step'>▶</button>"
        f"<span class='note'>{len(steps)} recorded steps, {steps[0]} to {steps[-1]}</span></p>"
        "<noscript><style>.step[hidden] { display: block; }</style></noscript>"
    )


def _step(file: str, rows: Sequence[Row], groups: int, members: int, players: Players) -> str:
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(str(row.get("group_id", "")), []).append(row)
    cards = ""
    for group in list(by_group.values())[:groups]:
        shown = sorted(group, key=lambda row: -rollouts.total(row))[:members]
        sample = group[0].get("sample") or {}
        if rollouts.is_stream(sample):
            ends = (shown[0], shown[-1])
            bands = [Band(r, rollouts.score_chips(r), f"response {r.get('index', '')}", r in ends) for r in shown]
            body = stream(sample, bands, players)
        else:
            body = "".join(rollouts.response(row, players) for row in shown)
        rest = more(len(group) - members, f"responses in {file}")
        cards += f"<article class='card'>{rollouts.question(sample, players)}{body}{rest}</article>"
    return cards + more(len(by_group) - groups, f"prompts in {file}")

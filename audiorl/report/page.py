"""The whole page of a run: header, evaluation, curves, examples, settings, in one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from audiorl.report.audio import CONTOUR_NOTE, Players, allowed_audio
from audiorl.report.charts import (
    PAGE,
    LineStyle,
    Series,
    draw_bars,
    draw_lines,
    draw_tradeoff,
    is_control,
    metric_names,
    offsets,
    series,
    svg,
)
from audiorl.report.kit import NOTHING, chips, document, marked, more, note, section, write_page
from audiorl.report.rollouts import (
    codec_side,
    is_codec_copy,
    is_spoken,
    is_stream,
    parts,
    question,
    reference_player,
    response,
    score_chips,
    spoken_side,
    total,
)
from audiorl.report.run import RunContents, load_run
from audiorl.report.streams import STREAM_LEAD, Band, stream
from audiorl.report.summary import (
    EvaluationRow,
    Row,
    disagreements,
    entry_names,
    headline,
    measures,
    metric_name,
    not_measured,
    numbers,
    points,
    rows_of_entries,
    sentence,
    show,
    sign_test,
    worse_tasks,
)

_EXAMPLES, _RECORDINGS, _STREAMS = 6, 8, 4
_GROUPS, _MEMBERS = 6, 8  # of the first and the last step
_GROUPS_BETWEEN, _MEMBERS_BETWEEN = 3, 4  # of the other steps
_BYTES = 4_000_000  # of HTML of rollouts, audio not counted

Side = Callable[[str, Row, Players], str]
"""(evaluation name, row, players) -> HTML."""


def write(run_dir: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """See `audiorl.report.write_report`."""
    run = load_run(run_dir)
    return write_page(run.path / "report.html", page(run, audio_root))


def page(run: RunContents, audio_root: Sequence[Path] = ()) -> str:
    """Return the page as text."""
    players = Players(run.path, allowed=allowed_audio(run.path, run.config.get("config"), audio_root))
    sections = (
        _header(run),
        _evaluations(run),
        _curves(run),
        _changed_answers(run, players),
        _spoken_texts(run, players),
        _codec_copies(run, players),
        _held_out_streams(run, players),
        _rollouts(run, players),
        _settings(run),
    )
    body = "".join(sections)
    sound = f"{players.embedded} audio players, {players.bytes_used / 1e6:.1f} MB of sound"
    skipped = f"; {players.skipped} more clips were left out to keep the page small" if players.skipped else ""
    return document(f"{run.recipe} · {run.name}", f"{body}<footer>Written by audiorl. {sound}{skipped}.</footer>")


# -- header and settings -----------------------------------------------------------------------------------------------


def _header(run: RunContents) -> str:
    picture = _picture(run)
    warnings = [*filter(None, [worse_tasks(run.evals)]), *disagreements(run.evals, run.metrics)]
    worse = "".join(f"<p class='worse'>▼ {escape(text)}</p>" for text in warnings)
    items = "".join(f"<li>{escape(text)}</li>" for text in (*run.missing, *not_measured(run.evals)))
    missing = f"<div class='missing'><b>Not in this report</b><ul>{items}</ul></div>" if items else ""
    return (
        f"<header><p class='over'>audiorl run · {escape(run.name)}</p><h1>{escape(run.recipe)}</h1>"
        f"<div class='hero{'' if picture else ' alone'}'><div><p class='say'>{escape(sentence(run.evals))}</p>{worse}"
        f"<p class='facts-line'>{_facts(run)}</p></div>{picture}</div>{missing}</header>"
    )


def _picture(run: RunContents) -> str:
    """Draw the chart next to the headline: bars, for interpreters quality and latency; "" without an evaluation."""
    places, evaluations = points(run.evals), measures(run.evals)
    if len(places) > 1:
        figure = Figure(figsize=(5.0, 3.3))
        draw_tradeoff(figure.add_axes((0.1, 0.13, 0.87, 0.84)), places, PAGE)
        title = "Held-out quality against latency; up and left is better"
        return f"<figure class='card'><h3>{title}</h3>{svg(figure)}</figure>"
    if not evaluations:
        return ""
    metric = headline(run.evals) or ""
    figure = Figure(figsize=(5.0, 0.45 + 0.52 * len(evaluations)), layout="constrained")  # room for long names
    draw_bars(figure.subplots(), evaluations, metric, PAGE)
    lines = "; lines are 95% intervals" if any(m.low is not None for m in evaluations) else ""
    return f"<figure class='card bars'><h3>Held-out {escape(metric_name(metric))}{lines}</h3>{svg(figure)}</figure>"


def _facts(run: RunContents) -> str:
    """Steps of each phase, the length of the run, and where the numbers that people ask for first ended."""
    facts = []
    for phase in offsets(run.metrics):
        of_phase = (r["step"] for r in run.metrics if r.get("phase", "") == phase)
        facts.append((phase or "steps", f"{max(s for s in of_phase if isinstance(s, int | float)):.0f} steps"))
    if times := [r["time"] for r in run.metrics if isinstance(r.get("time"), int | float)]:
        minutes, seconds = divmod(round(max(times)), 60)
        hours, minutes = divmod(minutes, 60)
        length = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
        facts.append(("time", length if hours or minutes else f"{seconds} s"))
    for label, name in (("reward", "reward/mean"), ("KL", "kl"), ("tokens/s", "tokens_per_s")):
        if ends := [s for s in series(run.metrics, name) if not is_control(s.phase)]:
            facts.append((label, show(ends[-1].end)))
    return "".join(f"<span>{escape(label)} <b>{escape(value)}</b></span>" for label, value in facts)


def _settings(run: RunContents) -> str:
    """Show the command that repeats the run, its resolved configuration, and the versions it ran with."""
    if not run.config:
        return ""
    body = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    for title, values in (("Resolved configuration", "config"), ("Versions", "versions")):
        if settings := run.config.get(values):
            rows = "".join(f"<div><span>{escape(k)}</span><b>{escape(v)}</b></div>" for k, v in _flat(settings))
            body += f"<details><summary>{title}</summary><div class='settings'>{rows}</div></details>"
    return f"<section><h2>Settings</h2>{body}</section>"


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
    rows = rows_of_entries(run.evals)
    if not rows:
        return ""
    entries = entry_names(rows)
    compared = {"before", "after"} <= set(entries)
    head = ["", *entries, *(["after − before"] if compared else ())]
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(_evaluation_row(row, entries, compared) for row in rows)
    legend = note("▼ is worse after training than before.") if any(row.worse for row in rows) else ""
    table = f"<table class='numbers'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return section("Held-out evaluation", f"<div class='card scroll-x'>{table}{legend}</div>")


def _evaluation_row(row: EvaluationRow, entries: Sequence[str], compared: bool) -> str:
    """Draw a row; the number of samples stands at its name when it is the same everywhere, else at each value."""

    def samples(n: int | None) -> str:
        return "" if n is None else f"<small>n = {n}</small>"

    shared = len(set(row.samples.values())) == 1 and len(row.samples) == len(row.values)
    cells = [escape(row.cell(e)) + ("" if shared else samples(row.samples.get(e))) for e in entries]
    if compared:
        cells.append(("▼ " if row.worse else "") + escape(row.change_text()))
    heading = escape(row.label) + (samples(next(iter(row.samples.values()))) if shared else "")
    kind = " ".join(name for name, holds in (("task", row.task), ("worse", row.worse)) if holds)
    values = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr class='{kind}'><th scope='row'>{heading}</th>{values}</tr>"


# -- curves ------------------------------------------------------------------------------------------------------------

Rule = tuple[str, tuple[str, ...], LineStyle]
"""(title, patterns, style): the first rule that matches a name takes it."""
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

    def panels_of(rules: tuple[Rule, ...], skip: set[str]) -> list[Panel]:
        panels = []
        for title, patterns, style in rules:
            matching = [n for n in remaining if n not in skip and any(fnmatchcase(n, p) for p in patterns)]
            if matching:
                panels.append(Panel(title, tuple(matching), style))
                remaining[:] = [n for n in remaining if n not in matching]
        return panels

    main = panels_of(_MAIN, {name for name in names if any(name in patterns for _, patterns, _ in _MORE)})
    rest = panels_of(_MORE, set())
    return main, rest + [Panel(name, (name,)) for name in remaining]


def _curves(run: RunContents) -> str:
    main, rest = arrange(metric_names(run.metrics))
    if not main and not rest:
        return ""
    body = f'<div class="panels">{"".join(_panel(run, p) for p in main)}</div>'
    if rest:
        title = f"{len(rest)} more chart{'s' * (len(rest) > 1)}"
        panels = f'<div class="panels">{"".join(_panel(run, p) for p in rest)}</div>'
        body += f"<details><summary>{title}</summary>{panels}</details>"
    lead = "Faint: each step. Strong: moving average. Points: probes on held-out samples during training."
    if any(is_control(phase) for phase in offsets(run.metrics)):
        lead += " Dashed: the control, from the point where it branches off."
    return section("Curves", body, lead)


def _panel(run: RunContents, panel: Panel) -> str:
    title = f"<h3>{escape(panel.title)}</h3>"
    lines = [s for s in (series(run.metrics, name) for name in panel.names) if s]
    if not lines:  # a metric that was never finite
        return f'<figure class="card">{title}{note("never a finite value")}</figure>'
    figure = Figure(figsize=(3.9, 2.2))
    draw_lines(figure.add_axes((0.115, 0.17, 0.87, 0.755)), lines, offsets(run.metrics), PAGE, panel.style)
    # One key per line, and one per control: its colour, its name and where it ended.
    keys = ""
    for place, phases in enumerate(lines):
        main = [one for one in phases if not is_control(one.phase)]
        for one in main[-1:] + [one for one in phases if is_control(one.phase)]:
            control = is_control(one.phase)
            colour = "var(--control)" if control else f"var(--line{place % 8})"
            name = ", ".join([_short(one.name, panel)] * (len(lines) > 1) + [one.phase] * control)
            keys += f'<span><i style="background:{colour}"></i>{_end(run, one, panel.style, name)}</span>'
    return f'<figure class="card">{title}<div class="legend">{keys}</div>{svg(figure)}</figure>'


def _end(run: RunContents, one: Series, style: LineStyle, name: str) -> str:
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
    """Return the name without the group that all names of its panel share: ``reward/format`` is ``format``."""
    groups = {n.partition("/")[0] for n in panel.names}
    return name.partition("/")[2] if len(groups) == 1 and "/" in name else name


# -- held-out samples --------------------------------------------------------------------------------------------------


def changed_pairs(before: Sequence[Row], after: Sequence[Row]) -> tuple[list[tuple[Row, Row]], ...]:
    """Pair answers by sample id; return those that went from wrong to right, from right to wrong, and all pairs."""
    after_by_id = {row.get("id"): row for row in after}
    pairs = [(row, after_by_id[row.get("id")]) for row in before if row.get("id") in after_by_id]
    fixed = [(b, a) for b, a in pairs if not b.get("correct") and a.get("correct")]
    broken = [(b, a) for b, a in pairs if b.get("correct") and not a.get("correct")]
    return fixed, broken, pairs


def _changed_answers(run: RunContents, players: Players) -> str:
    """Answers that went from wrong to right and from right to wrong, with the audio; "" without both files."""
    before, after = run.answers.get("before"), run.answers.get("after")
    if not before or not after or is_stream(after[0].get("sample")) or is_spoken(after) or is_codec_copy(after):
        return ""
    fixed, broken, pairs = changed_pairs(before, after)
    lead = (
        f"Of {len(pairs)} examples answered before and after, <b>{len(fixed)}</b> went from wrong to right and "
        f"<b>{len(broken)}</b> from right to wrong (sign test: p = {sign_test(len(fixed), len(broken)):.2g})."
    )
    body = f"<p class='sub'>{lead}</p>"
    for title, changed in (("Wrong → right", fixed), ("Right → wrong", broken)):
        if changed:
            cards = ""
            for pair in changed[:_EXAMPLES]:
                sides = ""
                for label, row in zip(("before", "after"), pair, strict=True):
                    text = marked(str(row.get("text") or "")) or NOTHING
                    mark = "right" if row.get("correct") else "wrong"
                    said = f"<span class='when'>{label}</span><p class='written'>{text}</p>"
                    sides += f"<div class='side {mark}'>{said}</div>"
                asked = question(pair[0], players)
                cards += f"<article class='card'>{asked}<div class='sides'>{sides}</div></article>"
            rest = more(len(changed) - _EXAMPLES, "in eval/after.jsonl")
            body += f"<h3>{title}</h3><div class='pairs'>{cards}</div>{rest}"
    return section("Answers that changed", body)


def _spoken_texts(run: RunContents, players: Players) -> str:
    """Held-out texts as each evaluation spoke them, greatest change of the error rate first."""
    spoken = {name: {row.get("id"): row for row in rows} for name, rows in run.answers.items() if is_spoken(rows)}
    if not spoken:
        return ""
    names = list(spoken)
    first, last = (
        spoken[name]
        for name in (("before", "after") if {"before", "after"} <= spoken.keys() else (names[0], names[-1]))
    )

    def change(id: Any) -> float:
        return abs(float(first[id].get("cer") or 0.0) - float(last[id].get("cer") or 0.0))

    ids = sorted((id for id in last if id in first), key=lambda id: -change(id))
    cards = ""
    for id in ids[:_RECORDINGS]:
        title, reference = str(last[id].get("text") or ""), reference_player(last[id], players)
        cards += _recording_card(title, reference, id, spoken, spoken_side, players)
    lead = (
        "The same held-out texts as each evaluation spoke them, with what the recogniser understood. Texts whose "
        f"character error rate (CER) changed the most come first. {CONTOUR_NOTE}"
    )
    return section("Spoken texts", cards + more(len(ids) - _RECORDINGS, "in eval/"), lead)


def _codec_copies(run: RunContents, players: Players) -> str:
    """Held-out recordings next to what the codec made of them; "" where no audio was kept."""
    copies = {name: {row["id"]: row for row in rows} for name, rows in run.answers.items() if is_codec_copy(rows)}
    last: dict[Any, Row] = next(reversed(copies.values()), {})
    cards = ""
    for row in [row for row in last.values() if row.get("decoded")][:_RECORDINGS]:
        original = f"<div class='audio'>{players.player(row.get('original'))}</div>"
        title = str(row.get("text") or row["id"])
        cards += _recording_card(title, original, row["id"], copies, codec_side, players)
    return section("Through the codec", cards, "Held-out recordings, and the same after encoding and decoding.")


def _recording_card(
    title: str, audio: str, id: Any, rows: Mapping[str, Mapping[Any, Row]], side: Side, players: Players
) -> str:
    sides = "".join(side(name, by_id[id], players) for name, by_id in rows.items() if id in by_id)
    asked = f"<div class='question'><p class='prompt'>{escape(title)}</p>{audio}</div>"
    return f"<article class='card'>{asked}<div class='sides'>{sides}</div></article>"


def _held_out_streams(run: RunContents, players: Players) -> str:
    """Show the first held-out streams with the output of each evaluation; "" where none were interpreted."""
    rows = {name: [r for r in answers if is_stream(r.get("sample"))] for name, answers in run.answers.items()}
    places = {name: k for k, name in enumerate(run.evals)}
    names = sorted((n for n, streams in rows.items() if streams), key=lambda n: (places.get(n, len(places)), n))
    if not names:
        return ""
    by_id = {name: {r["sample"].get("id"): r for r in rows[name]} for name in names}
    ids = list(dict.fromkeys(r["sample"].get("id") for name in names for r in rows[name]))
    cards = ""
    for id in ids[:_STREAMS]:
        outputs = {name: by_id[name][id] for name in names if id in by_id[name]}
        opened = {"before", "after"} & outputs.keys() or {next(iter(outputs))}
        bands = [evaluation_band(row, name, name in opened) for name, row in outputs.items()]
        drawn = stream(next(iter(outputs.values()))["sample"], bands, players)
        cards += f"<article class='card'><h3>{escape(str(id))}</h3>{drawn}</article>"
    return section(
        "Held-out streams", cards + more(len(ids) - _STREAMS, f"streams in eval/{names[0]}.jsonl"), STREAM_LEAD
    )


def evaluation_band(row: Row, name: str, opened: bool = True) -> Band:
    """Return a stream's output in one evaluation, without the sums of its rewards."""
    return Band(row, f"<b>{escape(name)}</b>{chips(parts(row))}", name, opened, total=False)


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _rollouts(run: RunContents, players: Players) -> str:
    """Recorded steps with a selector; "" when none were recorded.

    The last step and the first come first, then the middle of every gap, until the section holds `_BYTES`: a long run
    is thinned out evenly. The page says how many steps were left out.
    """
    steps: dict[int, str] = {}
    size, files = 0, run.rollout_files
    for place in _middles_first(len(files)):
        if size > _BYTES:
            break
        number, _ = files[place]
        if rows := run.rollouts(number):
            ends = place in (0, len(files) - 1)
            groups, members = (_GROUPS, _MEMBERS) if ends else (_GROUPS_BETWEEN, _MEMBERS_BETWEEN)
            before = players.bytes_used
            steps[number] = _step(number, rows, groups, members, players)
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


def _middles_first(count: int) -> list[int]:
    """Return the last place, the first, then the middle of every gap, wide gaps first."""
    order = [count - 1, 0][:count]
    gaps = [(0, count - 1)]
    for low, high in gaps:  # grows while it is read
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def _selector(steps: Sequence[int]) -> str:
    options = "".join(f"<option value='{n}'{' selected' if n == steps[-1] else ''}>{n}</option>" for n in steps)
    return (
        "<p class='chooser'><button type='button' data-move='-1' aria-label='previous recorded step'>◀</button>"
        f"<label>Step <select>{options}</select></label>"
        "<button type='button' data-move='1' aria-label='next recorded step'>▶</button>"
        f"<span class='note'>{len(steps)} recorded steps, {steps[0]} to {steps[-1]}</span></p>"
        "<noscript><style>.step[hidden] { display: block; }</style></noscript>"
    )


def _step(number: int, rows: Sequence[Row], groups: int, members: int, players: Players) -> str:
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(str(row.get("group_id", "")), []).append(row)
    file, cards = f"rollouts/step_{number:06d}.jsonl", ""
    for group in list(by_group.values())[:groups]:
        shown = sorted(group, key=lambda row: -total(row))[:members]
        sample = group[0].get("sample") or {}
        if is_stream(sample):
            ends = (shown[0], shown[-1])
            bands = [Band(r, score_chips(r), f"response {r.get('index', '')}", r in ends) for r in shown]
            body = stream(sample, bands, players)
        else:
            body = "".join(response(row, players) for row in shown)
        rest = more(len(group) - members, f"responses in {file}")
        cards += f"<article class='card'>{question(sample, players)}{body}{rest}</article>"
    return cards + more(len(by_group) - groups, f"prompts in {file}")

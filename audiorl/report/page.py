"""The whole page of a run: header, evaluation, curves, examples, settings, in one self-contained file.

assets/report.html holds the HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from audiorl.report import charts, rollouts, summary
from audiorl.report.audio import CONTOUR_NOTE, Players, allowed_audio
from audiorl.report.charts import LineStyle, Series
from audiorl.report.kit import document, macros, more, write_page
from audiorl.report.rollouts import Kind, Side
from audiorl.report.run import RunContents, checked_rows, load_run
from audiorl.report.streams import STREAM_LEAD, Band, stream
from audiorl.report.summary import Row, show
from audiorl.run.records import flat

_CHANGED = 6
_GROUPS, _MEMBERS = 6, 8  # of the first and the last step
_GROUPS_BETWEEN, _MEMBERS_BETWEEN = 3, 4  # of the other steps
_BYTES = 4_000_000  # of HTML of rollouts, audio not counted
_parts = macros("report.html")


@dataclass(frozen=True)
class Section:
    """A part of the page that the contents name; it is left out without a body."""

    title: str
    body: Markup
    lead: str = ""

    @property
    def id(self) -> str:
        return self.title.lower().replace(" ", "-")


def write(folder: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """See `audiorl.report.write_report`."""
    seeds = summary.seed_folders(Path(folder))
    runs = [load_run(path) for path in seeds or [Path(folder)]]
    text = experiment_page(Path(folder), runs) if seeds else page(runs[0], audio_root)
    return write_page(Path(folder) / "report.html", text)


def page(run: RunContents, audio_root: Sequence[Path] = ()) -> str:
    """Return the page of a run as text."""
    players = Players(run.path, allowed=allowed_audio(run.path, run.config.get("config"), audio_root))
    sections = [_evaluations(run.evals), _curves([run]), *_examples(run, players), _rollouts(run, players)]
    missing = (*run.missing, *summary.not_measured(run.evals, run.config.get("config")))
    footer = f". {players.embedded} audio players, {players.bytes_used / 1e6:.1f} MB of sound"
    footer += f"; {players.skipped} more clips were left out to keep the page small" if players.skipped else ""
    sections.append(_settings(run))
    return _page(run, f"recipe {run.recipe}", summary.sentence(run.evals), _facts(run), missing, sections, footer)


def experiment_page(folder: Path, runs: Sequence[RunContents]) -> str:
    """Return the page of runs that differ by their seed: means over seeds, and how far they spread.

    Raises ValueError for runs of several recipes; other settings that differ are named on the page.
    """
    if len(recipes := {run.recipe for run in runs}) > 1:
        raise ValueError(
            f"{folder}: name one run folder: its runs are of several recipes, {', '.join(sorted(recipes))}"
        )
    ended = [run for run in runs if "after" in run.evals] or runs
    evals = summary.mean_entries([run.evals for run in ended])
    settings = [flat(run.config.get("config") or {}) for run in runs]
    differing = [name for name in settings[0] if len({str(held.get(name)) for held in settings}) > 1]
    missing = [f"one experiment: the runs differ in {name}" for name in differing if not name.endswith("seed")]
    missing += [f"{run.name}: {text}" for run in runs for text in run.missing if "eval/" not in text]
    rewards = charts.mean_series([run.metrics for run in ended], "reward/mean")
    metrics: tuple[Row, ...] = tuple({one.name: value} for one in rewards for value in one.y)
    mean = RunContents(folder, runs[0].config, metrics, evals)
    linked = [(run.path.name, (run.path / "report.html").exists(), run.evals) for run in runs]
    order = [*summary.BASIC_ENTRIES, *(name for run in runs for name in run.evals)]
    entries = [name for name in dict.fromkeys(order) if any(name in run.evals for run in runs)]
    each = _parts.seeds(summary.headline(evals), entries, linked)
    sections = [Section("Seeds", each), _evaluations(evals), _curves(ended), _settings(runs[0])]
    said = f"{summary.sentence(evals)} Means of {len(ended)} seeds; the intervals are over seeds."
    facts = [("seeds", str(len(runs)))]
    return _page(mean, f"recipe {mean.recipe}, {len(runs)} seeds", said, facts, missing, sections, "")


def _page(
    run: RunContents,
    what: str,
    said: str,
    facts: Sequence[tuple[str, str]],
    missing: Sequence[str],
    sections: Sequence[Section],
    footer: str,
) -> str:
    rise, doubts = summary.doubts(run.evals, run.metrics)
    shown = [section for section in sections if section.body]
    over, picture = f"audiorl · {what}", _picture(run)
    body = _parts.page(over, run.name, said, facts, picture, rise, doubts, missing, shown, footer)
    return document(f"{run.name} · {run.recipe}", body)


def _evaluations(evals: summary.Evals) -> Section:
    rows = summary.rows_of_entries(evals)
    body = _parts.evaluations(rows, summary.entry_names(rows)) if rows else Markup("")
    return Section("Held-out evaluation", body)


def _settings(run: RunContents) -> Section:
    """Show the command that repeats the run, its resolved configuration, and the versions it ran with."""
    groups = (("Resolved configuration", "config"), ("Versions", "versions"))
    settings = [(title, flat(run.config.get(name) or {})) for title, name in groups]
    return Section("Settings", _parts.settings(run.command, settings))


def _picture(run: RunContents) -> tuple[str, Markup] | None:
    """Draw the chart next to the headline: bars, for interpreters quality and latency; None without an evaluation."""
    places = summary.points(run.evals)
    evaluations = [m for m in summary.measures(run.evals) if math.isfinite(m.value)]
    if len(places) > 1:
        figure = Figure(figsize=(5.0, 3.3))
        charts.draw_tradeoff(figure.add_axes((0.1, 0.13, 0.87, 0.84)), places, charts.PAGE)
        return "Held-out quality against latency; up and left is better", charts.svg(figure)
    if not evaluations:
        return None
    metric = summary.headline(run.evals) or ""
    figure = Figure(figsize=(5.0, 0.45 + 0.52 * len(evaluations)), layout="constrained")  # room for long names
    charts.draw_bars(figure.subplots(), evaluations, metric, charts.PAGE)
    lines = "; lines are 95% intervals" if any(m.low is not None for m in evaluations) else ""
    return f"Held-out {summary.metric_name(metric)}{lines}", charts.svg(figure)


def _facts(run: RunContents) -> list[tuple[str, str]]:
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
    return facts


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


def _curves(runs: Sequence[RunContents]) -> Section:
    metrics = [charts.with_evaluations(run.metrics, run.evals) for run in runs]
    names = dict.fromkeys(name for rows in metrics for name in charts.metric_names(rows))
    main, rest = ([_panel(runs, metrics, panel) for panel in panels] for panels in arrange(list(names)))
    lead = "Faint: each step. Strong: moving average. Points: held-out samples, before, during and after training."
    if len(runs) > 1:
        lead = "Strong: moving average of the mean over seeds. Band: from the lowest seed to the highest."
    if any(charts.is_control(phase) for phase in charts.offsets(metrics[0])):
        lead += " Dashed: the control, from the point where it branches off."
    return Section("Curves", _parts.panels(main, rest) if names else Markup(""), lead)


def _panel(runs: Sequence[RunContents], metrics: Sequence[Sequence[Row]], panel: Panel) -> Markup:
    lines = [s for s in (charts.mean_series(metrics, name) for name in panel.names) if s]
    picture, keys, groups = Markup(""), [], {n.partition("/")[0] for n in panel.names}
    if lines:
        figure = Figure(figsize=(3.9, 2.2))
        axes = figure.add_axes((0.115, 0.17, 0.87, 0.755))
        charts.draw_lines(axes, lines, charts.offsets(metrics[0]), charts.PAGE, panel.style)
        picture = charts.svg(figure)
    # One key per line, and one per control: its colour, its name and where it ended. Where all names of the panel share
    # a group it is left out: ``reward/format`` is ``format``.
    for place, phases in enumerate(lines):
        main = [one for one in phases if not charts.is_control(one.phase)]
        for one in main[-1:] + [one for one in phases if charts.is_control(one.phase)]:
            control = charts.is_control(one.phase)
            short = one.name.partition("/")[2] if len(groups) == 1 and "/" in one.name else one.name
            name = ", ".join([short] * (len(lines) > 1) + [one.phase] * control)
            colour = "var(--control)" if control else f"var(--line{place % 8})"
            keys.append((colour, *_end(one, panel.style, name, runs[0].evals)))
    panel_html: Markup = _parts.panel(panel.title, keys, picture)
    return panel_html


def _end(one: Series, style: LineStyle, name: str, evals: summary.Evals) -> tuple[str, str]:
    """Return name and value of the end of a line; a held-out metric ends with the final evaluation."""
    last = show(one.y[-1], one.name)
    if not one.name.startswith("eval/"):
        return name or "at the end", show(one.end, one.name) if style == "average" else last
    ended = one.name.removeprefix("eval/") in (evals.get("control" if charts.is_control(one.phase) else "after") or {})
    return f"{name} {'final evaluation' if ended else 'last probe'}".strip(), last


# -- held-out examples -------------------------------------------------------------------------------------------------

_EXAMPLES: dict[Kind, tuple[str, str, int]] = {
    "spoken": (
        "Spoken texts",
        "The same held-out texts as each evaluation spoke them, with what the recogniser understood. Texts whose "
        f"character error rate (CER) changed the most come first. {CONTOUR_NOTE}",
        8,
    ),
    "sound": (
        "Held-out sounds",
        "The same held-out rows as each evaluation made them. Those whose reward changed the most come first.",
        8,
    ),
    "codec": ("Through the codec", "Held-out recordings, and the same after encoding and decoding.", 8),
    "stream": ("Held-out streams", STREAM_LEAD, 4),
}
"""By kind: title, lead, and how many are shown."""


def _examples(run: RunContents, players: Players) -> list[Section]:
    """Held-out examples as each evaluation has them."""
    kinds: dict[Kind, dict[str, dict[Any, Row]]] = {}
    for name, rows in run.answers.items():
        if rows:
            by_id = {(row.get("sample") or row).get("id"): row for row in rows}
            kinds.setdefault(rollouts.kind_of(rows[0]), {})[name] = by_id
    answers, sections = kinds.get("text", {}), []
    if {"before", "after"} <= answers.keys():
        sections.append(_changed_answers(answers["before"], answers["after"], players))
    for kind, (title, lead, limit) in _EXAMPLES.items():
        held = kinds.get(kind, {})
        ids = list(dict.fromkeys(id for rows in held.values() for id in rows))
        if kind in ("spoken", "sound") and held:
            by = "cer" if kind == "spoken" else "reward"
            ends = (
                ("before", "after") if {"before", "after"} <= held.keys() else (next(iter(held)), next(reversed(held)))
            )
            change = {
                id: abs(float(held[ends[0]][id].get(by) or 0.0) - float(held[ends[1]][id].get(by) or 0.0))
                for id in held[ends[1]]
                if id in held[ends[0]]
            }
            ids = sorted(change, key=lambda id: -change[id])
        elif kind == "codec" and held:
            ids = [id for id, row in next(reversed(held.values())).items() if row.get("decoded")]
        sides = [[(name, rows[id], players) for name, rows in held.items() if id in rows] for id in ids[:limit]]
        cards = Markup("").join(rollouts.example_card(side, kind) for side in sides)
        sections.append(Section(title, cards + more(len(ids) - limit, "in eval/"), lead))
    return sections


def changed_pairs(before: Mapping[Any, Row], after: Mapping[Any, Row]) -> tuple[list[tuple[Row, Row]], ...]:
    """Pair answers by sample id; return those that went from wrong to right, from right to wrong, and all pairs."""
    pairs = [(row, after[id]) for id, row in before.items() if id in after]
    fixed = [(b, a) for b, a in pairs if not b.get("correct") and a.get("correct")]
    broken = [(b, a) for b, a in pairs if b.get("correct") and not a.get("correct")]
    return fixed, broken, pairs


def _changed_answers(before: Mapping[Any, Row], after: Mapping[Any, Row], players: Players) -> Section:
    fixed, broken, pairs = changed_pairs(before, after)
    lead = Markup(
        "Of {} examples answered before and after, <b>{}</b> went from wrong to right and <b>{}</b> from right to "
        "wrong (sign test: p = {:.2g})."
    ).format(len(pairs), len(fixed), len(broken), summary.sign_test(len(fixed), len(broken)))
    groups = []
    for title, changed in (("Wrong → right", fixed), ("Right → wrong", broken)):
        sides: list[list[Side]] = [[("before", b, players), ("after", a, players)] for b, a in changed[:_CHANGED]]
        groups.append((title, len(changed), [rollouts.example_card(side, "text") for side in sides]))
    return Section("Answers that changed", _parts.changed(lead, groups, _CHANGED))


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _rollouts(run: RunContents, players: Players) -> Section:
    """Recorded steps with a selector; empty when none were recorded.

    The last step and the first come first, then the middle of every gap, until the section holds `_BYTES`: a long run
    is thinned out evenly. The page says how many steps were left out.
    """
    steps: dict[int, Markup] = {}
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
    lead = (
        "Each card is one prompt with its group of sampled responses, best first. Chips are reward parts; the "
        "advantage compares a response with its group."
    )
    return Section("Rollouts", _parts.steps(steps, len(files) - len(steps)) if steps else Markup(""), lead)


def _step(file: str, rows: Sequence[Row], groups: int, members: int, players: Players) -> Markup:
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(str(row.get("group_id", "")), []).append(row)
    cards = Markup("")
    for group in list(by_group.values())[:groups]:
        shown = sorted(group, key=lambda row: -rollouts.total(row))[:members]
        sample = group[0].get("sample") or {}
        if rollouts.is_stream(sample):
            ends = (shown[0], shown[-1])
            bands = [Band(r, rollouts.score_chips(r), f"response {r.get('index', '')}", r in ends) for r in shown]
            body = stream(sample, bands, players)
        else:
            body = Markup("").join(rollouts.response(row, players) for row in shown)
        rest = more(len(group) - members, f"responses in {file}")
        cards += Markup("<article class='card'>{}{}{}</article>").format(rollouts.question(sample, players), body, rest)
    return cards + more(len(by_group) - groups, f"prompts in {file}")

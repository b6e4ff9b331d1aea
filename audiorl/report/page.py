"""The whole page: header, evaluation, curves, examples, settings, in one self-contained file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from audiorl.report.audio import Players, allowed_audio
from audiorl.report.curves import curves
from audiorl.report.evaluation import bars, changed, table
from audiorl.report.recordings import codec_copies, spoken_texts
from audiorl.report.rollouts import rollouts
from audiorl.report.run import Run, load_run
from audiorl.report.series import is_control, offsets, series
from audiorl.report.streams import held_out
from audiorl.report.style import STEP_SCRIPT, STREAM_SCRIPT, document
from audiorl.report.summary import disagreements, sentence, show, without_strangers, worse_tasks


def write(run_dir: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """See `audiorl.report.write_report`."""
    run = load_run(run_dir)
    path = run.path / "report.html"
    temporary = path.with_name("report.html.tmp")
    temporary.write_text(page(run, audio_root), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def page(run: Run, audio_root: Sequence[Path] = ()) -> str:
    """The page as text."""
    players = Players(run.path, allowed=allowed_audio(run.path, run.config.get("config"), audio_root))
    sections = (
        _header(run),
        table(run),
        curves(run),
        changed(run, players),
        spoken_texts(run, players),
        codec_copies(run, players),
        held_out(run, players),
        rollouts(run, players),
        _settings(run),
        _footer(players),
    )
    body = "".join(sections)
    scripts = (STREAM_SCRIPT if "class='stream'" in body else "") + (STEP_SCRIPT if "class='chooser'" in body else "")
    return document(f"{run.recipe} · {run.name}", body, scripts=scripts)


def _header(run: Run) -> str:
    picture = bars(run)
    warnings = [*filter(None, [worse_tasks(run)]), *disagreements(run.evals, run.metrics)]
    worse = "".join(f"<p class='worse'>▼ {escape(text)}</p>" for text in warnings)
    return (
        f"<header><p class='over'>audiorl run · {escape(run.name)}</p><h1>{escape(run.recipe)}</h1>"
        f"<div class='hero{'' if picture else ' alone'}'><div><p class='say'>{escape(sentence(run))}</p>{worse}"
        f"<p class='facts-line'>{_facts(run)}</p></div>{picture}</div>{_missing(run)}</header>"
    )


def _facts(run: Run) -> str:
    """Steps of each phase, the length of the run, and where the numbers that people ask for first ended."""
    facts = []
    for phase in offsets(run.metrics):
        steps = [
            r["step"] for r in run.metrics if r.get("phase", "") == phase and isinstance(r.get("step"), int | float)
        ]
        facts.append((phase or "steps", f"{max(steps):.0f} steps"))
    times = [r["time"] for r in run.metrics if isinstance(r.get("time"), int | float)]
    if times:
        facts.append(("time", _duration(max(times))))
    for label, name in (("reward", "reward/mean"), ("KL", "kl"), ("tokens/s", "tokens_per_s")):
        if ends := [s for s in series(run.metrics, name) if not is_control(s.phase)]:
            facts.append((label, show(ends[-1].end)))
    return "".join(f"<span>{escape(label)} <b>{escape(value)}</b></span>" for label, value in facts)


def _missing(run: Run) -> str:
    missing = (*run.missing, *without_strangers(run.evals))
    if not missing:
        return ""
    items = "".join(f"<li>{escape(m)}</li>" for m in missing)
    return f"<div class='missing'><b>Not in this report</b><ul>{items}</ul></div>"


def _settings(run: Run) -> str:
    """The command that repeats the run, its resolved configuration, and the versions it ran with."""
    config = run.config
    if not config:
        return ""
    body = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    for title, values in (("Resolved configuration", config.get("config")), ("Versions", config.get("versions"))):
        if values:
            rows = "".join(f"<div><span>{escape(k)}</span><b>{escape(v)}</b></div>" for k, v in _flat(values))
            body += f"<details><summary>{title}</summary><div class='settings'>{rows}</div></details>"
    return f"<section><h2>Settings</h2>{body}</section>"


def _footer(players: Players) -> str:
    audio = f"{players.embedded} audio players, {players.bytes_used / 1e6:.1f} MB of sound"
    skipped = f"; {players.skipped} more clips were left out to keep the page small" if players.skipped else ""
    return f"<footer>Written by audiorl. {audio}{skipped}.</footer>"


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names, the way the command line overrides them."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

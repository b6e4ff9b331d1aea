"""Sampled responses to read and listen to, grouped by prompt, with their rewards; the reader chooses the step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from audiorl.report.audio import Players
from audiorl.report.recordings import spoken_player
from audiorl.report.run import Row, Run
from audiorl.report.streams import Band, is_stream, stream
from audiorl.report.text import chip, chips, marked, prompt

_GROUPS, _MEMBERS = 6, 8  # of the first and the last step
_GROUPS_BETWEEN, _MEMBERS_BETWEEN = 3, 4  # of the other steps
_TEXT = 4000  # characters of one response
_BYTES = 4_000_000  # of HTML in the section, audio not counted
_READ = "<span class='note'>nothing (READ)</span>"


def rollouts(run: Run, players: Players) -> str:
    """Recorded steps with a selector; empty when none were recorded.

    The last step and the first come first, then the middle of every gap, until the section holds `_BYTES`: a long run
    is thinned out evenly. The page says which steps were left out and where they lie.
    """
    steps: dict[int, str] = {}
    size = 0
    for place in _middles_first(len(run.rollout_files)):
        if size > _BYTES:
            break
        number, _ = run.rollout_files[place]
        if rows := run.rollouts(number):
            ends = place in (0, len(run.rollout_files) - 1)
            groups, members = (_GROUPS, _MEMBERS) if ends else (_GROUPS_BETWEEN, _MEMBERS_BETWEEN)
            before = players.bytes_used
            steps[number] = _step(number, rows, groups, members, players)
            size += len(steps[number]) - (players.bytes_used - before)
    if not steps:
        return ""
    shown = sorted(steps)
    left_out = len(run.rollout_files) - len(shown)
    choice = _selector(shown) if len(shown) > 1 else f"<h3>Step {shown[0]}</h3>"
    note = (
        f"<p class='note'>{left_out} more recorded steps are left out to keep the page small: rollouts/step_*.jsonl</p>"
    )
    body = "".join(
        f"<div class='step' data-step='{number}'{'' if number == shown[-1] else ' hidden'}>{steps[number]}</div>"
        for number in shown
    )
    return (
        "<section class='rollouts'><h2>Rollouts</h2><p class='sub'>Each card is one prompt with its group of sampled "
        "responses, best first. Chips are reward parts; the advantage compares a response with its group.</p>"
        f"{choice}{note if left_out else ''}{body}</section>"
    )


def _middles_first(count: int) -> list[int]:
    """The last place, the first, then the middle of every gap, wide gaps first."""
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


def question(sample: Row, players: Players) -> str:
    """The prompt, its audio, its choices and its gold answers. Of a stream, audio and reference are in its timeline."""
    streams = is_stream(sample)
    audio = "".join(players.player(clip) for clip in (() if streams else sample.get("audio") or ()))
    facts = [
        f"<span class='fact'>{label} <b>{escape(', '.join(map(str, values)))}</b></span>"
        for label, values in (
            ("reference", () if streams else sample.get("references")),
            ("choices", sample.get("choices")),
        )
        if values
    ]
    if sample.get("task"):
        facts.append(f"<span class='fact'>task <b>{escape(str(sample['task']))}</b></span>")
    return (
        f"<div class='question'><p class='prompt'>{prompt(str(sample.get('prompt') or ''))}</p>"
        f"<div class='audio'>{audio}</div><p class='facts'>{''.join(facts)}</p></div>"
    )


def timeline(segments: Sequence[Row]) -> str:
    """The segments of a rollout as a table: source time, wall-clock time and text; empty for a single segment."""
    if len(segments) < 2:
        return ""
    rows = "".join(
        f"<tr><td>{place}</td><td>{_seconds(s.get('source_time'))}</td><td>{_seconds(s.get('emit_time'))}</td>"
        f"<td>{escape(str(s.get('num_tokens', '')))}</td><td>{escape(str(s.get('stop_reason') or ''))}</td>"
        f"<td class='written'>{marked(str(s.get('text') or '')) or _READ}</td></tr>"
        for place, s in enumerate(segments, 1)
    )
    return (
        "<table class='timeline'><thead><tr><th>#</th><th>source time</th><th>emitted at</th><th>tokens</th>"
        f"<th>stopped by</th><th>text</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _step(number: int, rows: Sequence[Row], groups: int, members: int, players: Players) -> str:
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(str(row.get("group_id", "")), []).append(row)
    cards = "".join(_group(number, group, members, players) for group in list(by_group.values())[:groups])
    return cards + _more(len(by_group) - groups, "prompts", number)


def _group(number: int, rows: Sequence[Row], members: int, players: Players) -> str:
    shown = sorted(rows, key=lambda r: -_total(r))[:members]
    sample = rows[0].get("sample") or {}
    if is_stream(sample):
        bands = [Band(r, score_chips(r), f"response {r.get('index', '')}", r in (shown[0], shown[-1])) for r in shown]
        body = stream(sample, bands, players)
    else:
        body = "".join(response(r, players) for r in shown)
    more = _more(len(rows) - members, "responses", number)
    return f"<article class='card'>{question(sample, players)}{body}{more}</article>"


def _more(count: int, things: str, number: int) -> str:
    return f"<p class='note'>{count} more {things} in rollouts/step_{number:06d}.jsonl</p>" if count > 0 else ""


def written_text(row: Row) -> str:
    """Everything that the policy wrote."""
    return str(row.get("text") or "".join(str(s.get("text") or "") for s in row.get("segments") or ()))


def response(row: Row, players: Players, tokens: str = "") -> str:
    """One answer with its audio, its segments and its rewards; `tokens` is HTML in place of the text."""
    segments = row.get("segments") or []
    advantage = _advantage(row)
    text = written_text(row)
    sign = "" if not advantage else " up" if advantage > 0 else " down"
    audio = spoken_player(row, players)
    cut = f" <span class='note'>… {len(text) - _TEXT} more characters</span>" if len(text) > _TEXT else ""
    written = tokens or marked(text[:_TEXT]) + cut or ("" if audio else "<span class='note'>wrote nothing</span>")
    return (
        f"<div class='response{sign}'><p class='written'>{written}</p>{audio}{timeline(segments)}"
        f"<p class='chips'>{score_chips(row)}</p></div>"
    )


def score_chips(row: Row) -> str:
    """The total, the reward parts, whether it was cut, and the advantage."""
    score, segments, advantage = row.get("score") or {}, row.get("segments") or [], _advantage(row)
    line = [chip("total", _total(row), "total")] if score else []
    line.append(chips(score.get("parts") or {}))
    if segments and segments[-1].get("stop_reason") == "length":
        line.append("<span class='fact'>cut at the length limit</span>")
    if advantage is not None:
        line.append(chip("advantage", advantage, "advantage", f"{advantage:+.2f}"))
    return "".join(line)


def _advantage(row: Row) -> float | None:
    value = row.get("advantage")
    return None if value is None else round(float(value), 2) + 0.0  # no "-0.00"


def _total(row: Row) -> float:
    return float((row.get("score") or {}).get("total") or 0.0)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"

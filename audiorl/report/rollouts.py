"""Rollouts to read and hear, grouped by prompt: what the policy wrote, and what each reward part made of it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from audiorl.report.audio import Players
from audiorl.report.run import Row, Run
from audiorl.report.speech import said
from audiorl.report.streams import Band, is_stream, stream
from audiorl.report.text import chip, chips, marked, prompt
from audiorl.report.timeline import timeline

_GROUPS, _MEMBERS = 6, 8


def rollouts(run: Run, players: Players) -> str:
    """The first and the last recorded step, side by side in time; empty when none were recorded."""
    if not run.rollouts:
        return ""
    labels = ["First recorded step", "Last recorded step"] if len(run.rollouts) > 1 else ["Recorded step"]
    steps = "".join(
        f"<h3>{label}: {step}</h3>{_step(rows, players)}"
        for label, (step, rows) in zip(labels, run.rollouts, strict=True)
    )
    return (
        "<section><h2>Rollouts</h2><p class='sub'>Each card is one prompt with its group of sampled responses. "
        "Chips are reward parts; the advantage compares a response with its group.</p>" + steps + "</section>"
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


def _step(rows: Sequence[Row], players: Players) -> str:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row.get("group_id", "")), []).append(row)
    shown = list(groups.values())[:_GROUPS]
    left = len(groups) - len(shown)
    note = f"<p class='note'>{left} more prompts in the file of this step</p>" if left else ""
    return "".join(_group(members, players) for members in shown) + note


def _group(members: Sequence[Row], players: Players) -> str:
    ordered = sorted(members, key=lambda r: -_total(r))
    left = len(ordered) - _MEMBERS
    note = f"<p class='note'>{left} more responses in the file of this step</p>" if left > 0 else ""
    sample = members[0].get("sample") or {}
    if is_stream(sample):
        shown = ordered[:_MEMBERS]
        bands = [Band(r, _chips(r), f"response {r.get('index', '')}", r in (shown[0], shown[-1])) for r in shown]
        body = stream(sample, bands, players)
    else:
        body = "".join(_response(r, players) for r in ordered[:_MEMBERS])
    return f"<article class='card'>{question(sample, players)}{body}{note}</article>"


def _response(row: Row, players: Players) -> str:
    segments = row.get("segments") or []
    advantage = _advantage(row)
    text = str(row.get("text") or "".join(str(s.get("text") or "") for s in segments))
    sign = "" if not advantage else " up" if advantage > 0 else " down"
    sound = said(row, players)
    written = marked(text) or ("" if sound else "<span class='note'>wrote nothing</span>")
    return (
        f"<div class='response{sign}'><p class='written'>{written}</p>{sound}{timeline(segments)}"
        f"<p class='chips'>{_chips(row)}</p></div>"
    )


def _chips(row: Row) -> str:
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

"""What a policy said of held-out texts, before and after, to hear side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from audiorl.report.audio import Players
from audiorl.report.run import Row, Run

_TEXTS = 8


def is_speech(rows: Sequence[Row]) -> bool:
    """Whether these are texts that were said and written down by a judge."""
    return bool(rows) and ({"spoken_audio", "transcript"} <= set(rows[0]) or {"said", "heard"} <= set(rows[0]))  # 0.1


def heard(run: Run, players: Players) -> str:
    """Held-out texts as each evaluation said them, those that changed the most first; empty without any."""
    spoken = {name: {row.get("id"): row for row in rows} for name, rows in run.answers.items() if is_speech(rows)}
    if not spoken:
        return ""
    first, last = (list(spoken.values())[i] for i in _ends(list(spoken)))
    ids = sorted((i for i in last if i in first), key=lambda i: -abs(_rate(first[i]) - _rate(last[i])))
    shown = "".join(
        _text(last[i], {name: rows[i] for name, rows in spoken.items() if i in rows}, players) for i in ids[:_TEXTS]
    )
    left = len(ids) - _TEXTS
    note = f"<p class='note'>{left} more in eval/</p>" if left > 0 else ""
    return (
        "<section><h2>What was said</h2><p class='sub'>The same held-out texts at every evaluation, those whose "
        f"character error rate changed the most first.</p>{shown}{note}</section>"
    )


def said(row: Row, players: Players) -> str:
    """The sound of a rollout that spoke; empty for one that did not."""
    clip = row.get("spoken_audio", row.get("said"))  # "said" in runs of 0.1
    return f"<div class='audio'>{players.player(clip)}</div>" if clip else ""


def _ends(names: Sequence[str]) -> tuple[int, int]:
    """Which evaluations to compare: before and after where there are both, else the first and the last."""
    if {"before", "after"} <= set(names):
        return names.index("before"), names.index("after")
    return 0, len(names) - 1


def _text(row: Row, takes: Mapping[str, Row], players: Players) -> str:
    sides = "".join(_side(name, take, players) for name, take in takes.items())
    text = escape(str(row.get("text") or ""))
    question = f"<div class='question'><p class='prompt'>{text}</p></div>"
    return f"<article class='card'>{question}<div class='sides'>{sides}</div></article>"


def _side(name: str, row: Row, players: Players) -> str:
    understood = (
        escape(str(row.get("transcript", row.get("heard")) or "")) or "<span class='note'>nothing was understood</span>"
    )
    mark = "right" if _rate(row) == 0 else "wrong"
    return (
        f"<div class='side {mark}'><span class='when'>{escape(name)}</span>{said(row, players)}"
        f"<p class='written'>{understood}</p><p class='facts'><span class='fact'>CER <b>{_rate(row):.0%}</b></span>"
        f"<span class='fact'>{float(row.get('seconds') or 0):.2f} s</span></p></div>"
    )


def _rate(row: Row) -> float:
    return float(row.get("cer") or 0.0)

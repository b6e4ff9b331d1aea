"""What a codec made of held-out recordings at every evaluation, to hear beside the originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from audiorl.report.audio import Players
from audiorl.report.run import Row, Run
from audiorl.report.summary import show

_RECORDINGS = 8


def is_copy(rows: Sequence[Row]) -> bool:
    """Whether these are recordings that went through a codec."""
    return bool(rows) and "mel_distance" in rows[0]


def copies(run: Run, players: Players) -> str:
    """Recordings whose sound was kept, in their order; empty without any."""
    found = {name: {row["id"]: row for row in rows} for name, rows in run.answers.items() if is_copy(rows)}
    last = next(reversed(found.values()), {})
    shown = [row for row in last.values() if row.get("decoded")][:_RECORDINGS]
    if not shown:
        return ""
    cards = "".join(
        _card(row, {name: rows[row["id"]] for name, rows in found.items() if row["id"] in rows}, players)
        for row in shown
    )
    note = "<p class='sub'>Recordings that it was not trained on.</p>"
    return f"<section><h2>Through the codec</h2>{note}{cards}</section>"


def _card(row: Row, takes: Mapping[str, Row], players: Players) -> str:
    original = f"<div class='audio'>{players.player(row.get('original') or {})}</div>"
    text = escape(str(row.get("text") or row["id"]))
    sides = "".join(_side(name, take, players) for name, take in takes.items())
    return (
        f"<article class='card'><div class='question'><p class='prompt'>{text}</p>{original}</div>"
        f"<div class='sides'>{sides}</div></article>"
    )


def _side(name: str, row: Row, players: Players) -> str:
    values = "".join(
        f"<span class='fact'>{label} <b>{show(row[key])}</b></span>"
        for label, key in (("mel distance", "mel_distance"), ("STFT distance", "stft_distance"))
    )
    player = players.player(row.get("decoded") or {})
    return (
        f"<div class='side'><span class='when'>{escape(name)}</span><div class='audio'>{player}</div>"
        f"<p class='facts'>{values}</p></div>"
    )

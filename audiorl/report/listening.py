"""A page of recordings: the same texts by several systems, with players, measurements and transcripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from audiorl.report.audio import Allowed, Players
from audiorl.report.style import CSS
from audiorl.report.summary import show

_STYLE = """
.listen th { width: 11em; overflow-wrap: anywhere; } .listen td:nth-child(2) { width: 320px; }
.listen audio { width: 300px; height: 34px; display: block; } .listen .transcript { margin: 4px 0 0; }
.listen table { table-layout: fixed; } .listen { margin-top: 16px; }
"""


@dataclass(frozen=True)
class Take:
    """One recording of a card.

    path: relative to the page; None where the system produced no audio, which the page says. values: what was measured
    of it, by name. transcript: what a recogniser understood.
    """

    system: str
    path: str | None
    values: Mapping[str, float] = field(default_factory=dict)
    transcript: str | None = None


@dataclass(frozen=True)
class Card:
    """Recordings of the same words."""

    title: str
    text: str
    takes: tuple[Take, ...]


def listening_page(
    title: str,
    lead: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    cards: Sequence[Card],
    folder: Path,
    max_bytes: int = 24_000_000,
) -> str:
    """A self-contained page: a table (`head`, `rows` of text), then the cards with players for files in `folder`."""
    everywhere = Allowed((Path("/"),))  # the cards name what this process has just read
    players = Players(folder, max_clips=400, max_bytes=max_bytes, max_file=1_500_000, allowed=everywhere)
    table = (
        "<div class='card scroll-x'><table class='numbers'><thead><tr>"
        + "".join(f"<th>{escape(cell)}</th>" for cell in head)
        + "</tr></thead><tbody>"
        + "".join(_row(row) for row in rows)
        + "</tbody></table></div>"
    )
    body = "".join(_card(card, players) for card in cards)
    more = f" {players.skipped} more recordings lie in the folder." if players.skipped else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}{_STYLE}</style></head><body><main>"
        f"<header><p class='over'>audiorl evaluation</p><h1>{escape(title)}</h1>"
        f"<p class='sub'>{escape(lead)}</p></header><section>{table}</section>"
        f"<section><h2>Listen</h2>{body}</section>"
        f"<footer>Written by audiorl.{more}</footer></main></body></html>\n"
    )


def _row(cells: Sequence[str]) -> str:
    return f"<tr><th>{escape(cells[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:]) + "</tr>"


def _card(card: Card, players: Players) -> str:
    takes = "".join(_take(take, players) for take in card.takes)
    text = f"<p class='sub'>{escape(card.text)}</p>" if card.text else ""
    table = f"<table><tbody>{takes}</tbody></table>"
    return f"<article class='card listen'><h3>{escape(card.title)}</h3>{text}{table}</article>"


def _take(take: Take, players: Players) -> str:
    player = "<span class='note'>no audio</span>" if take.path is None else players.player({"path": take.path})
    values = " · ".join(f"{escape(name)} <b>{escape(show(value))}</b>" for name, value in take.values.items())
    transcript = "" if take.transcript is None else f"<p class='transcript'>“{escape(take.transcript)}”</p>"
    return f"<tr><th>{escape(take.system)}</th><td>{player}</td><td><small>{values}</small>{transcript}</td></tr>"

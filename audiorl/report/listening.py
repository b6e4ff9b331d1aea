"""A page of recordings: the same texts by several systems, with players, measurements and transcripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from audiorl.report.audio import Allowed, Players
from audiorl.report.contour import CONTOUR_NOTE
from audiorl.report.eval_page import eval_page, number_table
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
    body = "".join(_card(card, players) for card in cards)
    more = f" {players.skipped} more recordings lie in the folder." if players.skipped else ""
    sections = [number_table(head, rows), f"<h2>Listen</h2><p class='sub'>{CONTOUR_NOTE}</p>{body}"]
    return eval_page(title, lead, sections, style=_STYLE, note=more)


def _card(card: Card, players: Players) -> str:
    takes = "".join(_take(take, players) for take in card.takes)
    text = f"<p class='sub'>{escape(card.text)}</p>" if card.text else ""
    table = f"<table><tbody>{takes}</tbody></table>"
    return f"<article class='card listen'><h3>{escape(card.title)}</h3>{text}{table}</article>"


def _take(take: Take, players: Players) -> str:
    clip = {"path": take.path}
    player = "<span class='note'>no audio</span>" if take.path is None else players.player(clip) + players.contour(clip)
    values = " · ".join(f"{escape(name)} <b>{escape(show(value))}</b>" for name, value in take.values.items())
    transcript = "" if take.transcript is None else f"<p class='transcript'>“{escape(take.transcript)}”</p>"
    return f"<tr><th>{escape(take.system)}</th><td>{player}</td><td><small>{values}</small>{transcript}</td></tr>"

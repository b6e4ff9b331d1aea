"""Pages of recordings: the same texts by several systems, questions with their clips, transcripts of clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from audiorl.audio import AudioClip
from audiorl.report.audio import CONTOUR_NOTE, EVERYTHING, Players, clip_player
from audiorl.report.kit import asset, eval_page, note, number_table
from audiorl.report.summary import show
from audiorl.types import Sample


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
    """Return a page: a table (`head`, `rows` of text), then the cards with players for files in `folder`."""
    # The cards name what this process has just read.
    players = Players(folder, max_clips=400, max_bytes=max_bytes, max_file=1_500_000, allowed=EVERYTHING)
    body = "".join(_card(card, players) for card in cards)
    more = f" {players.skipped} more recordings lie in the folder." if players.skipped else ""
    sections = [number_table(head, rows), f"<h2>Listen</h2><p class='sub'>{CONTOUR_NOTE}</p>{body}"]
    return eval_page(title, lead, sections, style=asset("listening.css"), note=more)


def _card(card: Card, players: Players) -> str:
    rows = ""
    for take in card.takes:
        clip = {"path": take.path}
        player = players.player(clip) + players.contour(clip) if take.path else note("no audio", "span")
        values = " · ".join(f"{escape(name)} <b>{escape(show(value))}</b>" for name, value in take.values.items())
        said = "" if take.transcript is None else f"<p class='transcript'>“{escape(take.transcript)}”</p>"
        rows += f"<tr><th>{escape(take.system)}</th><td>{player}</td><td><small>{values}</small>{said}</td></tr>"
    text = f"<p class='sub'>{escape(card.text)}</p>" if card.text else ""
    table = f"<table><tbody>{rows}</tbody></table>"
    return f"<article class='card listen'><h3>{escape(card.title)}</h3>{text}{table}</article>"


def clips_page(title: str, lead: str, articles: Sequence[str], nothing: str) -> str:
    """Return a page of `article`s; `title`, `lead` and `nothing`, which stands for no articles, are plain text."""
    return eval_page(title, lead, ["".join(articles) or note(nothing)], style=asset("listening.css"))


def article(title: str, clips: Sequence[AudioClip], entries: Sequence[tuple[str, str]]) -> str:
    """Return a card: a title, a player for each clip, and (term, text) entries; a line break in a text stays one."""
    listed = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text).replace(chr(10), '<br>')}</dd>" for term, text in entries
    )
    players = "".join(map(clip_player, clips))
    return (
        f"<article class='card'><h3>{escape(title)}</h3><div class='audio'>{players}</div><dl>{listed}</dl></article>"
    )


def question_card(sample: Sample, shown: Sample, answers: str) -> str:
    """Return a card of a question with its clips, the prompt's text as `shown` has it, and `answers` as HTML."""
    prompt = "\n".join(c for m in shown.messages for c in m.content if isinstance(c, str))
    players = "".join(map(clip_player, sample.audio))
    return (
        f"<article class='card'><div class='question'><h3>{escape(sample.id)}</h3>"
        f"<div class='audio'>{players}</div><p class='prompt'>{escape(prompt)}</p></div>"
        f"<div class='sides'>{answers}</div></article>"
    )

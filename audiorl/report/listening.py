"""Pages of recordings: the same texts by several systems, questions with their clips, transcripts of clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from audiorl.audio import AudioClip
from audiorl.report.audio import CONTOUR_NOTE, EVERYTHING, Players, clip_player
from audiorl.report.kit import asset, eval_page, macros, note, number_table
from audiorl.types import Sample

_parts = macros("listening.html")


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
    sections = [number_table(head, rows), _parts.cards(cards, players, CONTOUR_NOTE)]
    more = f" {players.skipped} more recordings lie in the folder." if players.skipped else ""
    return eval_page(title, lead, sections, style=asset("listening.css"), note=more)


def clips_page(title: str, lead: str, articles: Sequence[str], nothing: str) -> str:
    """Return a page of `article`s; `title`, `lead` and `nothing`, which stands for no articles, are plain text."""
    return eval_page(title, lead, ["".join(articles) or note(nothing)], style=asset("listening.css"))


def article(title: str, clips: Sequence[AudioClip], entries: Sequence[tuple[str, str]]) -> Markup:
    """Return a card: a title, a player for each clip, and (term, text) entries; a line break in a text stays one."""
    card: Markup = _parts.article(title, map(clip_player, clips), entries)
    return card


def question_card(sample: Sample, shown: Sample, answers: str) -> Markup:
    """Return a card of a question with its clips, the prompt's text as `shown` has it, and `answers` as HTML."""
    prompt = "\n".join(c for m in shown.messages for c in m.content if isinstance(c, str))
    card: Markup = _parts.question(sample.id, map(clip_player, sample.audio), prompt, Markup(answers))
    return card

"""The frame of an evaluation's page: a title, a sentence, and sections of HTML; tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from audiorl.report.style import document


def eval_page(title: str, lead: str, sections: Sequence[str], *, style: str = "", note: str = "") -> str:
    """A self-contained page. `title`, `lead` and `note` are plain text, `sections` HTML, `style` more CSS."""
    body = "".join(f"<section>{section}</section>" for section in sections)
    page = (
        f"<header><p class='over'>audiorl evaluation</p><h1>{escape(title)}</h1>"
        f"<p class='sub'>{escape(lead)}</p></header>{body}<footer>Written by audiorl.{escape(note)}</footer>"
    )
    return document(title, page, style)


def number_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A card with a table; the first cell of each row is its heading."""
    return (
        "<div class='card scroll-x'><table class='numbers'><thead><tr>"
        + "".join(f"<th>{escape(cell)}</th>" for cell in head)
        + "</tr></thead><tbody>"
        + "".join(_row(row) for row in rows)
        + "</tbody></table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    return f"<tr><th>{escape(cells[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:]) + "</tr>"

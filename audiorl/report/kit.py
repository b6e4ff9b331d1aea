"""The kit of pages: documents, sections, tables, and what policies wrote as HTML. All text from data is escaped here.

The run report, the live view, the study of rewards and the pages of benchmarks are made of it; audio.py makes players,
charts.py pictures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from pathlib import Path
from typing import Any

from audiorl.report.summary import show

ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = {"class='stream'": "streams.js", "class='chooser'": "steps.js"}
"""Scripts that a page needs which has such an element."""
_TAG = re.compile(r"(</?(?:think|answer)>)")
_WORD = re.compile(r"\s+|\w+|[^\w\s]")
NOTHING = "<span class='note'>wrote nothing</span>"


def asset(name: str) -> str:
    """Return the text of a style sheet or script."""
    return (ASSETS / name).read_text(encoding="utf-8")


# -- pages -------------------------------------------------------------------------------------------------------------


def document(title: str, body: str, css: str = "") -> str:
    """Return a whole page in one file: `body` is HTML, `css` is added to the style sheet."""
    scripts = "".join(f"<script>\n{asset(name)}</script>" for mark, name in _SCRIPTS.items() if mark in body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{asset('report.css')}{css}</style></head>"
        f"<body><main>{body}</main>{scripts}</body></html>\n"
    )


def eval_page(title: str, lead: str, sections: Iterable[str], *, style: str = "", note: str = "") -> str:
    """Return the page of a benchmark. `title`, `lead` and `note` are plain text, `sections` HTML, `style` more CSS."""
    body = "".join(f"<section>{section}</section>" for section in sections)
    header = f"<p class='over'>audiorl evaluation</p><h1>{escape(title)}</h1><p class='sub'>{escape(lead)}</p>"
    page = f"<header>{header}</header>{body}<footer>Written by audiorl.{escape(note)}</footer>"
    return document(title, page, style)


def write_page(path: Path, page: str) -> Path:
    """Write a page at once: a reader sees the old one or the new one. Half a character becomes a question mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def section(title: str, body: str, lead: str = "") -> str:
    """Return a section with a heading; `lead` (HTML) explains it; "" without a body."""
    sub = f"<p class='sub'>{lead}</p>" if lead else ""
    return f"<section><h2>{title}</h2>{sub}{body}</section>" if body else ""


def note(text: str, tag: str = "p") -> str:
    """Return a remark in small grey letters; `tag` "span" is one within a line."""
    return f"<{tag} class='note'>{escape(text)}</{tag}>"


def more(count: int, what: str) -> str:
    """Say how many `what` are not shown; "" for none."""
    return note(f"{count} more {what}") if count > 0 else ""


def fact(label: str, value: Any) -> str:
    """Return a small label with its value."""
    return f"<span class='fact'>{escape(label)} <b>{escape(str(value))}</b></span>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """Return a card with a table of HTML cells; the first cell of each row is its heading."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr><th>{first}</th>{''.join(f'<td>{c}</td>' for c in rest)}</tr>" for first, *rest in rows)
    cells = f"<table class='{kind}'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='card scroll-x'>{cells}</div>"


def number_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a card with a table of plain text."""
    return table(list(map(escape, head)), (list(map(escape, row)) for row in rows))


# -- what policies wrote -----------------------------------------------------------------------------------------------


def marked(text: str, limit: int | None = None, unit: str = "more characters") -> str:
    """Give `<think>` and `<answer>` parts their own look. A part that is never closed runs to the end of the text.

    Only `limit` characters are shown; how many follow is said.
    """
    out, inside = [], ""
    for piece in _TAG.split(text[:limit]):
        if not _TAG.fullmatch(piece):
            out.append(escape(piece))
            continue
        name, tag = piece.strip("</>"), f'<span class="tag">{escape(piece)}</span>'
        if not piece.startswith("</"):
            out.append(("</span>" if inside else "") + f'<span class="{name}">{tag}')
            inside = name
        elif name == inside:
            out.append(tag + "</span>")
            inside = ""
        else:
            out.append(tag)
    cut = len(text) - limit if limit is not None else 0
    return "".join(out) + "</span>" * bool(inside) + (f" {note(f'… {cut} {unit}', 'span')}" if cut > 0 else "")


def differences(before: str, after: str) -> tuple[str, str]:
    """Return both texts with the words that only one of them has in `<del>` and `<ins>`."""
    first, second = _WORD.findall(before), _WORD.findall(after)
    sides: tuple[list[str], list[str]] = [], []
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for side, words, tag in ((sides[0], first[a:b], "del"), (sides[1], second[c:d], "ins")):
            text = escape("".join(words))
            side.append(f"<{tag}>{text}</{tag}>" if kind != "equal" and text else text)
    return "".join(sides[0]), "".join(sides[1])


def prompt(text: str) -> str:
    """Return a prompt with its `[audio]` marks as small pills."""
    return escape(text.strip()).replace("[audio]", '<span class="pill">♪ audio</span>')


def sign_of(value: float) -> str:
    """Return the CSS class of a reward: green gives, red takes, grey is zero."""
    return "plus" if value > 0 else "minus" if value < 0 else "zero"


def chip(name: str, value: float, kind: str = "", number: str = "") -> str:
    """Return a coloured value, stronger for a larger one. `number` replaces the value as `show` writes it."""
    strength = min(1.0, abs(value)) if value == value else 0.0
    return (
        f'<span class="chip {sign_of(value)} {kind}" style="--strength:{strength:.2f}">{escape(str(name))} '
        f"<b>{escape(number or show(value))}</b></span>"
    )


def chips(parts: Mapping[str, float] | None) -> str:
    """Return one chip per reward part."""
    return "".join(chip(name, value) for name, value in (parts or {}).items())

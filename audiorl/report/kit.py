"""The kit of pages: templates, documents, tables, and what policies wrote as HTML.

The run report, the live view, the study of rewards and the pages of benchmarks are made of it; audio.py makes players,
charts.py pictures. HTML is `Markup`; every other text is escaped where it enters a template or `Markup.format`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from audiorl.report.summary import metric_name, show

ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = {"class='stream'": "streams.js", "class='chooser'": "steps.js"}
"""Scripts that a page needs which has such an element."""
_TAG = re.compile(r"(</?(?:think|answer)>)")
_WORD = re.compile(r"\s+|\w+|[^\w\s]")
NOTHING = Markup("<span class='note'>wrote nothing</span>")
TEMPLATES = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def asset(name: str) -> Markup:
    """Return the text of a style sheet or script."""
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def macros(name: str) -> Any:
    """Return the macros of a template of assets/ as functions that return `Markup`."""
    return TEMPLATES.get_template(name).module


# -- pages -------------------------------------------------------------------------------------------------------------


def document(title: str, body: Markup, css: str = "") -> str:
    """Return a whole page in one file; `css` is added to the style sheet."""
    scripts = Markup("").join(
        Markup("<script>\n{}</script>").format(asset(s)) for m, s in _SCRIPTS.items() if m in body
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{asset('report.css')}{css}</style></head>"
        f"<body><main>{body}</main>{scripts}</body></html>\n"
    )


def eval_page(title: str, lead: str, sections: Iterable[str], *, style: str = "", note: str = "") -> str:
    """Return the page of a benchmark. `title`, `lead` and `note` are plain text, `sections` HTML, `style` more CSS."""
    body = macros("kit.html").eval_page(title, lead, list(map(Markup, sections)), note)
    return document(title, body, style)


def write_page(path: Path, page: str) -> Path:
    """Write a page at once: a reader sees the old one or the new one. Half a character becomes a question mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def note(text: str, tag: str = "p") -> Markup:
    """Return a remark in small grey letters; `tag` "span" is one within a line."""
    return Markup("<{0} class='note'>{1}</{0}>").format(tag, text)


def more(count: int, what: str) -> Markup:
    """Say how many `what` are not shown; "" for none."""
    return note(f"{count} more {what}") if count > 0 else Markup("")


def fact(label: str, value: Any) -> Markup:
    """Return a small label with its value."""
    return Markup("<span class='fact'>{} <b>{}</b></span>").format(label, value)


def number_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> Markup:
    """Return a card with a table; the first cell of each row is its heading. Cells are plain text or `Markup`."""
    table: Markup = macros("kit.html").table(head, list(rows), kind)
    return table


# -- what policies wrote -----------------------------------------------------------------------------------------------


def marked(text: str, limit: int | None = None, unit: str = "more characters") -> Markup:
    """Give `<think>` and `<answer>` parts their own look. A part that is never closed runs to the end of the text.

    Only `limit` characters are shown; how many follow is said.
    """
    out, inside = Markup(""), ""
    for piece in _TAG.split(text[:limit]):
        if not _TAG.fullmatch(piece):
            out += piece
            continue
        name, tag = piece.strip("</>"), Markup('<span class="tag">{}</span>').format(piece)
        if not piece.startswith("</"):
            out += Markup("</span>" * bool(inside) + f'<span class="{name}">') + tag
            inside = name
        elif name == inside:
            out += tag + Markup("</span>")
            inside = ""
        else:
            out += tag
    cut = len(text) - limit if limit is not None else 0
    return out + Markup("</span>") * bool(inside) + (" " + note(f"… {cut} {unit}", "span") if cut > 0 else "")


def differences(before: str, after: str) -> tuple[Markup, Markup]:
    """Return both texts with the words that only one of them has in `<del>` and `<ins>`."""
    first, second = _WORD.findall(before), _WORD.findall(after)
    sides = [Markup(""), Markup("")]
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for side, words, tag in ((0, first[a:b], "del"), (1, second[c:d], "ins")):
            text = "".join(words)
            sides[side] += Markup("<{0}>{1}</{0}>").format(tag, text) if kind != "equal" and text else text
    return sides[0], sides[1]


def prompt(text: str) -> Markup:
    """Return a prompt with its `[audio]` marks as small pills."""
    return Markup(escape(text.strip()).replace("[audio]", Markup('<span class="pill">♪ audio</span>')))


def sign_of(value: float) -> str:
    """Return the CSS class of a reward: green gives, red takes, grey is zero."""
    return "plus" if value > 0 else "minus" if value < 0 else "zero"


def chip(name: str, value: float, kind: str = "", number: str = "") -> Markup:
    """Return a coloured value, stronger for a larger one. `number` replaces the value as `show` writes it."""
    strength = min(1.0, abs(value)) if value == value else 0.0
    return Markup('<span class="chip {} {}" style="--strength:{:.2f}">{} <b>{}</b></span>').format(
        sign_of(value), kind, strength, name, number or show(value)
    )


def chips(parts: Mapping[str, float] | None) -> Markup:
    """Return one chip per reward part."""
    return Markup("").join(chip(name, value) for name, value in (parts or {}).items())


for _of_templates in (show, metric_name, marked, prompt, note, more, fact, chip, chips):
    TEMPLATES.globals[_of_templates.__name__] = _of_templates
TEMPLATES.globals["NOTHING"] = NOTHING

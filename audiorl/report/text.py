"""What a policy wrote, as HTML: thinking and answer told apart, audio marks visible, everything escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from html import escape

from audiorl.report.summary import show

_TAG = re.compile(r"(</?(?:think|answer)>)")
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


def marked(text: str) -> str:
    """`<think>` and `<answer>` parts get their own look. A part that is never closed runs to the end of the text."""
    out, inside = [], ""
    for piece in _TAG.split(text):
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
    return "".join(out) + ("</span>" if inside else "")


def differences(before: str, after: str) -> tuple[str, str]:
    """Both texts with the words that only one of them has in `<del>` and `<ins>`."""
    first, second = _WORD.findall(before), _WORD.findall(after)
    sides: tuple[list[str], list[str]] = [], []
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for side, words, tag in ((sides[0], first[a:b], "del"), (sides[1], second[c:d], "ins")):
            text = escape("".join(words))
            side.append(f"<{tag}>{text}</{tag}>" if kind != "equal" and text else text)
    return "".join(sides[0]), "".join(sides[1])


def prompt(text: str) -> str:
    """A prompt with its `[audio]` marks as small pills."""
    return escape(text.strip()).replace("[audio]", '<span class="pill">♪ audio</span>')


def chips(parts: Mapping[str, float]) -> str:
    """One chip per reward part: green gives, red takes, grey is zero; stronger colour for a larger value."""
    return "".join(chip(name, value) for name, value in parts.items())


def chip(name: str, value: float, kind: str = "", number: str = "") -> str:
    """`number` replaces the value as `show` writes it."""
    sign = "plus" if value > 0 else "minus" if value < 0 else "zero"
    strength = min(1.0, abs(value)) if value == value else 0.0
    return (
        f'<span class="chip {sign} {kind}" style="--strength:{strength:.2f}">{escape(str(name))} '
        f"<b>{escape(number or show(value))}</b></span>"
    )

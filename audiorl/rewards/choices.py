"""Which choice does a text name? By letter ("B", "(b)", "B.", "B) foo") or by its own words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?")
_LETTER_TEXT = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[.:)])[.:]?\s*(\S.*)", re.DOTALL)
_LETTER_SPACE_TEXT = re.compile(r"([A-Za-z])\s+(\S.*)", re.DOTALL)


def normalize_text(text: str) -> str:
    """The text without differences of case, punctuation and whitespace: "Acoustic-guitar. " -> "acoustic guitar".

    What carries meaning stays: signs, points and slashes of numbers ("-5", "3/4"), "%", and the sharp of "C#".
    """
    text = re.sub(r"['’]", "", unicodedata.normalize("NFKC", text).casefold())  # joins: don't -> dont
    padded = f" {text} "
    characters = (
        char if char in "%#" or not unicodedata.category(char).startswith("P") or _numeric(before, char, after) else " "
        for before, char, after in zip(padded, padded[1:], padded[2:], strict=False)
    )
    return " ".join("".join(characters).split())


def _numeric(before: str, char: str, after: str) -> bool:
    return after.isdigit() and (before.isdigit() or (before.isspace() and char in "-."))


def _casefold(text: str) -> str:
    return " ".join(text.casefold().split())


def _without_label(choice: str, index: int) -> str:
    """Choices are sometimes written with their letter: "(B) cat" -> "cat" for the second one."""
    match = _LETTER_TEXT.fullmatch(choice.strip())
    if match and (match[1] or match[2]).upper() == chr(ord("A") + index):
        return match[3]
    return choice


def match_choice(text: str, choices: Sequence[str]) -> int | None:
    """The index of the choice that `text` names, None if it names none or more than one.

    The choice's own words come first, so a choice that happens to be called "A" is found by name; comparison goes from
    exact to normalised, which keeps "C" and "C#" apart. A letter together with the words of another choice names none.
    """
    plain = [_without_label(c, i) for i, c in enumerate(choices)]
    text = text.strip()
    named = _by_text(text, choices)
    if named is None:
        named = _by_text(text, plain)
    if named is not None:
        return named
    if match := _LETTER.fullmatch(text):
        return _index(match[1], choices)
    if match := _LETTER_TEXT.fullmatch(text):
        index = _index(match[1] or match[2], choices)
        spoken = _by_text(match[3], plain)
        return index if spoken in (None, index) else None
    if match := _LETTER_SPACE_TEXT.fullmatch(text):  # "B cat"; but "A cat" alone may well be an article
        index = _index(match[1], choices)
        return index if index is not None and _by_text(match[2], plain) == index else None
    return None


def _by_text(text: str, choices: Sequence[str]) -> int | None:
    forms: tuple[Callable[[str], str], ...] = (str.strip, _casefold, normalize_text)
    for form in forms:
        wanted = form(text)
        hits = [i for i, choice in enumerate(choices) if wanted and form(choice) == wanted]
        if hits:
            return hits[0] if len(hits) == 1 else None
    return None


def _index(letter: str, choices: Sequence[str]) -> int | None:
    index = ord(letter.upper()) - ord("A")
    return index if index < len(choices) else None

"""Units from word timings: a sentence pair becomes smaller pairs where both sides have equally many clauses.

The rule: a clause ends at one of `, ; : . ! ? …` (or its Chinese, Japanese, Arabic or Devanagari form) that a space, a
closing quote or the end of the text follows; the full-width marks need no space. When source and target have equally
many clauses, the n-th belong together, and each unit lasts from the start of its first word to the end of its last.
Otherwise the pair stays one unit, from its first word to its last. That is as fine as can be told without an alignment
of words, and never lets a translation be said before its source was heard, as long as clauses keep their order.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.simulst.streams import Unit

_CLAUSE = re.compile(r"""(?<=[,;:.!?…،؛؟۔।])["'”’»)\]]*\s+|(?<=[，、；：。！？])["”’」』）]*\s*""")


@dataclass(frozen=True)
class Word:
    """A spoken word, `start` and `end` in seconds."""

    word: str
    start: float
    end: float


def clauses(text: str) -> list[str]:
    """The clauses of a text, their punctuation included; marks without a letter stay with their neighbour.

    >>> clauses("Wait, 3.5 minutes: please hold…")
    ['Wait,', '3.5 minutes:', 'please hold…']
    """
    out: list[str] = []
    at = 0
    for end in [*(match.end() for match in _CLAUSE.finditer(text)), len(text)]:
        piece, at = text[at:end].strip(), end
        if not piece:
            continue
        if out and not (_letters(piece) and _letters(out[-1])):
            out[-1] = f"{out[-1]} {piece}"
        else:
            out.append(piece)
    return out


def align_clauses(source: str, target: str, words: Sequence[Word]) -> tuple[Unit, ...]:
    """The units of a sentence pair by the rule above. Raises ValueError for words that are not those of `source`."""
    parts, said = clauses(source), clauses(target)
    if len(parts) != len(said):
        parts, said = [source.strip()], [target.strip()]
    spans = _spans(parts, words)
    return tuple(Unit(a, b, t, s) for (a, b), s, t in zip(spans, parts, said, strict=True))


def _spans(parts: Sequence[str], words: Sequence[Word]) -> list[tuple[float, float]]:
    """Start and end of each part, whose letters must be those of consecutive words."""
    spans, k = [], 0
    for part in parts:
        wanted, first, heard = _letters(part), k, ""
        while k < len(words) and len(heard) < len(wanted):
            heard += _letters(words[k].word)
            k += 1
        if heard != wanted or k == first:
            found = " ".join(w.word.strip() for w in words[first:k]) or "nothing"
            raise ValueError(f"the words {found!r} stand where the source has {part!r}; give the words of the source")
        while k < len(words) and not _letters(words[k].word):
            k += 1
        spans.append((words[first].start, words[k - 1].end))
    if k < len(words):
        raise ValueError(f"the word {words[k].word!r} follows after the source has ended; give the words of the source")
    return spans


def _letters(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())

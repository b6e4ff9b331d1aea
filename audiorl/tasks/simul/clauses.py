"""Units from word timings: a sentence pair is split into clause pairs where both sides have equally many clauses.

A clause ends at one of `, ; : . ! ? …` (or its Chinese, Japanese, Arabic or Devanagari form) before a space, a closing
quote or the end of the text; full-width marks need no space. If source and target have equally many clauses, the n-th
clauses form a unit, from the start of its first word to the end of its last. Otherwise the pair is one unit. No word
alignment is needed, and no unit ends before its source as long as the translation keeps the order of the clauses.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.tasks.simul.streams import Unit

_CLAUSE = re.compile(r"""(?<=[,;:.!?…،؛؟۔।])["'”’»)\]]*\s+|(?<=[，、；：。！？])["”’」』）]*\s*""")


@dataclass(frozen=True)
class Word:
    """A spoken word, `start` and `end` in seconds."""

    word: str
    start: float
    end: float


def clauses(text: str) -> list[str]:
    """The clauses of a text with their punctuation; marks without a letter join the clause before or after.

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
    """The units of a sentence pair by the rule above.

    Raises ValueError for words that are not those of `source`, that end before they start or are not in order.
    """
    begun = 0.0
    for word in words:
        if word.end < word.start:
            raise ValueError(f"the word {word.word!r} ends at {word.end:g} s, before it starts at {word.start:g} s")
        if word.start < begun:
            raise ValueError(f"the word {word.word!r} starts at {word.start:g} s, before the previous one; sort them")
        begun = word.start
    sources, targets = clauses(source), clauses(target)
    if len(sources) != len(targets):
        sources, targets = [source.strip()], [target.strip()]
    spans = _spans(sources, words)
    return tuple(Unit(a, b, t, s) for (a, b), s, t in zip(spans, sources, targets, strict=True))


def _spans(sources: Sequence[str], words: Sequence[Word]) -> list[tuple[float, float]]:
    """Start and end of each clause, whose letters must be those of consecutive words."""
    spans, k = [], 0
    for clause in sources:
        clause_letters, first, letters = _letters(clause), k, ""
        while k < len(words) and len(letters) < len(clause_letters):
            letters += _letters(words[k].word)
            k += 1
        if letters != clause_letters or k == first:
            text = " ".join(w.word.strip() for w in words[first:k]) or "nothing"
            raise ValueError(f"the words {text!r} stand where the source has {clause!r}; give the words of the source")
        while k < len(words) and not _letters(words[k].word):
            k += 1
        spans.append((words[first].start, words[k - 1].end))
    if k < len(words):
        raise ValueError(f"the word {words[k].word!r} follows after the source has ended; give the words of the source")
    return spans


def _letters(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())

"""Text without audio, to see what of a text model is left after training on speech.

Bundled are passages of Python's own documentation, which Python brings along (module pydoc_data, PSF licence), and
questions about words, numbers and the calendar that are made here. A user's files take their place.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from audiorl.data.rows import read_checked
from audiorl.data.schema import check, check_limit
from audiorl.data.schema.manifests import PassageColumns, TextQuestionColumns

BUNDLED = "bundled"
PASSAGE = (200, 1200)
"""Characters of a bundled passage."""
CHOICES = 4


@dataclass(frozen=True)
class TextQuestion:
    """A question with its answer, one of the choices."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: str


def read_passages(source: str | Path, limit: int | None = None) -> list[str]:
    """Passages of running text: `bundled`, a .txt file (divided by empty lines), or rows with `text`."""
    check_limit(limit)
    if str(source) == BUNDLED:
        from pydoc_data.topics import topics  # paragraphs of prose, without code and lists

        paragraphs = (p for _, topic in sorted(topics.items()) for p in re.split(r"\n\s*\n", topic))
        prose = (" ".join(p.split()) for p in paragraphs if p[:1].isalpha() and not re.search(r"[=<>_*`|]|::", p))
        passages = [text for text in prose if text.endswith(".") and PASSAGE[0] <= len(text) <= PASSAGE[1]]
    elif Path(source).suffix.lower() == ".txt":
        try:
            text = Path(source).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
        passages = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip()]
    else:
        passages = [row.text.strip() for _, row in read_checked(Path(source), lambda row: check(row, PassageColumns))]
    if not passages:
        raise ValueError(f"{source}: no passage of text in it")
    return passages[:limit]


def read_questions(source: str | Path, limit: int | None = None) -> list[TextQuestion]:
    """Questions with choices: `bundled`, or rows with question, choices and answer (the text of a choice)."""
    check_limit(limit)
    if str(source) == BUNDLED:
        return bundled_questions()[:limit]
    questions = []
    for number, row in read_checked(Path(source), lambda row: check(row, TextQuestionColumns)):
        if row.answer not in row.choices:
            where = f"{source}: row {number}, field 'answer'"
            raise ValueError(f"{where}: {row.answer!r} is not among the choices; give one of their texts")
        questions.append(TextQuestion(str(number), row.question, tuple(row.choices), row.answer))
    return questions[:limit]


def bundled_questions() -> list[TextQuestion]:
    """107 questions of eight kinds, four choices each, the wrong ones of the same kind; always the same."""
    rng = random.Random(0)
    days = _DAYS.split()
    months = _MONTHS.split()
    numbers = _NUMBERS.split()
    opposites = dict(pair.split() for pair in _OPPOSITES.split(","))
    plurals = dict(pair.split() for pair in _PLURALS.split(","))
    pasts = dict(pair.split() for pair in _PASTS.split(","))
    sums = [(i % 6 + 1, i % 7) for i in range(16)]
    things = [(name, word) for name, words in _GROUPS.items() for word in words.split()]
    kinds: dict[str, tuple[list[tuple[str, str]], Sequence[str]]] = {
        "day": ([(f"Which day comes after {d}?", days[(i + 1) % 7]) for i, d in enumerate(days)], days),
        "month": ([(f"Which month comes after {m}?", months[(i + 1) % 12]) for i, m in enumerate(months)], months),
        "sum": ([(f"How much is {numbers[a]} plus {numbers[b]}?", numbers[a + b]) for a, b in sums], numbers),
        "next": ([(f"Which number comes after {n}?", numbers[i + 1]) for i, n in enumerate(numbers[:12])], numbers),
        "opposite": ([(f"What is the opposite of {a}?", b) for a, b in opposites.items()], list(opposites.values())),
        "plural": ([(f"What is the plural of {a}?", b) for a, b in plurals.items()], list(plurals.values())),
        "past": ([(f"What is the past tense of {a}?", b) for a, b in pasts.items()], list(pasts.values())),
        "group": (
            [(f"What is a {word}: an animal, a fruit, a colour or a vehicle?", name) for name, word in things],
            list(_GROUPS),
        ),
    }
    questions = []
    for kind, (pairs, pool) in kinds.items():
        for number, (question, answer) in enumerate(pairs):
            choices = [answer, *rng.sample(sorted(set(pool) - {answer}), CHOICES - 1)]
            rng.shuffle(choices)
            questions.append(TextQuestion(f"{kind}/{number}", question, tuple(choices), answer))
    return questions


_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_MONTHS = "January February March April May June July August September October November December"
_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
_OPPOSITES = (
    "hot cold,big small,up down,left right,day night,open closed,fast slow,young old,early late,full empty,"
    "wet dry,heavy light,rich poor,strong weak,good bad,high low"
)
_PLURALS = (
    "mouse mice,child children,foot feet,tooth teeth,man men,woman women,knife knives,city cities,box boxes,"
    "leaf leaves,baby babies,bus buses"
)
_PASTS = (
    "go went,eat ate,see saw,run ran,buy bought,write wrote,sing sang,take took,give gave,come came,think thought,"
    "find found,know knew,speak spoke,sleep slept,drink drank"
)
_GROUPS = {
    "an animal": "dog horse sheep lion",
    "a fruit": "banana pear cherry lemon",
    "a colour": "red green yellow purple",
    "a vehicle": "car truck bicycle bus",
}

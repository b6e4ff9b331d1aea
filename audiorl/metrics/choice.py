"""Multiple choice: the matcher of MMAU and MMAR."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TOKEN = re.compile(r"\b\w+\b")


def word_set(text: str) -> set[str]:
    return set(_TOKEN.findall(text.lower()))


def mmau_match(answer: str, prediction: str, choices: Sequence[str]) -> bool:
    """Whether `prediction` (free text) gives `answer`, by the words it holds.

    With tokens = the set of lower-cased \\b\\w+\\b: the prediction has tokens, all of the answer's are among them, and
    none that belongs to a wrong choice and not to the answer. A letter ("B") is not matched, and so is no prediction
    that repeats the choices. Source: MMAU's official evaluation script, which MMAR shares.
    """
    wanted, given = word_set(answer), word_set(prediction)
    wrong = set().union(*(word_set(choice) for choice in choices)) - wanted
    return bool(given) and wanted <= given and not given & wrong

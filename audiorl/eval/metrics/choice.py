"""Multiple choice: the matchers of MMAU, MMAR and MMSU, and the rubric score of MMAR."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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


def mmsu_letter(response: str) -> str | None:
    """The letter A to D that a response to MMSU gives: its first character, else the last but one ("It is A.").

    None where neither is such a letter. Source: MMSU's official mmsu_evaluation.py, which leaves such responses out of
    the total; count them as wrong.
    """
    text = response.strip().replace("\n", "")
    if not text or text == "None":
        return None
    return next((letter for letter in (text[0], text[-2:-1]) if letter and letter in "ABCD"), None)


def mmsu_match(answer: str, response: str, choices: Mapping[str, str]) -> bool:
    """Whether `response` gives the letter of `answer`, the text of a choice; `choices` are texts by letter."""
    letter = mmsu_letter(response)
    return letter is not None and choices.get(letter) == answer


def rubric_score(correct: bool, ratings: Sequence[str], rubric: Sequence[Mapping[str, Any]]) -> float:
    """A thought's score in [0, 1] from the texts of several raters.

    A rating holds a JSON list with a `score` for each item of the rubric; it counts the points over the most that the
    items' `choices` allow. The mean of the ratings leaves out the lowest and the highest where there are three or more.
    A wrong answer scores 0. Raises ValueError for a rating that does not fit the rubric. Source: MMAR-Rubrics, official
    evaluation_rubrics.py (five raters).
    """
    if not correct:
        return 0.0
    if not ratings:
        raise ValueError("no ratings of a right answer")
    values = sorted(_rating(text, rubric) for text in ratings)
    values = values[1:-1] if len(values) >= 3 else values
    return sum(values) / len(values)


def _rating(text: str, rubric: Sequence[Mapping[str, Any]]) -> float:
    match = re.search(r"\[\s*\{.*\}\s*\]", text, re.DOTALL)
    try:
        items = json.loads(match[0] if match else text)
    except ValueError as error:
        raise ValueError(f"a rating is not JSON ({error})") from error
    if not isinstance(items, list) or len(items) != len(rubric):
        raise ValueError(f"a rating needs a list of {len(rubric)} items, as the rubric has")
    points, most = 0.0, 0.0
    for item, criterion in zip(items, rubric, strict=True):
        score: Any = item.get("score") if isinstance(item, dict) else None
        if isinstance(score, bool) or score not in criterion["choices"]:
            raise ValueError(f"a rating gives {score!r} for {criterion['name']!r}, not one of {criterion['choices']}")
        points += score
        most += max(criterion["choices"])
    return points / most if most else 0.0

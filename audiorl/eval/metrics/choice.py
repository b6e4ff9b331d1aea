"""Multiple choice and repeated attempts: the rules of MMAU, MMAR and MMSU, pass@k, divergences between choices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TOKEN = re.compile(r"\b\w+\b")


def word_set(text: str) -> set[str]:
    """Return the lower-cased words of a text."""
    return set(_TOKEN.findall(text.lower()))


def mmau_match(answer: str, prediction: str, choices: Sequence[str]) -> bool:
    """Return whether `prediction` (free text) gives `answer`, by the words it holds.

    With tokens = the set of lower-cased \\b\\w+\\b: the prediction has tokens, all of the answer's are among them, and
    none that belongs to a wrong choice and not to the answer. A letter ("B") is not matched, and so is no prediction
    that repeats the choices. Source: MMAU's official evaluation script, which MMAR shares.
    """
    wanted, given = word_set(answer), word_set(prediction)
    wrong = set().union(*(word_set(choice) for choice in choices)) - wanted
    return bool(given) and wanted <= given and not given & wrong


def mmsu_letter(response: str) -> str | None:
    """Return the letter A to D that a response to MMSU gives: its first character, else the last but one ("It is A.").

    None where neither is such a letter. Source: MMSU's official mmsu_evaluation.py, which leaves such responses out of
    the total; count them as wrong.
    """
    text = response.strip().replace("\n", "")
    if not text or text == "None":
        return None
    return next((letter for letter in (text[0], text[-2:-1]) if letter and letter in "ABCD"), None)


def mmsu_match(answer: str, response: str, choices: Mapping[str, str]) -> bool:
    """Return whether `response` gives the letter of `answer`, the text of a choice; `choices` are texts by letter."""
    letter = mmsu_letter(response)
    return letter is not None and choices.get(letter) == answer


def rubric_score(correct: bool, ratings: Sequence[str], rubric: Sequence[Mapping[str, Any]]) -> float:
    """Return a thought's score in [0, 1] from the texts of several raters.

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


# -- pass@k ------------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k): the unbiased estimate from n attempts of which c are right.

    It is the share of all k-subsets of the attempts that hold a right one. Computed as a product, which does not
    overflow: 1 - Π_{i=n-c+1..n} (1 - k/i). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1.
    """
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: {c} right out of {n} attempts")
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: k must lie in [1, {n}], the number of attempts, got {k}")
    if n - c < k:
        return 1.0
    miss = 1.0
    for i in range(n - c + 1, n + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss


def pass_at_k_curve(correct: Sequence[Sequence[bool]], ks: Sequence[int]) -> dict[int, float]:
    """Return mean pass@k over problems for each k. `correct[p]` tells of problem p which attempts were right.

    Compare a base model with its trained successor over k: training tends to raise small k, the base to cover more at
    large k. Raises ValueError without problems or where a problem has fewer than max(ks) attempts.
    """
    if not correct:
        raise ValueError("pass@k: no problems")
    counts = [(len(attempts), sum(map(bool, attempts))) for attempts in correct]
    return {k: sum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in ks}


def crossings(a: Sequence[float], b: Sequence[float]) -> list[int]:
    """Return the k, counted from 1, at which the curve `a` changes from above `b` to below it, or back.

    `a[k - 1]` and `b[k - 1]` belong to k. Where they are equal neither is above.
    """
    last = 0.0
    ks = []
    for k, (x, y) in enumerate(zip(a, b, strict=True), 1):
        sign = float(x > y) - float(x < y)
        if sign and last and sign != last:
            ks.append(k)
        last = sign or last
    return ks


# -- divergences, in nats, of log-probs [C] ----------------------------------------------------------------------------


def log_distribution(scores_C: Floats) -> Floats:
    """Return log-probs [C] that add up to 1: scores - log Σ exp(scores)."""
    return scores_C - np.logaddexp.reduce(scores_C)


def kl_divergence(p_C: Floats, q_C: Floats) -> float:
    """Return KL(p ‖ q) = Σ p (log p - log q) of log-probs p and q: 0 where equal, not symmetric, without bound."""
    return float(np.sum(np.exp(p_C) * (p_C - q_C)))


def jensen_shannon(p_C: Floats, q_C: Floats) -> float:
    """Return ½ KL(p ‖ m) + ½ KL(q ‖ m), m = ½ (p + q), of log-probs p and q: symmetric, between 0 and log 2 = 0.693.

    Source: Lin 1991, Divergence measures based on the Shannon entropy, eq. 4.1.
    """
    middle_C = np.logaddexp(p_C, q_C) - np.log(2)
    return (kl_divergence(p_C, middle_C) + kl_divergence(q_C, middle_C)) / 2

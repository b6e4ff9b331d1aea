"""Questions whose text does not give the answer away: the choices and their order.

A model that cannot listen may still learn from a training set which choices tend to be right. It learns nothing where
each text is offered as a wrong choice three times as often as it is the right one, and where each of the four places
holds the right choice equally often. `with_choices` draws the wrong choices so; `text_only_accuracy` checks it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from audiorl.eval.metrics.choice import word_set

PLACES = 4


@dataclass(frozen=True)
class Draft:
    """A question before its choices are drawn. The maker of a category fills it in."""

    id: str
    """Unique in the benchmark; also the name of the audio file."""
    task: str
    """speech, sound or music, as in MMAU."""
    kind: str
    """The sub-category, such as `language` or `tempo`."""
    question: str
    answer: str
    wave: Callable[[], np.ndarray]
    """Makes the clip: mono float32 [T] at 16 kHz."""
    sources: tuple[str, ...]
    """What the audio is made from: recordings, sound files, seeds. Both splits share none."""
    licence: str
    difficulty: str = "medium"
    """easy, medium or hard, as in MMAU: what we expect of a model that listens."""
    choices: tuple[str, ...] = ()
    """The choices where they are the same for every question of the kind; () draws them among `pool`."""
    pool: str = ""
    """Wrong choices are right ones of other questions of the same kind and pool, such as phrases of a language."""


@dataclass(frozen=True)
class Question:
    """A draft with its four choices in order."""

    draft: Draft
    choices: tuple[str, ...]


def with_choices(drafts: Sequence[Draft], seed: int) -> list[Question]:
    """Return the drafts of one split with their choices, in the same order.

    A draft whose pool has too few other answers is left out, and of answers that are right in more than a fourth of
    their pool's questions as many as are too many.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for i, draft in enumerate(drafts):
        groups.setdefault((draft.kind, draft.pool), []).append(i)
    questions: dict[int, Question] = {}
    for (kind, pool), members in groups.items():
        rng = random.Random(f"{seed}/{kind}/{pool}")
        members = _without_frequent(members, [drafts[i] for i in members], rng)
        offered = _wrong_choices([drafts[i] for i in members], rng)
        places = [n % PLACES for n in range(len(members))]
        rng.shuffle(places)
        for i, wrong, place in zip(members, offered, places, strict=True):
            if wrong is not None:
                questions[i] = Question(drafts[i], (*wrong[:place], drafts[i].answer, *wrong[place:]))
    return [questions[i] for i in sorted(questions)]


def _without_frequent(members: list[int], drafts: Sequence[Draft], rng: random.Random) -> list[int]:
    """Return the members after questions for frequent answers were removed until none is right in more than a
    fourth."""
    by_answer: dict[str, list[int]] = {}
    for i, draft in zip(members, drafts, strict=True):
        by_answer.setdefault(draft.answer, []).append(i)
    for same in by_answer.values():
        rng.shuffle(same)
    while len(by_answer) >= PLACES:
        total = sum(map(len, by_answer.values()))
        longest = max(by_answer.values(), key=len)
        if PLACES * len(longest) <= total:
            break
        longest.pop()
    return sorted(i for same in by_answer.values() for i in same)


def _wrong_choices(drafts: Sequence[Draft], rng: random.Random) -> list[tuple[str, ...] | None]:
    """Three wrong choices a draft, in random order; each answer is used about three times as often as it is right."""
    remaining = Counter({answer: (PLACES - 1) * n for answer, n in Counter(d.answer for d in drafts).items()})
    words = {answer: frozenset(word_set(answer)) for answer in remaining}
    order = list(range(len(drafts)))
    rng.shuffle(order)
    offered: list[tuple[str, ...] | None] = [None] * len(drafts)
    for i in order:
        wrong: list[str]
        if drafts[i].choices:
            wrong = [choice for choice in drafts[i].choices if choice != drafts[i].answer]
        else:
            wrong = []
            used = {words[drafts[i].answer]}  # the benchmark's rule compares sets of words
            for answer, _ in sorted(remaining.items(), key=lambda entry: (-entry[1], rng.random())):
                if len(wrong) < PLACES - 1 and words[answer] not in used:
                    wrong.append(answer)
                    used.add(words[answer])
            remaining.subtract(wrong)
        rng.shuffle(wrong)
        if len(wrong) == PLACES - 1:
            offered[i] = tuple(wrong)
    return offered


def text_only_accuracy(train: Sequence[Question], held_out: Sequence[Question]) -> float:
    """Return how often a classifier that never listens is right on `held_out`.

    For every question of a kind it takes the choice that was right most often, of the times it was offered, in `train`;
    of equally good ones the place that was right most often decides.
    """
    offered: Counter[tuple[str, str]] = Counter()
    right: Counter[tuple[str, str]] = Counter()
    place: Counter[tuple[str, int]] = Counter()
    for q in train:
        offered.update((q.draft.kind, choice) for choice in q.choices)
        right[q.draft.kind, q.draft.answer] += 1
        place[q.draft.kind, q.choices.index(q.draft.answer)] += 1

    def guess(q: Question) -> str:
        kind = q.draft.kind
        scores = {
            choice: (right[kind, choice] + 1) / (offered[kind, choice] + PLACES)  # 1 / 4 for one never offered
            for choice in q.choices
        }
        return max(q.choices, key=lambda choice: (scores[choice], place[kind, q.choices.index(choice)]))

    return float(np.mean([guess(q) == q.draft.answer for q in held_out])) if held_out else 0.0

"""The matcher against a second implementation, written from the benchmark's description alone."""

import random

import pytest

from audiorl.eval.metrics import mmau_match
from audiorl.eval.metrics.choice import mmsu_letter, mmsu_match, rubric_score


def tokens_by_hand(text: str) -> list[str]:
    """Maximal runs of word characters (letters, digits, underscore of any script), lower-cased, without `re`."""
    out, run = [], ""
    for char in text.lower() + " ":
        if char.isalnum() or char == "_":
            run += char
        elif run:
            out.append(run)
            run = ""
    return out


def official(answer: str, prediction: str, choices: list[str]) -> bool:
    given = tokens_by_hand(prediction)
    gold = tokens_by_hand(answer)
    if len(given) == 0:
        return False
    for token in gold:
        if token not in given:
            return False
    for choice in choices:
        for token in tokens_by_hand(choice):
            if token not in gold and token in given:
                return False
    return True


POOL = [
    *["dog", "Dog", "dogs", "hot-dog", "dog's", "cat", "the", "a", "A", "B", "(b)", "C#", "3", "3/4", "1,000", "x_y"],
    *[
        "café",
        "CAFÉ",
        "Straße",
        "STRASSE",
        "İstanbul",
        "狗",
        "狗叫",
        "Ж",
        "ﬁre",
        "½",
        "²",
        "..",
        "—",
        "",
        " ",
        "\n",
        "😀",
    ],
]


def random_text(rng: random.Random, most: int) -> str:
    return rng.choice([" ", ", ", "\n", "-", ""]).join(rng.choices(POOL, k=rng.randint(0, most)))


def test_agrees_with_the_second_implementation() -> None:
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(6000):
        choices = [random_text(rng, 3) for _ in range(rng.randint(0, 5))]
        answer = rng.choice(choices) if choices and rng.random() < 0.9 else random_text(rng, 2)
        prediction = rng.choice(
            [
                random_text(rng, 5),
                answer,
                answer.upper(),
                f"{answer} {answer}",
                f"The answer is {answer}.",
                f"{answer}s",
                answer[:-1],
                f"{answer} not {rng.choice(choices or [''])}",
                "",
            ]
        )
        expected = official(answer, prediction, choices)
        assert mmau_match(answer, prediction, choices) is expected, (answer, prediction, choices)
        seen[expected] += 1
    assert min(seen.values()) > 1000


@pytest.mark.parametrize(
    ("answer", "prediction", "choices", "expected"),
    [
        ("dog", "dog", ["dog", "cat"], True),
        ("dog", "It is a DOG.", ["dog", "cat"], True),
        ("dog", "dog, not cat", ["dog", "cat"], False),
        ("dog", "dogs", ["dog", "cat"], False),
        ("dog", "", ["dog", "cat"], False),
        ("dog", "!!", ["dog", "cat"], False),
        ("dog", "A", ["dog", "cat"], False),
        ("big dog", "dog", ["big dog", "cat"], False),
        ("dog", "big dog", ["dog", "big cat"], False),
        ("big dog", "big dog", ["big dog", "big cat"], True),  # "big" belongs to the answer too
        ("...", "anything", ["...", "cat"], True),  # an answer without words is matched by any words
    ],
)
def test_by_hand(answer: str, prediction: str, choices: list[str], expected: bool) -> None:
    assert mmau_match(answer, prediction, choices) is expected


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" C. a cat ", "C"),
        ("The answer is A.", "A"),
        ("It is B", None),  # only the last character but one is looked at
        ("Apple", "A"),  # the rule takes the first character for a letter, whatever follows
        ("\nD\n", "D"),
        ("None", None),
        ("", None),
        ("b", None),
        ("E", None),
    ],
)
def test_mmsu_letter(response: str, letter: str | None) -> None:
    assert mmsu_letter(response) == letter


def test_mmsu_match() -> None:
    choices = {"A": "cat", "B": "dog", "C": "", "D": ""}
    assert mmsu_match("dog", "B", choices) and mmsu_match("dog", "I think B.", choices)
    assert not mmsu_match("dog", "A", choices) and not mmsu_match("dog", "dog", choices)


RUBRIC = [{"name": "cue", "choices": [0, 1]}, {"name": "reasoning", "choices": [0, 1, 3]}]


def rating(*scores: object) -> str:
    items = ", ".join(f'{{"name": "x", "score": {score}}}' for score in scores)
    return f"Here it is:\n[{items}]"


def test_rubric_score_by_hand() -> None:
    ratings = [rating(1, 3), rating(0, 0), rating(1, 0), rating(1, 1), rating(0, 1)]  # 1, 0, 1/4, 1/2, 1/4
    assert rubric_score(True, ratings, RUBRIC) == pytest.approx((1 / 4 + 1 / 2 + 1 / 4) / 3)
    assert rubric_score(True, ratings[:2], RUBRIC) == 0.5  # two ratings: none is left out
    assert rubric_score(False, ratings, RUBRIC) == 0


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ([], "no ratings of a right answer"),
        (["very good"], "a rating is not JSON"),
        ([rating(1)], "a list of 2 items"),
        ([rating(1, 2)], "gives 2 for 'reasoning', not one of"),
        ([rating("true", 1)], "gives True for 'cue'"),
        (['[{"name": "cue"}, {"name": "reasoning", "score": 1}]'], "gives None for 'cue'"),
    ],
)
def test_ratings_that_do_not_fit(ratings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rubric_score(True, ratings, RUBRIC)

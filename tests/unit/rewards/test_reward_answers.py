"""Tags, choices, maths and the accuracy of answers."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.rewards import (
    AnswerAccuracy,
    after_think,
    extract_answer,
    extract_think,
    final_text,
    match_choice,
    maths_equal,
    normalize_text,
    same_answer,
    strip_tags,
)
from audiorl.rewards.answers import looks_like_maths


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>t</think><answer> B </answer>", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer>A</answer> wait <answer>B</answer>", "B"),
        ("<answer>A <answer>B</answer>", "B"),  # the outer tag is not closed
        ("<answer>A</answer><answer>B", "A"),
        ("<think>maybe <answer>A</answer></think>", None),  # an answer inside the thinking is not given
        ("<think>maybe <answer>A</answer></think><answer>B</answer>", "B"),
        ("the prompt opened it <answer>A</answer></think><answer>B</answer>", "B"),
        ("<answer>line\nbreak</answer>", "line\nbreak"),
        ("<answer></answer>", ""),
        ("B", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "think"),
    [
        ("<think> a dog </think><answer>B</answer>", "a dog"),
        ("opened by the prompt</think><answer>B</answer>", "opened by the prompt"),
        ("<think></think>", ""),
        ("<think>many words<think>ok</think><answer>B</answer>", "many words<think>ok"),
        ("<think>never closed <answer>B</answer>", None),
        ("<answer>B</answer>", None),
    ],
)
def test_extract_think(text: str, think: str | None) -> None:
    assert extract_think(text) == think


def test_final_text() -> None:
    assert final_text("<think>a</think> hello there ") == "hello there"
    assert final_text("hello there") == "hello there"
    assert final_text("<answer>hi</answer> there") == "hi"
    assert final_text("<answer>cut off") == "cut off"
    assert final_text("<think>cut off while thinking") == ""
    assert final_text("language English<asr_text> hello there ") == "hello there"
    assert final_text("language None<asr_text>") == ""
    assert final_text("[noise] hello") == "[noise] hello"
    segments = '[{"Start":0,"End":1.5,"Speaker":0,"Content":"Hello."},{"Start":1.5,"End":2,"Content":"There."}]'
    assert final_text(f"assistant\n{segments}\n") == final_text(segments) == "Hello. There."
    assert final_text("[]") == ""
    for text in (segments[:-1], "[1, 2]", "['a']", '["Content"]', '[{"Content": 1}]'):
        assert final_text(text) == text
    assert after_think("<think>a</think>b<think>c</think>d") == "bd"
    assert strip_tags("<think>a</think><answer>b</answer>").split() == ["a", "b"]


@given(think=st.text(alphabet="ab <>/\n"), answer=st.text(alphabet="xy <>/\n"))
def test_a_well_formed_response_gives_back_its_parts(think: str, answer: str) -> None:
    text = f"<think>{think}</think>\n<answer>{answer}</answer>"
    assert extract_think(text) == think.strip()
    assert extract_answer(text) == answer.strip()


CHOICES = ("Dog barking", "cat", "Acoustic-guitar", "A train, passing")


@pytest.mark.parametrize(
    ("texts", "index"),
    [
        (("B", "b", "(b)", "B.", "(B).", "B) cat", "B. cat", "(B) Cat.", "B: cat", "B cat", "cat", "CAT!"), 1),
        (("B. the cat",), 1),  # a clear letter counts, whatever the words
        (("B. dog barking", "B dog barking"), None),  # letter and words contradict each other
        (("a cat", "A cat"), 1),  # an article, not choice A
        (("acoustic guitar",), 2),
        (("a train passing",), 3),
        (("E", "dog", "", "..."), None),
    ],
)
def test_match_choice(texts: tuple[str, ...], index: int | None) -> None:
    assert [match_choice(text, CHOICES) for text in texts] == [index] * len(texts)


@pytest.mark.parametrize(
    ("text", "choices", "index"),
    [
        ("C#", ("C", "C#", "D"), 1),
        ("C", ("D", "C", "C#"), 1),  # its own name before its letter
        ("-5", ("5", "-5"), 1),
        ("3/4", ("6/8", "3/4", "34"), 1),
        ("A", ("B", "A"), 1),
        ("the same", ("The same", "THE SAME"), None),
        *((text, ("(A) dog", "(B) cat"), 1) for text in ("cat", "B", "(B) cat", "b. CAT")),
        ("(A) cat", ("(A) dog", "(B) cat"), None),
        ("Smith", ("J. Smith", "B. Jones"), None),  # an initial is no label
    ],
)
def test_choices_that_look_alike_or_have_letters(text: str, choices: tuple[str, ...], index: int | None) -> None:
    assert match_choice(text, choices) == index


@given(st.lists(st.text(alphabet="abcdefg 123", min_size=2), min_size=2, max_size=6, unique_by=normalize_text))
def test_every_choice_is_found_by_its_text_and_its_labelled_text(choices: list[str]) -> None:
    for i, choice in enumerate(choices):
        if normalize_text(choice):
            assert match_choice(choice, choices) == i
            assert match_choice(f"({chr(65 + i)}) {choice.upper()}", choices) == i


WRAPPERS = (
    *("{}", "**{}**", "__{}__", "*{}*", "`{}`", "<b>{}</b>", '"{}"', "“{}”", "«{}»", "「{}」", "{}.", "{}。", " {}\n"),
    *(
        "\ufeff{}",
        r"\boxed{{{}}}",
        r"\(\boxed{{\text{{{}}}}}\)",
        r"\textbf{{{}}}",
        "The answer is {}.",
        "**Answer:** {}",
    ),
    *("答案是{}", "So the correct answer is {}", "Option {}", "{} is correct.", "I choose {}"),
)
LABELS = ("({})", "[{}]", "【{}】", "（{}）", "{}.", "{}、", "{}:", "{}：", "{})", "{} -", "{} —")
REAL = (
    *(
        "dog barking",
        "dog",
        "Cat",
        "a train, passing",
        "C minor",
        "C# minor",
        "Bb major",
        "A minor",
        "J. Smith",
        "café",
    ),
    *("3", "21 times", "-5 dB", "5 dB", "50%", "50", "1,000 Hz", "3/4", "6/8", "Yes", "No", "Not angry", "angry"),
    *("狗叫", "猫", "Both of them", "$5"),
)


@given(choices=st.lists(st.sampled_from(REAL), min_size=2, max_size=6, unique=True), data=st.data())
def test_a_right_answer_in_any_wrapper_names_its_choice(choices: list[str], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(choices) - 1))
    wrapper, label = data.draw(st.sampled_from(WRAPPERS)), data.draw(st.sampled_from(LABELS))
    letter = label.format(chr(65 + i))
    for said in (choices[i], letter, f"{letter} {choices[i]}", choices[i].upper()):
        answer = wrapper.format(said)
        assert match_choice(answer, choices) == i, answer
        right = [same_answer(answer, choice, choices) for choice in choices]
        assert right == [choice == choices[i] for choice in choices], answer
    j = data.draw(st.integers(0, len(choices) - 1).filter(lambda j: j != i))
    other = chr(65 + j)
    for said in (
        f"{letter} {choices[j]}",
        f"{chr(65 + i)} or {other}",
        f"not {letter}",
        f"neither {other}",
        "Zebra",
        "Z",
    ):
        answer = wrapper.format(said)
        assert match_choice(answer, choices) is None, answer


TEXTS = st.text(alphabet="abcABC 12-.,:()#♭%é猫*$\\{}", min_size=1, max_size=8)


@given(choices=st.lists(TEXTS, min_size=2, max_size=5, unique_by=str.strip), wrapper=st.sampled_from(WRAPPERS))
def test_no_two_choices_become_one(choices: list[str], wrapper: str) -> None:
    for i, choice in enumerate(choices):
        if choice.strip():
            assert match_choice(choice, choices) == i
            assert [same_answer(choice, other, choices) for other in choices].count(True) == 1
    for text in (wrapper.format(choice) for choice in choices):
        assert sum(same_answer(text, choice, choices) for choice in choices) <= 1


def test_long_and_broken_answers_take_no_time() -> None:
    """Loops and unclosed marks of a model that went astray."""
    start = time.perf_counter()
    for part in (
        "a ",
        "A, ",
        "A. it ",
        "**a ",
        "\\text{",
        "{",
        "<b>",
        "$a ",
        "the ",
        "answer: ",
        "one hundred and ",
        "一",
    ):
        match_choice(part * 3000, CHOICES)
        same_answer(part * 3000, "cat")
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (" Acoustic-guitar. ", "acoustic guitar"),
        ("Don’t   stop", "dont stop"),
        ("3/4", "3/4"),
        ("-5.", "-5"),
        ("well-5", "well 5"),
        (".5", ".5"),
        ("1,000", "1,000"),
        ("50%", "50%"),
        ("F# minor", "f# minor"),
        ("Ｆｕｌｌ", "full"),
        ("¿Qué?", "qué"),
    ],
)
def test_normalize_text(text: str, normal: str) -> None:
    assert normalize_text(text) == normal


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", ".5", True),
        ("$1,000$", "1000", True),
        ("x^2-1", "(x-1)(x+1)", True),
        ("2**3", "8", True),
        ("sqrt(2)/2", r"1/\sqrt{2}", True),
        ("50%", "0.5", True),
        ("12", "13", False),
        ("-5", "5", False),
        ("3 birds", "3 dogs", False),
        ("3 birds", "3", False),
        ("e", "2.718281828", False),
        ("B", "B", False),  # letters are not maths; text equality decides
        ("A4", "4A", False),
        ("10:30", "10", False),
        ("two", "2", False),
        ("", "", False),
        ("1/", "1", False),
        ("3.", "3", True),
        ("1 2", "3", False),
        ("((((", "1", False),
        (r"\frac", "1", False),
    ],
)
def test_maths_equal(a: str, b: str, equal: bool) -> None:
    assert maths_equal(a, b) is equal
    assert maths_equal(b, a) is equal


@pytest.mark.parametrize("bomb", ["9^9^9^9", "9**9**9", "9^{9^{9}}", "2^(9*9999999)", "((9^999)*1)^999", "9" * 101])
def test_expressions_that_would_never_finish_are_not_maths(bomb: str) -> None:
    start = time.perf_counter()
    assert not looks_like_maths(bomb)
    assert not maths_equal(bomb, "1")
    assert time.perf_counter() - start < 1


def test_maths_works_outside_the_main_thread() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(maths_equal("1/2", "0.5")))
    thread.start()
    thread.join()
    assert results == [True]


@given(st.text(alphabet=r"0123456789xe+-*/^(){}\frac,.%$ ", max_size=12))
def test_no_text_breaks_maths(text: str) -> None:
    assert maths_equal(text, "7") in (True, False)


def total(reward, rollout) -> float:
    (score,) = reward([rollout])
    return score.total


@pytest.mark.parametrize(
    ("answer", "gold", "choices", "options", "expected"),
    [
        *((answer, "cat", CHOICES, {}, 1) for answer in ("B", "cat", "(b) Cat")),
        *((answer, "cat", CHOICES, {}, 0) for answer in ("A", "dog barking", "kitten")),
        *((answer, "cat", CHOICES, {"strict": True}, 1) for answer in ("cat", " cat ")),
        *((answer, "cat", CHOICES, {"strict": True}, 0) for answer in ("B", "Cat", "cat.")),
        ("cat", "B", CHOICES, {}, 1),  # the reference is a letter
        ("cat", "B", CHOICES, {"strict": True}, 0),
        ("6/8", "3/4", ("3/4", "6/8"), {}, 0),  # equal fractions are different choices
        ("6/8", "3/4", ("3/4", "6/8"), {"strict": True}, 1),  # the published rule
        ("0.50", "1/2", ("1/2", "1/3"), {}, 1),
        ("0.50", "1/2", ("1/2", "1/3"), {"maths": False}, 0),
        ("two birds.", "Two birds", (), {}, 1),
        ("0.5", "1/2", (), {}, 1),
        ("-5", "5", (), {}, 0),
        ("F", "F#", (), {}, 0),
        ("!", "?", (), {}, 0),
        ("", "", (), {}, 0),
    ],
)
def test_answers(make_rollout, answer: str, gold: str, choices: tuple[str, ...], options, expected: float) -> None:
    text = f"<think>x</think><answer>{answer}</answer>"
    for references in ((gold,), ("another", gold)):
        rollout = make_rollout(text, references=references, choices=choices)
        assert total(AnswerAccuracy(**options), rollout) == expected


def test_fallback(make_rollout) -> None:
    bare = make_rollout("I think so.\nB\n", references=("B",))
    assert total(AnswerAccuracy(), bare) == 0
    assert total(AnswerAccuracy(fallback="last_line"), bare) == 1
    assert total(AnswerAccuracy(fallback="text"), bare) == 0
    assert total(AnswerAccuracy(fallback="text"), make_rollout("<think>A</think> B", references=("B",))) == 1
    assert total(AnswerAccuracy(fallback="last_line"), make_rollout("<think>\nB", references=("B",))) == 0
    assert total(AnswerAccuracy(fallback="text"), make_rollout("", references=("B",))) == 0
    for cut in ("<answer>B", "B</answer>", "<think>hm</think>\n<answer>B"):  # the text that an evaluation shows
        assert total(AnswerAccuracy(fallback="text"), make_rollout(cut, references=("B",))) == 1
        assert total(AnswerAccuracy(fallback="last_line"), make_rollout(cut, references=("B",))) == 1
        assert total(AnswerAccuracy(), make_rollout(cut, references=("B",))) == 0
    with pytest.raises(ValueError, match="'clip-7' has no reference"):
        AnswerAccuracy()([make_rollout("<answer>B</answer>")])

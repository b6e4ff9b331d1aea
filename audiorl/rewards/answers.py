"""Answers: the tags around them, the choice they name, symbolic maths, and the accuracy of audio question answering."""

from __future__ import annotations

import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from audiorl.data.schema import FieldError
from audiorl.rewards.combine import check_options
from audiorl.types import Rollout, Sample, Score

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_THINK_BLOCK = re.compile(r"<think>.*?</think>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def after_think(text: str) -> str:
    """Return what follows the thinking. Also where the prompt opened the think tag and the response only closes it."""
    return _THINK_BLOCK.sub("", text).rpartition("</think>")[2]


def extract_answer(text: str) -> str | None:
    """Return the stripped text of the last well-formed `<answer>…</answer>` outside the thinking, or None.

    >>> extract_answer("<think>first <answer>A</answer></think> <answer> B </answer>")
    'B'
    """
    answers = _ANSWER.findall(after_think(text))
    return answers[-1].strip() if answers else None


def extract_think(text: str) -> str | None:
    """Return the stripped text up to the first `</think>`, without its opening tag; None if the thinking is not closed.

    >>> extract_think("<think> a dog </think><answer>B</answer>")
    'a dog'
    """
    before, closed, _ = text.partition("</think>")
    return before.rpartition("<think>")[2].strip() if closed else None


def strip_tags(text: str) -> str:
    """Return the response without its think and answer tags, their contents kept."""
    return _TAG.sub(" ", text).strip()


def final_text(text: str) -> str:
    """Return the `<answer>` text, else what follows the thinking; "" when the thinking never ends."""
    answer, rest = extract_answer(text), after_think(text)
    if answer is not None:
        return answer
    return "" if "<think>" in rest else strip_tags(rest)


_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?")
_LETTER_TEXT = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[.:)])[.:]?\s*(\S.*)", re.DOTALL)
_LETTER_SPACE_TEXT = re.compile(r"([A-Za-z])\s+(\S.*)", re.DOTALL)


def normalize_text(text: str) -> str:
    """Return the text without differences of case, punctuation and space: "Acoustic-guitar. " -> "acoustic guitar".

    What carries meaning stays: signs, points and slashes of numbers ("-5", "3/4"), "%", and the sharp of "C#".
    """
    padded = " " + re.sub(r"['’]", "", unicodedata.normalize("NFKC", text).casefold()) + " "  # don't -> dont
    kept = []
    for before, char, after in zip(padded, padded[1:], padded[2:], strict=False):
        numeric = after.isdigit() and (before.isdigit() or (before.isspace() and char in "-."))
        kept.append(char if char in "%#" or numeric or not unicodedata.category(char).startswith("P") else " ")
    return " ".join("".join(kept).split())


def _casefold(text: str) -> str:
    return " ".join(text.casefold().split())


def match_choice(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that `text` names, None if it names none or more than one.

    The choice's own words come first, so a choice that happens to be called "A" is found by name; comparison goes from
    exact to normalised, which keeps "C" and "C#" apart. A letter together with the words of another choice names none.
    """
    text, plain = text.strip(), list(choices)
    for i, choice in enumerate(choices):  # sometimes written with their letter: "(B) cat" is "cat" as the second one
        match = _LETTER_TEXT.fullmatch(choice.strip())
        if match and _index(match[1] or match[2], choices) == i:
            plain[i] = match[3]
    for texts in (choices, plain):
        if (named := _by_text(text, texts)) is not None:
            return named
    if match := _LETTER.fullmatch(text):
        return _index(match[1], choices)
    if match := _LETTER_TEXT.fullmatch(text):
        index, spoken = _index(match[1] or match[2], choices), _by_text(match[3], plain)
        return index if spoken in (None, index) else None
    if match := _LETTER_SPACE_TEXT.fullmatch(text):  # "B cat"; but "A cat" alone may well be an article
        index, spoken = _index(match[1], choices), _by_text(match[2], plain)
        return index if index is not None and spoken == index else None
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


MAX_LENGTH = 100
TIMEOUT = 2  # seconds, per parse and per comparison

_COMMANDS = {"sqrt", "pi", "sin", "cos", "tan", "log", "ln"}
_WORD = re.compile(r"(\\?)([A-Za-z]+)")
_ALLOWED = re.compile(r"[\w\s+\-*/^().,=%{}\\$]*", re.ASCII)
_EXPONENT = re.compile(r"\^\s*(?:-?(\d{1,3}|[A-Za-z])(?![\w.^])|\{\s*-?(\d{1,3}|[A-Za-z])\s*(?:/\s*\d{1,3}\s*)?\})")
_MAX_POWER = 1000  # of all exponents multiplied: beyond it evaluation may take minutes inside one uninterruptible call


def looks_like_maths(text: str) -> bool:
    """True when all of `text` is one expression: a digit or a LaTeX command, no words, no huge powers."""
    text = text.strip()
    if not text or len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text) or "_" in text:
        return False
    words = [(bool(slash), word) for slash, word in _WORD.findall(text)]
    if any(not latex and len(word) > 1 and word not in _COMMANDS for latex, word in words):
        return False
    latex_commands = any(latex for latex, _ in words)
    variables = any(not latex and len(word) == 1 for latex, word in words)
    if variables and not latex_commands and not re.search(r"[\^*/+=]", text):
        return False  # "B", "A4", "C 7": letters and names of notes, not products
    if not (latex_commands or re.search(r"\d", text)) or re.search(r"\d\s+\d", text):
        return False  # "1 2" is a list, which the parser would add up
    text, power = text.replace("**", "^"), 1
    exponents = _EXPONENT.findall(text)
    for bare, braced in exponents:
        power *= int(bare or braced) if (bare or braced).isdigit() else 1
    return len(exponents) == text.count("^") and power <= _MAX_POWER


def maths_equal(a: str, b: str) -> bool:
    """Return whether both sides are expressions and symbolically equal. Whatever cannot be parsed in time is not equal.

    Words are not maths: "e minor" must not become Euler's number, nor "3 birds" equal "3 dogs". But 6/8 equals 3/4.
    """
    if not (looks_like_maths(a) and looks_like_maths(b)):
        return False
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    # The library's timeouts use SIGALRM, which exists only in the main thread. Elsewhere the guards above must do.
    in_main = threading.current_thread() is threading.main_thread()
    seconds = TIMEOUT if in_main else None
    quiet = logging.getLogger("math_verify")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns once about every missing or expired timeout
    try:
        # Only the LaTeX reader, without fallback: the others would read "1/" as 1.
        config = [LatexExtractionConfig()]
        texts = (x.strip().strip("$").removesuffix(".").replace("**", "^") for x in (a, b))
        left, right = (parse(f"${x}$", config, fallback_mode="no_fallback", parsing_timeout=seconds) for x in texts)
        if not left or not right:
            return False
        # verify is not symmetric (it may simplify only one side), equality is
        return bool(verify(left, right, timeout_seconds=seconds) or verify(right, left, timeout_seconds=seconds))
    except (Exception, TimeoutException):  # a model's output may break the parser in any way; that is a wrong answer
        return False
    finally:
        quiet.setLevel(level)


Fallback = Literal["none", "text", "last_line"]


@dataclass(frozen=True)
class AnswerAccuracy:
    """1 if the answer equals a reference, else 0.

    The answer is the text of the last well-formed <answer> outside the thinking. Without one, `fallback` decides:
    "none" scores 0, "text" takes all that follows the thinking, "last_line" its last line that is not empty.

    With choices, an answer that names a choice by letter or by text is right exactly when it names the reference's
    choice. Otherwise symbolic maths decides where both sides are expressions (`maths`), else equality of the texts up
    to case, punctuation and whitespace. `strict` is the rule of Ke-Omni-R's released reward: symbolic maths, else exact
    equality of the stripped texts. Raises ValueError for a sample without references.
    """

    strict: bool = False
    maths: bool = True
    fallback: Fallback = "none"

    def __post_init__(self) -> None:
        check_options(self, fallback=get_args(Fallback))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float(self.correct(r.text, r.sample))) for r in rollouts]

    def check(self, sample: Sample) -> None:
        if not sample.references:
            raise FieldError("answer", f"AnswerAccuracy: sample {sample.id!r} has no reference answer")

    def correct(self, text: str, sample: Sample) -> bool:
        self.check(sample)
        answer, rest = extract_answer(text), after_think(text).strip()
        if answer is None and self.fallback != "none" and "<think>" not in rest:  # else it was cut off while thinking
            lines = rest.splitlines()
            answer = rest if self.fallback == "text" or not lines else lines[-1].strip()
        return bool(answer) and any(self._equal(str(answer), gold, sample.choices) for gold in sample.references)

    def _equal(self, answer: str, gold: str, choices: Sequence[str]) -> bool:
        if not self.strict and choices:
            named, wanted = match_choice(answer, choices), match_choice(gold, choices)
            if wanted is not None and named is not None:
                return named == wanted
            gold = gold if wanted is None else choices[wanted]
        gold = gold.strip()
        if answer == gold or (self.maths and maths_equal(answer, gold)):
            return True
        return not self.strict and (normalize_text(answer) or answer) == (normalize_text(gold) or gold)

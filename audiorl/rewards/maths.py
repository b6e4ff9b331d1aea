"""Symbolic equality of two short expressions, with guards: most answers about audio are words, and words are not
maths ("e minor" must not become Euler's number, nor "3 birds" equal "3 dogs")."""

from __future__ import annotations

import logging
import re
import threading

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
    if not latex_commands and not re.search(r"\d", text):
        return False
    if re.search(r"\d\s+\d", text):
        return False  # "1 2" is a list, which the parser would add up
    return _powers_are_small(text.replace("**", "^"))


def maths_equal(a: str, b: str) -> bool:
    """Whether both sides are expressions and symbolically equal. Whatever cannot be parsed in time is not equal.

    Note that 6/8 equals 3/4 here: compare time signatures and the like as choices or as text.
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
        left, right = (
            parse(f"${_latex(x)}$", config, fallback_mode="no_fallback", parsing_timeout=seconds) for x in (a, b)
        )
        if not left or not right:
            return False
        # verify is not symmetric (it may simplify only one side), equality is
        return bool(verify(left, right, timeout_seconds=seconds) or verify(right, left, timeout_seconds=seconds))
    except (Exception, TimeoutException):  # a model's output may break the parser in any way; that is a wrong answer
        return False
    finally:
        quiet.setLevel(level)


def _latex(text: str) -> str:
    return text.strip().strip("$").removesuffix(".").replace("**", "^")


def _powers_are_small(text: str) -> bool:
    exponents = _EXPONENT.findall(text)
    if len(exponents) != text.count("^"):
        return False
    power = 1
    for bare, braced in exponents:
        exponent = bare or braced
        power *= int(exponent) if exponent.isdigit() else 1
    return power <= _MAX_POWER

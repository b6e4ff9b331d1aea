"""Reading `<think>…</think><answer>…</answer>` responses."""

from __future__ import annotations

import re

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_THINK_BLOCK = re.compile(r"<think>.*?</think>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def after_think(text: str) -> str:
    """What follows the thinking. Also where the prompt opened the think tag and the response only closes it."""
    return _THINK_BLOCK.sub("", text).rpartition("</think>")[2]


def extract_answer(text: str) -> str | None:
    """The stripped text of the last well-formed `<answer>…</answer>` outside the thinking, None if there is none.

    >>> extract_answer("<think>first <answer>A</answer></think> <answer> B </answer>")
    'B'
    """
    answers = _ANSWER.findall(after_think(text))
    return answers[-1].strip() if answers else None


def extract_think(text: str) -> str | None:
    """The stripped text up to the first `</think>`, without its opening tag; None if the thinking is not closed.

    >>> extract_think("<think> a dog </think><answer>B</answer>")
    'a dog'
    """
    before, closed, _ = text.partition("</think>")
    return before.rpartition("<think>")[2].strip() if closed else None


def strip_tags(text: str) -> str:
    """The response without its think and answer tags, their contents kept."""
    return _TAG.sub(" ", text).strip()


def final_text(text: str) -> str:
    """The answer for a task whose response may be bare: the `<answer>` text, else what follows the thinking.

    Empty when the thinking never ends: a response cut off in its thoughts has not answered.
    """
    answer = extract_answer(text)
    if answer is not None:
        return answer
    rest = after_think(text)
    return "" if "<think>" in rest else strip_tags(rest)

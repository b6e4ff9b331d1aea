"""The functions of words.yaml: a task of lmms-eval on rows with `audio` (a path) and `text`."""

from __future__ import annotations

from typing import Any


def audio(doc: dict[str, Any]) -> list[str]:
    return [doc["audio"]]


def question(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> str:
    return "What is said?"


def result(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """A number that depends on every character of the answer."""
    return {"characters": sum(map(ord, answers[0])) / 1000}

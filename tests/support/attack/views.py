"""A view of a run folder and a file of labels, one of whose files is the input: every page answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audiorl.report.view.labels import next_question
from tests.support.attack.folders import ROLLOUTS, SHOWN, run_folder, written
from tests.support.attack.mutation import mutate_json
from tests.support.attack.targets import FileTarget, Input
from tests.support.reports import Checker
from tests.support.views import client, viewed

LABELS = "labels.jsonl"
PAGES = ("/", "/state", "/metrics/0", "/rollouts", "/rollouts?q=reward>0 answer&order=reward ↓")
EVALUATIONS = "/evaluations?left=0/before&right=0/after&show=all"


def _answers(given: Input, folder: Path) -> dict[str, Any]:
    """The answers to all pages. A damaged file of labels is refused as the view starts."""
    run = written(given, folder)
    view = viewed(run, labels=run / LABELS, mode="pairs")
    requests = client(view)
    paths = [*PAGES, EVALUATIONS, *(f"/rollouts/{place}" for place in view.index.search().places)]
    answers = {path: requests.get(path) for path in [*paths, "/question"]}
    assert view.labels is not None
    question = next_question(view.index, view.labels, random.Random(0))
    if question is not None:
        try:
            view.labels.add(question, "a", view.index)
        except ValueError as error:  # a row that the page shows, but that is no complete rollout
            assert str(error)
    return answers


def _judge(given: Input, answers: dict[str, Any]) -> Iterator[str]:
    for path, answer in answers.items():
        refused = 400 if path == EVALUATIONS and given.name.startswith("eval/") else 404
        if answer.status_code not in (200, refused):
            yield f"{path}: {answer.status_code} {answer.text[:200]}"
        if answer.status_code == 200 and path.startswith(("/rollouts", "/evaluations")):
            try:
                if "script" in Checker(answer.text).tags:
                    yield f"{path}: a script"
            except AssertionError as error:
                yield f"{path}: unbalanced tags: {error}"
        if b"root:" in answer.content:
            yield f"{path}: a file that is not the run's"


def _seeds() -> list[Input]:
    run = run_folder()
    label = b'{"verdict": "a", "prompt": [], "chosen": "x", "rejected": "y", "label_of": ["0", "1"], "time": 1.0}\n'
    names = (*SHOWN, "state.json", ROLLOUTS, ROLLOUTS, ROLLOUTS)
    return [*(Input(name, (run / name).read_bytes()) for name in names), Input(LABELS, label * 2)]


TARGETS = [FileTarget("views", _answers, _judge, mutate_json, 0.4, _seeds)]

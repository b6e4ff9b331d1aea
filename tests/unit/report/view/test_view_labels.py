"""Labels: what is asked, what is written, and that what was written is there whatever happens."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from audiorl.data.preferences import read_judged, read_pairs
from audiorl.report.study import Rollouts
from audiorl.report.view.labels import LabelFile, LabelQuestion, next_question
from audiorl.report.view.server import RunsView
from tests.support.recipe_runs import rows_of
from tests.support.reports import rollout, write_lines
from tests.support.views import client, opened, view_process, viewed


def label(view: RunsView, verdict: str, seed: int = 0) -> LabelQuestion:
    assert view.labels is not None
    question = next_question(view.index, view.labels, random.Random(seed))
    assert question is not None
    view.labels.add(question, verdict, view.index)
    return question


def test_pairs_are_read_by_read_pairs(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    view = viewed(recorded, labels=file, mode="pairs")
    questions = [label(view, verdict, seed) for seed, verdict in enumerate(("a", "b", "tie", "skip"))]
    pairs = read_pairs(file).samples
    assert [(p.chosen, p.rejected) for p in pairs] == [
        (questions[0].rows[0]["text"], questions[0].rows[1]["text"]),
        (questions[1].rows[1]["text"], questions[1].rows[0]["text"]),
    ]
    assert all(len({row["group_id"] for row in question.rows}) == 1 for question in questions)
    assert all(Path(str(clip.path)).is_file() for pair in pairs for clip in pair.sample.audio)
    assert [row["verdict"] for row in rows_of(tmp_path / "labels.undecided.jsonl")] == ["tie", "skip"]
    assert view.labels is not None and view.labels.count == 2


def test_scores_are_read_by_read_judged_and_the_study(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    view = viewed(recorded, labels=file, mode="scores")
    texts = [label(view, verdict, seed).rows[0]["text"] for seed, verdict in enumerate("13245")]
    judged = read_judged(file).samples
    assert [j.answer for j in judged] == texts
    assert [j.desirable for j in judged] == [False, False, False, True, True]
    assert not {"segments", "sample", "score"} & judged[0].sample.metadata.keys()
    studied = Rollouts.load(file)
    assert studied.labels == (1.0, 3.0, 2.0, 4.0, 5.0) and [r.text for r in studied] == texts
    assert all(Path(str(clip.path)).is_file() for r in studied for clip in r.audio)


def test_nobody_is_asked_twice(tmp_path: Path) -> None:
    rows = [rollout("g", i, 0.0, 0.0, text=text) for i, text in enumerate(("one", "two", "three", "two"))]
    rows += [rollout("silent", 0, 0.0, 0.0, text=" "), rollout("single", 0, 0.0, 0.0, text="four")]
    write_lines(tmp_path / "rollouts/step_000001.jsonl", rows)
    view = viewed(tmp_path, labels=tmp_path / "labels.jsonl", mode="pairs")
    asked = set()
    for seed in range(3):
        asked.add(frozenset(row["text"] for row in label(view, "skip", seed).rows))
    assert asked == {frozenset(pair) for pair in (("one", "two"), ("one", "three"), ("two", "three"))}
    assert view.labels is not None and next_question(view.index, view.labels, random.Random(0)) is None
    scores = viewed(tmp_path, labels=tmp_path / "scores.jsonl", mode="scores")
    assert {label(scores, "skip", seed).rows[0]["text"] for seed in range(4)} == {"one", "two", "three", "four"}
    assert scores.labels is not None and next_question(scores.index, scores.labels, random.Random(0)) is None


def test_a_question_tells_neither_reward_nor_step(recorded: Path, tmp_path: Path) -> None:
    requests = client(viewed(recorded, labels=tmp_path / "labels.jsonl", mode="pairs"))
    answer = requests.get("/question").json()
    for word in ("advantage", "total", "chip", "accuracy", "step", "recorded", "title="):
        assert word not in answer["html"], word
    assert requests.post("/labels", json={"id": answer["id"], "verdict": "a"}).json() == {"count": 1}
    again = requests.post("/labels", json={"id": answer["id"], "verdict": "b"})
    assert again.status_code == 400 and "not open any more" in again.text
    other = requests.get("/question").json()
    assert requests.post("/labels", json={"id": other["id"], "verdict": "5"}).status_code == 400
    foreign = {"Origin": "http://evil.example"}
    assert requests.post("/labels", json={"id": other["id"], "verdict": "a"}, headers=foreign).status_code == 403
    assert len(rows_of(tmp_path / "labels.jsonl")) == 1


def test_a_file_edited_meanwhile(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    view = viewed(recorded, labels=file, mode="pairs")
    assert view.labels is not None
    for seed in range(3):
        label(view, "a", seed)
    lines = file.read_text().splitlines()
    # An editor writes a new file: a row removed, one that is not of this tool, no newline at the end.
    edited = tmp_path / "edited"
    edited.write_text("\n".join([lines[0], '{"question": "mine"}', lines[2]]))
    edited.rename(file)
    label(view, "b", 9)
    now = file.read_text().splitlines()
    assert now[:3] == [lines[0], '{"question": "mine"}', lines[2]] and json.loads(now[3])["verdict"] == "b"
    assert view.labels.count == 3 and f"{file}: row 2: not a label of this tool" in view.labels.problem


def test_a_torn_last_line_is_removed(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    view = viewed(recorded, labels=file, mode="pairs")
    label(view, "a")
    complete = file.read_bytes()
    file.write_bytes(complete + b'{"verdict": "b", "chos')
    label(view, "b", 1)
    assert file.read_bytes().startswith(complete) and len(read_pairs(file).samples) == 2


def test_two_labellers_write_into_one_file(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    views = [viewed(recorded, labels=file, mode="scores") for _ in range(2)]
    threads = [
        threading.Thread(target=lambda view=view, k=k: [label(view, "4", 100 * k + i) for i in range(15)])  # type: ignore[misc]
        for k, view in enumerate(views)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows_of(file)) == 30 and len(read_judged(file).samples) == 30
    seen = {tuple(row["label_of"]) for row in rows_of(file)}
    for view in views:
        assert view.labels is not None
        view.labels.read()
        assert all(view.labels.is_labelled(keys) for keys in seen)


def test_a_file_of_the_other_kind_is_refused(recorded: Path, tmp_path: Path) -> None:
    label(viewed(recorded, labels=tmp_path / "labels.jsonl", mode="pairs"), "a")
    with pytest.raises(ValueError, match="it holds pairs; name another file, or give --label pairs"):
        LabelFile(tmp_path / "labels.jsonl", "scores")


@pytest.mark.slow
def test_labels_survive_a_kill(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    for count in (3, 6):
        with view_process(recorded, "--labels", file) as (address, process):
            requests = opened(address)
            for _ in range(3):
                question = requests.get("/question").json()
                if question["id"] is None:  # the runs are still being read
                    continue
                assert requests.post("/labels", json={"id": question["id"], "verdict": "b"}).status_code == 200
            process.kill()
        assert len(read_pairs(file).samples) == count

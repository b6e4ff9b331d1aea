"""Following runs and searching their rollouts; against counts worked out from the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from audiorl.report.view.index import PAGE_SIZE, FollowedRun, MetricsFile, RolloutPlace, names_of
from tests.support.reports import rollout, write_lines
from tests.support.views import append_line, viewed


def test_metrics_wait_for_the_end_of_a_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert not file.poll()
    append_line(file.path, {"step": 1, "kl": 0.5})
    append_line(file.path, {"step": 2, "kl": 0.25}, newline=False)
    assert file.poll() and [row["step"] for row in file.rows] == [1]
    assert not file.poll()
    with file.path.open("a") as other:
        other.write("\n")
    assert file.poll() and [row["step"] for row in file.rows] == [1, 2] and file.epoch == 0


def test_metrics_of_a_resumed_run_begin_again(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    write_lines(file.path, [{"step": i, "kl": 0.0} for i in range(1, 9)])
    file.poll()
    # The run goes on from step 4: steps 5 to 8 are written again, and more, before anyone has looked.
    write_lines(file.path, [{"step": i, "kl": 0.0 if i < 5 else 1.0} for i in range(1, 20)])
    assert file.poll() and file.epoch == 1 and [row["kl"] for row in file.rows] == [0.0] * 4 + [1.0] * 15
    file.path.unlink()
    assert file.poll() and file.rows == [] and file.epoch == 2 and not file.poll()


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_text('{"step": 1}\n{"step": [2]}\nnot json\n{"step": 4, "kl": "nan"}\n')
    file.poll()
    assert [row["step"] for row in file.rows] == [1, 4]
    assert f"{file.path}:3: not a line of metrics" in file.problem


def test_search(run_dir: Path, recorded: Path) -> None:
    index = viewed(run_dir, recorded).index
    lines = (recorded / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert index.search().count == len(rows) + 4
    spanish = [
        i for i, row in enumerate(rows) if "<answer>Spanish" in row["text"] and row["score"]["parts"]["accuracy"] > 0
    ]
    assert 0 < len(spanish) < len(rows)
    assert index.search('prompt:"WHICH LANGUAGE"').count == len(rows) and index.search("which language").count == 0
    result = index.search('"<ANSWER>spanish" accuracy>0 run:recorded', order="oldest")
    assert [place.row for place in result.places] == spanish[:PAGE_SIZE] and result.count == len(spanish)
    assert index.search("middle").places == (RolloutPlace(0, 5, 0),)
    assert index.search("reward=1 step>=5").places == (RolloutPlace(0, 10, 0),)
    assert index.search("advantage<0 run:my-run").count == 1 and index.search("-middle run:my-run").count == 3
    assert index.search("group:g", order="reward ↓").places == (RolloutPlace(0, 1, 1), RolloutPlace(0, 1, 0))
    assert index.search(runs=[0]).count == 4 and index.search(equal={"step": 10}).count == 1
    assert index.search("task:digits phase:grpo").count == 0, "this run does not say its phases"
    for text, error in {
        "nonsense>1": "no field or reward part is called nonsense; there are step, reward",
        "reward>x": "x is not a number",
        "run:missing": "no run is called missing",
        "task>a": "task is a text",
    }.items():
        with pytest.raises(ValueError, match=error):
            index.search(text)


def test_pages_do_not_overlap(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "rollouts/step_000001.jsonl", [rollout("g", i, i % 3, 0.0) for i in range(PAGE_SIZE * 2 + 5)]
    )
    index = viewed(tmp_path).index
    pages = [index.search(order="reward ↓", page=page).places for page in range(4)]
    assert [len(page) for page in pages] == [PAGE_SIZE, PAGE_SIZE, 5, 0]
    assert len({place for page in pages for place in page}) == PAGE_SIZE * 2 + 5


def test_the_index_follows_the_folder(run_dir: Path) -> None:
    view = viewed(run_dir)
    file = run_dir / "rollouts/step_000010.jsonl"
    write_lines(file, [rollout("h", i, 1.0, 0.0, text="again") for i in range(3)])
    with file.open("a") as unfinished:
        unfinished.write('{"text": "half')
    (run_dir / "rollouts/step_000005.jsonl").unlink()
    version = view.version
    view.poll()
    assert (
        view.version == version + 1 and view.index.search("again").count == 3 and view.index.search("middle").count == 0
    )
    view.poll()
    assert view.version == version + 1
    shutil.rmtree(run_dir)
    view.poll()
    state = view.state()
    assert state["runs"][0]["deleted"] and state["runs"][0]["rollouts"] == 0
    assert state["problems"] == [f"{run_dir}: the run folder was deleted"]


def test_damaged_rows_are_named_and_the_others_shown(run_dir: Path) -> None:
    file = run_dir / "rollouts/step_000010.jsonl"
    file.write_text(file.read_text() + '{"score": 3}\n[1]\nnot json\n' + json.dumps(rollout("h", 9, 0.5, 0.0)) + "\n")
    view = viewed(run_dir)
    (problem,) = view.index.problems()
    assert problem.startswith(f"{file}: row 2: not a rollout: Expected `object | null`, got `int` - at `$.score`")
    assert view.index.search("step:10").count == 2
    assert view.index.row(RolloutPlace(0, 10, 4))["index"] == 9  # type: ignore[index]


def test_phases_of_rollouts(run_dir: Path) -> None:
    state = {"seq": 0, "finished": {}, "checkpoints": {}, "seconds": {}, "rollout_offsets": {"stage1": 0, "stage2": 5}}
    (run_dir / "state.json").write_text(json.dumps(state))
    index = viewed(run_dir).index
    assert {p.step for p in index.search("phase:stage1").places} == {1, 5}
    assert {p.step for p in index.search("phase:stage2").places} == {10}


def test_names_of_runs_differ(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert names_of(paths) == ["a/run", "b/run"] and names_of(paths[:1]) == ["run"]
    with pytest.raises(ValueError, match="is named twice"):
        names_of([paths[0], paths[0]])


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder \(no metrics.jsonl, rollouts/ or config.json\)"):
        FollowedRun(tmp_path, "x")
    with pytest.raises(ValueError, match="no such folder"):
        FollowedRun(tmp_path / "missing", "x")

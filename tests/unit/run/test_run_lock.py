"""A run that is open is not opened again; who reads it needs no lock; the lock ends with its process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from audiorl.config import to_json
from audiorl.recipes._loader import find_script, load_recipe, parse_config, resume
from audiorl.report.page import page
from audiorl.report.run import load_run
from audiorl.report.view.index import FollowedRun
from audiorl.run.folder import Run, newest_checkpoint
from audiorl.run.metrics_log import read_metrics
from tests.conftest import make_text
from tests.support.checkpoints import save_run

HELD = "another process works in this folder"


def saved_run(folder: Path) -> Run:
    """Two steps, a checkpoint, and a third step that only the metrics log knows."""
    run = Run.create(folder, "mmau-grpo", [], {"seed": 1})
    for step in (1, 2):
        run.log("rl", step, {"loss": 1.0 / step})
    save_run(run, "rl", 2, make_text(), {"progress": {"step": torch.tensor(2)}})
    run.log("rl", 3, {"loss": 0.25})
    return run


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Of all files but the lock: what is in them, and their inodes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: (path.read_bytes(), path.stat().st_ino) for path in files}


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run")
    before = contents(run.dir)
    with pytest.raises(ValueError, match=rf"{run.dir}: {HELD}"):
        Run.open(run.dir)
    with pytest.raises(ValueError, match="exists already"):
        Run.create(run.dir, "mmau-grpo", [], {})
    assert contents(run.dir) == before
    run.log("rl", 4, {"loss": 0.2})
    assert [row["step"] for row in read_metrics(run.dir / "metrics.jsonl")] == [1, 2, 3, 4]
    run.close()
    with Run.open(run.dir) as again:
        assert [row["step"] for row in read_metrics(again.dir / "metrics.jsonl")] == [1, 2]


def test_readers_need_no_lock(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run")
    before = contents(run.dir)
    assert [row["step"] for row in load_run(run.dir).metrics] == [1, 2, 3]
    assert "</html>" in page(load_run(run.dir)) and newest_checkpoint(run.dir) == str(run.checkpoint("rl"))
    FollowedRun(run.dir, "run")
    assert contents(run.dir) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are cheap to make")
def test_the_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    saved_run(tmp_path / "run").close()
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        run = Run.open(tmp_path / "run")
        run.log("rl", 3, {"loss": 0.5})
        os.write(write, b"x")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=HELD):
        Run.open(tmp_path / "run")
    assert contents(tmp_path / "run") == before
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with Run.open(tmp_path / "run") as run:
        assert len(read_metrics(run.dir / "metrics.jsonl")) == 2


def test_what_cannot_be_opened_is_not_locked(tmp_path: Path) -> None:
    saved_run(tmp_path / "run").close()
    state = tmp_path / "run" / "state.json"
    intact = state.read_text()
    state.write_text(intact.replace("checkpoints/rl", "../rl"))
    with pytest.raises(ValueError, match="lies outside of the run folder") as error:
        Run.open(tmp_path / "run")
    state.write_text(intact)
    Run.open(tmp_path / "run").close()
    assert error.traceback, "the error still refers to the run that was not opened"


def test_a_closed_run_writes_nothing(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run")
    run.close()
    with Run.open(run.dir):
        before = contents(run.dir)
        with pytest.raises(AssertionError, match="closed, another process may write here"):
            run.finish("rl")
        with pytest.raises(ValueError, match="closed file"):
            run.log("rl", 4, {})
        assert contents(run.dir) == before
    run.close()


def test_a_folder_that_another_process_trains_in_is_not_resumed(tmp_path: Path) -> None:
    file = find_script("recipes", "mmau-grpo")
    config = to_json(parse_config(load_recipe(file), ["--tiny"]))
    with Run.create(tmp_path / "run", str(file.resolve()), ["--tiny"], config) as run:
        run.log("rl", 1, {"loss": 1.0})
        before = contents(run.dir)
        with pytest.raises(ValueError, match=HELD):
            resume(run.dir)
        assert contents(run.dir) == before

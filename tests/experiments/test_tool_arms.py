"""Tables over the runs of several arms."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiorl.run.folder import Run
from tests.support.tools import load_tool


def test_a_table_of_listening_leaves_a_run_that_trains_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = load_tool("arms", monkeypatch)
    run = Run.create(tmp_path / "run", "recipe", [], {})
    run.finish("listening_sft", {"silence": 0.25, "noise": 0.5, "swap": 0.75, "verdict": "listens"})
    run.log("grpo", 1, {"reward/mean": 1.0})
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_bytes(), metrics.stat().st_ino
    table = arms.listening_table({"sft": [tmp_path / "run"], "grpo": [tmp_path / "run"]})
    assert "| sft | listens | 0.25 to 0.25 | 0.50 to 0.50 | 0.75 to 0.75 |" in table and "| grpo |" not in table
    assert before[0] and before == (metrics.read_bytes(), metrics.stat().st_ino)

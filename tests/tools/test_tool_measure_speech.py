"""The comparison of reinforcement learning with the best sampling of its start runs to its table, and only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from audiorl.recipes import tts_quickstart
from audiorl.run.folder import Run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_arms_are_trained_once_and_compared_with_the_start(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "start", "tts_quickstart", [], tts_quickstart.tiny())
    tts_quickstart.main(tts_quickstart.tiny(), run)
    run.close()
    judge, out = tmp_path / "start" / "recogniser", tmp_path / "out"
    command = [sys.executable, "tools/measure_speech.py", str(tmp_path / "start"), "--judge", str(judge)]
    command += ["--out", str(out), "--steps", "1", "--prompts", "2", "--group", "2", "--validation", "1", "--test", "2"]
    command += ["--best-of", "3", "--best-of-arms", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def measure() -> str:
        return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout

    first, table = measure(), (out / "table.md").read_text()
    arms = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    trained = ["text", "word", "first", "cer", "nll", "guarded", "raft", "raft2", "raft3", "sft"]
    assert arms == ["start", "best3", *(name for arm in trained for name in (arm, f"{arm}_best2"))]
    assert "word 1/1" in first
    assert "1/1" not in measure() and (out / "table.md").read_text() == table

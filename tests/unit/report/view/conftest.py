"""Two run folders: a small complete one, and real rollouts of a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reports import write_run

ROOT = Path(__file__).parents[4]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run: Path = write_run(tmp_path / "my-run")
    return run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """96 rollouts of 12 prompts at step 1, with their audio in the run folder."""
    run = tmp_path / "recorded"
    (run / "rollouts").mkdir(parents=True)
    (run / "speech").symlink_to(ROOT / "audiorl" / "assets" / "speech")
    rows = (ROOT / "docs/recorded/rollouts/step_000001.jsonl").read_text()
    (run / "rollouts/step_000001.jsonl").write_text(rows.replace("../../audiorl/assets/speech", "speech"))
    return run

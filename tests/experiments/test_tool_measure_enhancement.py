"""The experiment on enhancement runs to its table, and a second call trains nothing again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.speech_models import save_ctc
from tests.support.tools import run_tool


@pytest.mark.slow
def test_a_seed_runs_to_the_table(tmp_path: Path) -> None:
    judge, out = save_ctc(tmp_path / "judge"), tmp_path / "out"
    run = partial(run_tool, "measure_enhancement", "--judge", str(judge), "--out", str(out), "--seeds", "0")
    run = partial(run, "--updates", "2", "--steps", "1", "--trained", "8", "--most", "2")
    options = "--rl.prompts-per-step 1 --rl.group-size 2 --sampling.steps 4"
    assert "grpo 1/1" in run("--options", options)
    table = (out / "table.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [
        f"| {name}" for name in ("recordings", "noisy", "start", "Fast-GRPO", "NFT", "SFT")
    ]
    assert "grpo 1/1" not in run("--options", options) and (out / "table.md").read_text() == table

"""The comparison of SFT, GRPO and distillation runs to its tables, and a second call trains nothing again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.tools import run_tool

ARMS = ("sft", "grpo", "distill", "both")


@pytest.mark.slow
def test_every_arm_is_trained_once_and_measured_on_strangers(tmp_path: Path) -> None:
    run = partial(run_tool, "measure_distillation", "--out", str(tmp_path), "--quick")
    first = run("--only", "sft", "distill")
    assert "grpo 1/2" not in first and "| after_grpo" not in first
    second = run()
    assert "grpo 1/2" in second and "sft 1/2" not in second and "distill 1/2" not in second
    tables = (tmp_path / "table.md").read_text()
    known, unseen, listening = tables.split("## ")[1:]
    for part in (known, unseen):
        rows = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ")]
        assert rows[2:] == ["| before", *(f"| {arm}" for arm in ARMS)]
    assert all(f"| after_{arm} |" in listening for arm in ARMS)
    assert set(json.loads((tmp_path / "seed_0" / "cpu.json").read_text())) == set(ARMS)

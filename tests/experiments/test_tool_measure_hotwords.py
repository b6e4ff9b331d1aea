"""The experiment on hotwords runs to its table, and what it tests is new in every respect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audiorl.data.hotwords import with_context
from audiorl.data.manifest import read_samples
from audiorl.models.families.whisper import tiny
from tests.support.tools import load_tool, run_tool


def test_tested_speakers_texts_and_hotwords_are_in_no_training_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tool("measure_hotwords", monkeypatch).write_rows(tmp_path, False)
    train, test = (read_samples(tmp_path / f"{name}.jsonl", think=False).samples for name in ("train", "test"))
    assert len(train) >= 40 and len(test) >= 90
    for column in ("speaker", "text"):
        assert not {s.metadata[column] for s in train} & {s.metadata[column] for s in test}
    listed = [
        {word.lower() for s in with_context(rows, (), 10) for word in s.metadata["hotwords"]} for rows in (train, test)
    ]
    assert not listed[0] & listed[1]


def test_a_seed_runs_to_the_table(tmp_path: Path) -> None:
    tiny().save(tmp_path / "whisper")
    places = ["--path", str(tmp_path / "whisper"), "--out", str(tmp_path / "out")]
    assert "grpo 2/2" in run_tool("measure_hotwords", "--quick", *places)
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[0].startswith("| 4 recordings, seeds: 1 | WER %")
    arms = ["start, no prompt", "start, prompt", "SFT", "GRPO"]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:6]] == arms and len(lines) == 10
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert all((tmp_path / "out" / row["audio"]).is_file() and row["hotwords"] for row in rows)

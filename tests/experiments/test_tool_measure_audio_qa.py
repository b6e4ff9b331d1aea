"""The comparison of thinking, answering and guessing runs to its tables, and a second call trains nothing again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.support.tools import run_tool

TASKS = ("speech", "sound", "music")


def questions(folder: Path, split: str, count: int) -> None:
    """Tones of two pitches in the format of `audiorl data build-qa`."""
    rows = []
    for number in range(count):
        high, task = number % 3 == 1, TASKS[number % 3]
        path = folder / f"{task}-pitch-{split}-{number:04d}.wav"
        seconds = np.arange(8000) / 16_000
        soundfile.write(path, 0.3 * np.sin(2 * np.pi * (880 if high else 220) * seconds), 16_000)
        row = {"id": path.stem, "audio_id": str(path), "question": "Which tone?", "choices": ["high", "low"]}
        rows.append(row | {"answer": "high" if high else "low", "task": task, "difficulty": "easy"})
    (folder / f"{split}.json").write_text(json.dumps(rows))


@pytest.fixture
def qa(tmp_path: Path) -> Path:
    folder = tmp_path / "qa"
    folder.mkdir()
    questions(folder, "train", 48)
    questions(folder, "held_out", 24)
    return folder


@pytest.fixture
def run(tmp_path: Path, qa: Path) -> Callable[..., str]:
    """The quick experiment in tmp_path/out, with more options."""
    return partial(run_tool, "measure_audio_qa", "--qa", str(qa), "--out", str(tmp_path / "out"), "--quick")


@pytest.mark.slow
def test_every_form_is_trained_once_and_measured_with_and_without_audio(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    out = tmp_path / "out"
    first = run("--only", "answers")
    assert "| think" not in first
    second = run()
    assert first.count("grpo 2/2") == 1 and second.count("grpo 2/2") == 2
    accuracy, kinds, differences, thoughts, listening = (out / "table.md").read_text().split("## ")[1:]
    names = [f"{form}{suffix}" for form in ("answers", "think", "blind") for suffix in ("", "_grpo", "_sft")]
    assert [line.split(" | ")[0] for line in accuracy.splitlines() if line.startswith("| ")][2:] == [
        f"| {name}" for name in names
    ]
    assert "| speech pitch | 6 |" in kinds and "blind_sft" in kinds
    assert "think_grpo - answers_grpo | 1 |" in differences and "| think_grpo |" in thoughts
    assert "| blind" not in listening and "| think_sft |" in listening
    assert set(json.loads((out / "blind" / "seed_0" / "cpu.json").read_text())) == {"start", "grpo", "sft"}

    start = json.loads((out / "answers" / "seed_0" / "state.json").read_text())["checkpoints"]["start"]
    run("--path", str(out / "answers" / "seed_0" / start), "--out", str(tmp_path / "other"), "--only", "answers")
    (other,) = (tmp_path / "other").glob("answers/seed_0/checkpoints/start/*")
    assert (other / "adapter_config.json").exists()

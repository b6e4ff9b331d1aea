"""Runs of recipes through the command line, and reading what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audiorl.cli import main


def train(recipe: str, out: Path, *options: str) -> Path:
    assert main(["train", recipe, "--tiny", *options, "--out", str(out)]) == 0
    return out


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_checkpoint(run: Path, phase: str = "grpo") -> Path:
    return sorted((run / "checkpoints" / phase).glob("step_*"))[-1]

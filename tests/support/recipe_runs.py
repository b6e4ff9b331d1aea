"""Runs of recipes through the command line, and reading what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from audiorl.cli import main

_exported: set[str] = set()


def train(recipe: str, out: Path, *options: str) -> Path:
    """Train in the new folder `out`, and return it; the first run of each recipe is exported, too."""
    assert main(["train", recipe, "--tiny", *options, "--out", str(out)]) == 0
    if recipe.replace("_", "-") not in _exported:
        _exported.add(recipe.replace("_", "-"))
        exported = out.with_name(f"{out.name}-exported")
        assert main(["export", str(out), "--out", str(exported)]) == 0
        assert ModelCard.load(exported / "README.md").data.pipeline_tag and any(exported.glob("*.safetensors"))
        assert not [*exported.parent.glob(".*.partial")]
    return out


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_checkpoint(run: Path, phase: str = "grpo") -> Path:
    return sorted((run / "checkpoints" / phase).glob("step_*"))[-1]

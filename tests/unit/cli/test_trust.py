"""A run folder from somebody else: resume runs no Python file that the user did not name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from audiorl.cli import main
from audiorl.recipes._loader import _python_files
from audiorl.recipes._scripts import find_script
from audiorl.run.metrics_log import read_metrics

RECIPE = """
from dataclasses import dataclass
from pathlib import Path

Path(__file__).with_suffix(".imported").touch()

@dataclass(frozen=True)
class Config:
    rate: float = 0.5
    reward_file: str | None = None

def tiny():
    return Config()

def main(config, run):
    run.log("one", 1, {"rate": config.rate})
    run.finish("one")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Path:
    """A run folder of a recipe that leaves a trace when it is imported."""
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    recipe.with_suffix(".imported").unlink()
    return tmp_path / "run"


def edit(run: Path, **fields: object) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | fields))


def test_a_recipe_that_is_not_installed_is_not_imported(
    run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run)]) == 2
    assert not recipe.with_suffix(".imported").exists()
    assert f"--trust {recipe}" in capsys.readouterr().err
    assert main(["resume", str(run), "--trust", str(recipe)]) == 0
    assert recipe.with_suffix(".imported").exists()


def test_another_file_of_the_same_name_is_not_trusted(run: Path, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = shutil.copy(recipe, tmp_path / "elsewhere" / "mine.py")
    edit(run, recipe=str(other))
    assert main(["resume", str(run), "--trust", str(recipe)]) == 2
    assert not other.with_suffix(".imported").exists()


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}:folder"])
def test_a_reward_file_or_judge_in_the_config_is_named_too(
    spelling: str, run: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = spelling.format(tmp_path / "reward.py")
    edit(run, argv=["--reward-file", file], config={"rate": 0.5, "reward_file": file})
    assert main(["resume", str(run), "--trust", str(recipe)]) == 2
    assert str(tmp_path / "reward.py") in capsys.readouterr().err
    # Left out of the recorded config, as by an earlier version, it is still an argument.
    edit(run, config={"rate": 0.5})
    assert main(["resume", str(run), "--trust", str(recipe)]) == 2
    assert "--trust" in capsys.readouterr().err


def test_a_changed_configuration_is_an_error_before_anything_runs(run: Path, recipe: Path) -> None:
    edit(run, argv=["--rate", "0.9"])
    before = read_metrics(run / "metrics.jsonl")
    assert main(["resume", str(run), "--trust", str(recipe)]) == 2
    assert read_metrics(run / "metrics.jsonl") == before


def test_installed_recipes_need_no_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is about the configuration: the recipe was imported."""
    run = tmp_path / "run"
    run.mkdir()
    recipe = str(find_script("recipes", "mmau-grpo").resolve())
    (run / "config.json").write_text(json.dumps({"recipe": recipe, "argv": ["--tiny"], "config": {"seed": 5}}))
    (run / "state.json").write_text("{}")
    assert main(["resume", str(run)]) == 2
    assert "another value for seed" in capsys.readouterr().err


def test_python_files_of_a_config() -> None:
    config = {"data": ["a.jsonl"], "judge": "j.py:folder", "files": {"reward": "r.py", "odd": "a.py:b.py"}, "n": 3}
    assert list(_python_files(config)) == ["j.py", "r.py", "a.py", "a.py:b.py"]

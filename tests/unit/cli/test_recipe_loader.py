"""Recipes by name, path and preset; a run folder from somebody else: resume runs no Python file that nobody named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import audiorl
from audiorl.cli import main
from audiorl.config import LoraConfig
from audiorl.recipes._loader import (
    find_script,
    load_recipe,
    parse_config,
    python_files,
    recorded_recipe,
    scripts,
    start,
    starting_words,
)
from audiorl.run.folder import Run

ROOT = Path(__file__).parents[3]
AUDIO_QA = ROOT / "audiorl" / "recipes" / "audio_qa.py"
RECIPE = """
from dataclasses import dataclass
from pathlib import Path

Path(__file__).with_suffix(".imported").touch()

@dataclass(frozen=True)
class Mine:
    rate: float = 0.5
    reward_file: str | None = None

def tiny():
    return Mine()

def main(config, run):
    run.log("one", 1, {"rate": config.rate})
    run.finish("one")
"""


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_file_has_a_name() -> None:
    assert set(scripts("eval")) == {
        "asr",
        "audit",
        "codec",
        "gap",
        "mmau",
        "passk",
        "qa",
        "simul",
        "sound",
        "text",
        "tts",
    }
    for name in ("audio-qa", "audio_qa", "mmau-grpo", "ppo_audio_qa", str(AUDIO_QA)):
        assert find_script("recipes", name) == AUDIO_QA


def test_numbers_of_a_recipe_from_elsewhere_may_be_below_0(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    assert parse_config(load_recipe(tmp_path / "mine.py"), ["--rate", "-1"]).rate == -1
    with pytest.raises(ValueError, match="seed is -1"):
        parse_config(load_recipe("sft-audio"), ["--seed", "-1"])


def test_names_of_presets_start_from_them() -> None:
    recipe = load_recipe("ppo-audio-qa")
    assert parse_config(recipe, starting_words("mmau-grpo")) == recipe.AudioQAConfig()
    assert parse_config(recipe, starting_words("ppo-audio-qa")) == recipe.ppo()
    assert parse_config(recipe, [*starting_words("ppo_audio_qa", tiny=True), "--seed", "3"]).rl.advantage == "gae"
    with pytest.raises(ValueError, match="--preset rloo: this recipe has grpo, ppo"):
        parse_config(recipe, ["--preset", "rloo"])
    with pytest.raises(ValueError, match="--preset ppo: this recipe has no presets"):
        parse_config(load_recipe("sft-audio"), ["--preset", "ppo"])


def test_without_a_checkout_the_installed_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "audiorl"
    (package / "recipes").mkdir(parents=True)
    (package / "recipes" / "own.py").write_text('"""A recipe of its own."""\n\ndef tiny(): ...\n')
    (package / "recipes" / "loop.py").write_text('"""No recipe."""\n')
    monkeypatch.delitem(sys.modules, "audiorl.recipes", raising=False)
    monkeypatch.setattr(audiorl, "__path__", [str(package)])
    added = {"align-speech", "simul-quickstart", "tts-quickstart"}  # of corpora, by entry points
    assert scripts("recipes").keys() == {"own", *added}


@pytest.mark.parametrize(("command", "count"), [("train", 2), ("eval", 0)])
def test_an_unknown_name_lists_all(command: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "quokka", "--out", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    files = scripts("recipes" if command == "train" else "eval")
    assert "'quokka'" in lines[0] and len(lines) == 1 + len(files) + count
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines[1:])


@pytest.mark.parametrize("name", ["quickstart", "simul-quickstart", "mmau-grpo"])
def test_a_random_model_gets_no_adapters(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="the random model `tiny` is in no folder that an adapter could name"):
        start(name, ["--tiny", "--model.lora.rank", "4"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("args", [["--rl.steps", "50"], ["--rl.steps=50"]])
def test_steps_of_a_recipe_that_counts_epochs_are_refused(args: list[str]) -> None:
    recipe = load_recipe("audio-qa")
    with pytest.raises(ValueError, match=r"--rl\.steps: .*--max-steps"):
        parse_config(recipe, args)
    assert parse_config(recipe, ["--max-steps", "50"]).max_steps == 50


# -- resuming ----------------------------------------------------------------------------------------------------------


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
def test_a_reward_file_or_model_in_the_config_is_named_too(
    spelling: str, run: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, config={"rate": 0.5, "reward_file": spelling.format(tmp_path / "reward.py")})
    assert main(["resume", str(run), "--trust", str(recipe)]) == 2
    assert str(tmp_path / "reward.py") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [({"rats": 1.0}, "no option is called rats; near ones: rate"), ({"rate": "x"}, "rate: expected float, got str")],
)
def test_a_config_that_does_not_fit_is_an_error(
    run: Path, recipe: Path, config: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, config=config)
    assert main(["resume", str(run), "--trust", str(recipe)]) == 2
    assert f"{run}/config.json: {message}" in capsys.readouterr().err


def test_the_recorded_options_are_what_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the arguments nor the recipe's defaults; an installed recipe needs no trust, and may have moved."""
    config = parse_config(load_recipe("audio-qa"), ["--tiny", "--model.lora.rank", "3", "--path", "x"])
    gone = tmp_path / "gone" / "audio_qa.py"
    with Run.create(tmp_path / "run", str(gone), ["--seed", "9"], config):
        pass
    _, resumed = recorded_recipe(tmp_path / "run")
    assert type(resumed).__name__ == "AudioQAConfig" and repr(resumed) == repr(config)
    assert resumed.model.lora == LoraConfig(rank=3) and resumed.data == ("bundled",)
    assert f"{gone} is gone; resuming with the installed recipe audio-qa" in capsys.readouterr().err
    edit(tmp_path / "run", recipe=str(tmp_path / "my_recipe.py"))
    with pytest.raises(ValueError, match=r"my_recipe\.py: no such recipe; restore the file"):
        recorded_recipe(tmp_path / "run")


def test_python_files_of_a_config() -> None:
    config = {"data": ["a.jsonl"], "judge": "j.py:folder", "files": {"reward": "r.py", "odd": "a.py:b.py"}, "n": 3}
    assert list(python_files(config)) == ["j.py", "r.py", "a.py", "a.py:b.py"]

"""Run files of the repository: each is read as its first line calls it, and one trains."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from audiorl.cli import main, train
from audiorl.eval._common import options_type
from audiorl.options import parse
from audiorl.recipes._loader import load_recipe, parse_config

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "recipes").rglob("*.yaml")), *sorted((ROOT / "eval").rglob("*.yaml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_file_is_read_as_its_first_line_calls_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, command, name, *words = shlex.split(file.read_text().splitlines()[0].removeprefix("# "))
    assert program == "audiorl" and str(file.relative_to(ROOT)) in words
    if command == "eval":
        parse(options_type(import_module(f"audiorl.eval.{name}").main), words, prog=name, run_file=True)
        return
    options, rest = train.read([name, *words])
    options.runtime.check()
    config = parse_config(load_recipe(name), rest)
    assert config != parse_config(load_recipe(name), [])
    if hasattr(config, "think") and hasattr(config, "sampling"):
        assert config.eval_tokens >= config.sampling.max_new_tokens, "answers are measured whole"
    readme = (file.parent / "README.md").read_text()
    assert "/step_" not in readme and not any("/step_" in word for word in words), "of a run the newest is taken"
    assert f"--config {file.relative_to(ROOT)}" in readme or file.name == "qwen2.5-omni-7b.yaml"
    assert all(word in readme for word in ("**Data.**", "**Expected", "**Memory.**"))


def test_one_of_them_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    file = "recipes/ke-omni-r/qwen2.5-omni-3b.yaml"
    small = "--path tiny --data bundled --held-out bundled:languages/test:2 --max-steps 1 --eval-tokens 4 "
    small += "--rl.group-size 2 --rl.prompts-per-step 2 --sampling.max-new-tokens 4 --model.dtype float32 "
    small += "--runtime.kind local --runtime.ranks 1 --runtime.zero 0"
    run = tmp_path / "run"
    assert main(["train", "audio-qa", "--config", file, *small.split(), "--out", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"{file}:2: path is 'Qwen/Qwen2.5-Omni-3B' here, 'tiny' on the command line" in printed
    assert f"{file}:11: rl.group_size is 8 here, 2 on the command line" in printed
    config = json.loads((run / "config.json").read_text())["config"]
    assert config["epochs"] == 2.0 and config["rl"]["estimator"]["eps"] == 1e-4 and config["rl"]["group_size"] == 2

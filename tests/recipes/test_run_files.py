"""Run files of the repository: each is read as its first line calls it, and one trains."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from audiorl.cli import main, train
from audiorl.data.sets import parse_set
from audiorl.eval._common import options_type
from audiorl.options import parse
from audiorl.recipes._loader import load_recipe, parse_config
from audiorl.rewards.llm_judge import RecordedSpeech
from audiorl.tasks.tts.prompts import utterance_sample
from audiorl.tasks.tts.rewards import speech_reward
from audiorl.tasks.tts.texts import read_utterances

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
    measured = [line for line in readme.replace("\\\n", " ").splitlines() if line.startswith("audiorl eval")]
    trained_on = yaml.safe_load(file.read_text()).get("data", [])
    assert not {parse_set(name)[0] for name in trained_on} & {word for line in measured for word in shlex.split(line)}


SPEAKING = [file for file in FILES if "train tts-grpo" in file.read_text().splitlines()[0]]


@pytest.mark.parametrize("file", SPEAKING, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_texts_of_lines_are_rewarded_as_the_file_says(file: Path, tmp_path: Path) -> None:
    _, rest = train.read(["tts-grpo", "--config", str(file), "--out", str(tmp_path / "run")])
    config = parse_config(load_recipe("tts-grpo"), rest)
    if not all(name.endswith(".txt") for name in config.data):
        pytest.skip("its texts have recordings")
    (tmp_path / "texts.txt").write_text("Good morning.\nWho speaks?\n")
    samples = [utterance_sample(u) for u in read_utterances(tmp_path / "texts.txt").samples]
    unheard = replace(config.rewards, understood=0.0)  # loads no recogniser
    assert speech_reward(unheard, RecordedSpeech(), samples).terms


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

"""Booleans in three forms, renamed options, and options that a recipe would ignore."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from audiorl import options
from audiorl.config import LoraConfig, ModelConfig, RLConfig, require_finite, torch_device
from audiorl.options import parse, parse_known, with_new_names
from audiorl.recipes._common import RecipeConfig
from audiorl.recipes._loader import _checked_recipe, _with_new_names, load_recipe, parse_config, start
from audiorl.recipes._scripts import find_script
from audiorl.run.folder import Run


@dataclass(frozen=True)
class Config(RecipeConfig):
    think: bool = True
    grpo: RLConfig = RLConfig()


def recipe() -> ModuleType:
    module = ModuleType("recipe")
    module.__file__, module.Config = "recipe.py", Config  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("args", [["--lora"], ["--lora", "True"], ["--lora=true"]])
def test_a_flag_a_value_and_an_equals_sign_switch_on(args: list[str]) -> None:
    assert parse(Config, args, prog="x").lora


@pytest.mark.parametrize("args", [["--no-think"], ["--think", "False"], ["--think=false"]])
def test_so_they_switch_off(args: list[str]) -> None:
    assert not parse(Config, args, prog="x").think


@pytest.mark.parametrize("args", [["--model.no-autocast"], ["--model.autocast", "False"], ["--model.autocast=False"]])
def test_booleans_of_nested_options(args: list[str]) -> None:
    default = Config(model=ModelConfig(autocast=True))
    assert not parse(Config, args, prog="x", default=default).model.autocast


def test_words_that_only_look_like_booleans_stay() -> None:
    assert parse(Config, ["--path", "True", "--data", "false", "--lora"], prog="x").path == "True"


def test_what_one_class_does_not_have_is_left_for_another() -> None:
    @dataclass(frozen=True)
    class Command:
        tiny: bool = False

    rest = ["--lora", "True", "--data", "a", "b", "--model.lora.rank", "4"]
    assert parse_known(Command, [*rest[:2], "--tiny", "True", *rest[2:]], prog="x") == (Command(tiny=True), rest)


def test_an_old_name_gives_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "RENAMED", {"grpo.beta": "grpo.kl-beta", "ratio": "ratio-cap"})
    with pytest.raises(ValueError, match=r"^--grpo\.beta is now --grpo\.kl-beta$"):
        parse(Config, ["--grpo.beta", "0"], prog="x")
    with pytest.raises(ValueError, match=r"^--grpo\.ratio is now --grpo\.ratio-cap$"):
        parse(Config, ["--grpo.ratio=3"], prog="x")
    assert with_new_names(Config, ["--grpo.beta=0", "--seed", "1"]) == ["--grpo.kl-beta=0", "--seed", "1"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("", LoraConfig(rank=0)),
        ("--lora", LoraConfig(rank=16)),
        ("--model.lora.rank 3", LoraConfig(rank=3)),
        ("--model.lora.rank 3 --model.lora.alpha 6 --lora --seed 1", LoraConfig(rank=3, alpha=6)),
        ("--lora --model.lora.target-modules q_proj v_proj", LoraConfig(16, 32, ("q_proj", "v_proj"))),
    ],
)
def test_adapters_have_options_in_any_place(args: str, expected: LoraConfig) -> None:
    config = parse_config(recipe(), args.split())
    assert config.adapted == replace(config.model, lora=expected)


def test_the_shape_of_adapters_that_are_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(recipe(), ["--model.lora.alpha", "64"])
    assert "add --lora, or give --model.lora.rank" in " ".join(capsys.readouterr().err.split())


def test_the_words_for_adapters_of_an_earlier_version() -> None:
    """They came last, and their options after them."""
    with pytest.raises(ValueError, match=r"^model\.lora:lora-config is now --model\.lora\.rank$"):
        parse_config(recipe(), ["model.lora:lora-config"])
    for old, expected in (
        ("--seed 1 model.lora:lora-config", LoraConfig()),
        ("--lora model.lora:lora-config --model.lora.rank 4", LoraConfig(rank=4)),
        ("model.lora:None", LoraConfig(rank=0)),
    ):
        config = parse_config(recipe(), with_new_names(Config, old.split()))
        assert config.model.lora == expected
    assert _with_new_names({"lora": True, "model": {"lora": None}}) == {"lora": True, "model": {"lora": {"rank": 0}}}


@pytest.mark.parametrize(
    ("words", "lora", "rank"),
    [
        ([], None, 0),
        (["model.lora:None"], None, 0),
        (["model.lora:lora-config", "--model.lora.rank", "4"], {"rank": 4, "alpha": 32}, 4),
    ],
)
def test_a_run_of_an_earlier_version_with_or_without_adapters_is_resumed(
    tmp_path: Path, words: list[str], lora: object, rank: int
) -> None:
    file = find_script("recipes", "mmau-grpo")
    with Run.create(tmp_path / "run", str(file), [], parse_config(load_recipe(file), ["--tiny"])):
        saved = tmp_path / "run" / "config.json"
    record = json.loads(saved.read_text())
    record["argv"] = ["--tiny", *words]
    record["config"]["model"]["lora"] = lora
    saved.write_text(json.dumps(record))
    _, config = _checked_recipe(tmp_path / "run", [])
    assert config.model.lora == LoraConfig(rank=rank)


@pytest.mark.parametrize("name", ["quickstart", "simul-quickstart", "mmau-grpo"])
def test_a_random_model_gets_no_adapters(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="the random model `tiny` is in no folder that an adapter could name"):
        start(find_script("recipes", name), ["--tiny", "--model.lora.rank", "4"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("args", [["--grpo.steps", "50"], ["--grpo.steps=50"]])
def test_steps_of_a_recipe_that_counts_epochs_are_refused(args: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--grpo\.steps: .*--max-steps"):
        parse_config(recipe(), args)
    assert parse_config(recipe(), ["--max-steps", "50"]).max_steps == 50


def test_the_device_is_chosen_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ModelConfig().device == "auto" and torch_device("cuda:1") == "cuda:1"
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert torch_device("auto") == device


def test_the_saved_config_of_an_earlier_version_gets_the_new_names() -> None:
    saved = {"seed": 0, "ear_steps": 3, "weights": {"whole": 2.0, "latency": 0.5}}
    renamed = {"seed": 0, "recogniser_steps": 3, "weights": {"stream_quality": 2.0, "latency": 0.5}}
    assert _with_new_names(saved) == renamed


@pytest.mark.parametrize("option", ["--epochs inf", "--epochs -1", "--max-steps 0", "--held-out-count -1"])
def test_a_recipe_s_own_numbers_out_of_range_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(recipe(), option.split())
    name = option.split()[0][2:].replace("-", "_")
    assert re.search(rf"{name} is \S+; it must be", capsys.readouterr().err)


def test_numbers_that_are_not_finite_are_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match=r"^model\.threshold is nan; it must be finite"):
        require_finite(make_dataclass("Outer", ["model"])(make_dataclass("Inner", ["threshold"])(math.nan)))

"""Booleans in three forms, renamed options, and options that a recipe would ignore."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, make_dataclass
from types import ModuleType

import pytest

from audiorl import options
from audiorl.config import LoraConfig, ModelConfig, RLConfig, require_finite, torch_device
from audiorl.options import parse, parse_known, with_new_names
from audiorl.recipe.common import RecipeConfig
from audiorl.recipe.loader import _with_new_names, parse_config


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
    adapters = parse(Config, [*args, "model.lora:lora-config", "--model.lora.rank", "3"], prog="x", default=default)
    assert adapters.model.lora == LoraConfig(rank=3)


def test_words_that_only_look_like_booleans_stay() -> None:
    assert parse(Config, ["--path", "True", "--data", "false", "--lora"], prog="x").path == "True"


def test_what_one_class_does_not_have_is_left_for_another() -> None:
    @dataclass(frozen=True)
    class Command:
        tiny: bool = False

    rest = ["--lora", "True", "--data", "a", "b", "model.lora:lora-config"]
    assert parse_known(Command, [*rest[:2], "--tiny", "True", *rest[2:]], prog="x") == (Command(tiny=True), rest)


def test_an_old_name_gives_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "RENAMED", {"grpo.beta": "grpo.kl-beta", "ratio": "ratio-cap"})
    with pytest.raises(ValueError, match=r"^--grpo\.beta is now --grpo\.kl-beta$"):
        parse(Config, ["--grpo.beta", "0"], prog="x")
    with pytest.raises(ValueError, match=r"^--grpo\.ratio is now --grpo\.ratio-cap$"):
        parse(Config, ["--grpo.ratio=3"], prog="x")
    assert with_new_names(Config, ["--grpo.beta=0", "--seed", "1"]) == ["--grpo.kl-beta=0", "--seed", "1"]


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

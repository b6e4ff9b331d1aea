"""Options from the command line, from run files and from values: booleans, what does not fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path

import pytest

from audiorl.cli.train import read as read_train
from audiorl.config import LoraConfig, ModelConfig, RLConfig, require_finite, torch_device
from audiorl.config.recipe import RecipeConfig
from audiorl.options import RunFile, parse, parse_known
from audiorl.recipes._loader import config_class, load_recipe, parse_config, scripts


@dataclass(frozen=True)
class ThinkingConfig(RecipeConfig):
    think: bool = True
    rl: RLConfig = RLConfig()
    weights: dict[str, float] | None = None


def read(*args: str) -> ThinkingConfig:
    return parse(ThinkingConfig, args, prog="x", run_file=True)


@pytest.mark.parametrize(
    ("args", "name"),
    [("--lora", "lora"), ("--lora True", "lora"), ("--lora=true", "lora"), ("--no-think", "think"),
     ("--think False", "think"), ("--think=false", "think"), ("--path True --data false --lora", "lora")],
)  # fmt: skip
def test_booleans_are_flags_or_have_values(args: str, name: str) -> None:
    assert getattr(read(*args.split()), name) is (name == "lora")


@pytest.mark.parametrize("args", [["--model.no-autocast"], ["--model.autocast", "False"], ["--model.autocast=False"]])
def test_booleans_of_nested_options(args: list[str]) -> None:
    default = ThinkingConfig(model=ModelConfig(autocast=True))
    assert not parse(ThinkingConfig, args, prog="x", default=default).model.autocast


def test_what_one_class_does_not_have_is_left_for_another() -> None:
    @dataclass(frozen=True)
    class Command:
        tiny: bool = False

    rest = ["--lora", "True", "--data", "a", "b", "--model.lora.rank", "4"]
    assert parse_known(Command, [*rest[:2], "--tiny", "True", *rest[2:]], prog="x") == (Command(tiny=True), rest)


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
    config = read(*args.split())
    assert config.adapted == replace(config.model, lora=expected)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model.lora.alpha 64", "add --lora, or give --model.lora.rank"),
        ("--epochs inf", "epochs is inf; it must be"),
        ("--max-steps 0", "max_steps is 0; it must be"),
        ("--held-out-count -1", "held_out_count is -1; it must be"),
    ],
)
def test_values_that_cannot_be(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(*args.split())
    assert message in re.sub(r"[\s│]+", " ", capsys.readouterr().err)


def test_the_device_is_chosen_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert ModelConfig().device == "auto" and torch_device("cuda:1") == "cuda:1"
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert torch_device("auto") == device


def test_numbers_that_are_not_finite_are_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match=r"^model\.threshold is nan; it must be finite"):
        require_finite(make_dataclass("Outer", ["model"])(make_dataclass("Inner", ["threshold"])(math.nan)))


# -- run files ---------------------------------------------------------------------------------------------------------

FILE = """\
# Numbers and words as YAML 1.2 reads them.
path: no
data: [a.jsonl:5, "b.jsonl"]
think: false
max_steps: 3
model: {dtype: bfloat16}
rl:
  kl-beta: 1e-3
  group_size: 4
weights: {speed: 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_a_file_lies_between_defaults_and_the_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read("--config", str(file), "--rl.group-size", "2", "--seed", "5", "--path=x")
    assert config == ThinkingConfig(
        path="x", data=("a.jsonl:5", "b.jsonl"), think=False, max_steps=3, seed=5, model=replace(ThinkingConfig().model,
        dtype="bfloat16"), rl=RLConfig(kl_beta=1e-3, group_size=2), weights={"speed": 2.0},
    )  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        f"{file}:2: path is 'no' here, 'x' on the command line",
        f"{file}:9: rl.group_size is 4 here, 2 on the command line",
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("seed: 1\nsed: 2", 2, "no option is called sed; near ones: seed"),
        ("lr: 1", 1, "no option is called lr; near ones: "),
        ("group_size: 3", 1, "no option is called group_size; near ones: rl.group_size"),
        ("rl:\n  kl_betta: 1", 2, "no option is called rl.kl_betta; near ones: rl.kl_beta"),
        ("rl:\n\n  group_size: eight", 3, "rl.group_size: expected int, got str, given 'eight'"),
        ("think: 1", 1, "think: expected bool, got int, given 1"),
        ("data: a.jsonl", 1, "data: expected array, got str, given 'a.jsonl'"),
        ("on_error: ignore", 1, "on_error: invalid enum value 'ignore', given 'ignore'"),
        ("rl: 3", 1, "rl is a group of options, not 3"),
        ("rl:\n  group_size: 0", 1, "group_size is 0; it must be at least 1"),
        ("seed: 1\nseed: 2", 2, "seed is given twice"),
        ("rl: {group-size: 4,\n  group_size: 8}", 2, "rl.group_size is given twice"),
        ("rl:\n  group-size: eight", 2, "rl.group-size: expected int, got str, given 'eight'"),
        ("seed: [1\nlora: 2", 2, "expected ',' or ']'"),
        ("- seed", 1, "give options"),
    ],
)
def test_what_does_not_fit_names_file_line_and_option(tmp_path: Path, text: str, line: int, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/bad.yaml:{line}: {message}")):
        read("--config", str(tmp_path / "bad.yaml"))


def test_a_file_that_is_missing_or_not_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--config nowhere: no such file"):
        read("--config", "nowhere")
    with pytest.raises(ValueError, match="--config: name a YAML file"):
        read("--config")
    for twice in (["--config", "a", "--config=b"], ["--config", "a", "--seed", "1", "--config", "b"]):
        with pytest.raises(ValueError, match=r"^--config: give one file$"):
            read(*twice)
        with pytest.raises(ValueError, match=r"^--config: give one file$"):
            read_train(["quickstart", *twice])
    for content in (b"seed: 1\a\n", "seed: 1\n".encode("utf-16")):
        (tmp_path / "odd.yaml").write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"^{tmp_path}/odd.yaml: not a YAML file in UTF-8: .*(#x0007|0xff)[^\n]*$"
        ):
            read("--config", str(tmp_path / "odd.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read(f"--config={tmp_path}/empty.yaml") == ThinkingConfig()


def test_a_group_that_another_command_reads(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 4\nmodel: {dtype: float16}\n")
    file = RunFile(tmp_path / "run.yaml")
    assert file.apply(ThinkingConfig(), leave_out=("model",)) == ThinkingConfig(seed=4)
    assert file.group("model", ModelConfig()).dtype == "float16"


@pytest.mark.parametrize("recipe", scripts("recipes"))
def test_printed_options_are_read_back(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_recipe(recipe)
    for words in ([], ["--tiny"]):
        with pytest.raises(SystemExit) as end:
            parse_config(module, [*words, "--seed", "7", "--print-config"])
        assert end.value.code == 0
        (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
        config = parse_config(module, ["--config", str(tmp_path / "printed.yaml")])
        assert config == parse_config(module, [*words, "--seed", "7"])
        assert isinstance(config, config_class(module))

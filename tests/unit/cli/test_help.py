"""Every command has help, which does not wait for torch, and every option says what it does."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from rich.console import Console

from audiorl import cli
from audiorl.cli import main
from audiorl.cli.results import print_results
from audiorl.config.distributed import RuntimeConfig
from audiorl.eval._common import options_type
from audiorl.recipes._loader import load_recipe
from audiorl.recipes._scripts import scripts

COMMANDS = (
    "", "train", "resume", "report", "eval", "rewards", "rewards score", "rewards serve", "codec", "codec encode",
    "codec decode", "graft", "export", "chat", "say", "doctor",
)  # fmt: skip
COMMAND_OPTIONS = (
    "Train",
    "Resume",
    "Report",
    "Eval",
    "Score",
    "Serve",
    "Encode",
    "Decode",
    "Graft",
    "Export",
    "Chat",
    "Say",
    "Doctor",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: audiorl {command}".rstrip() in text


def test_help_loads_no_torch() -> None:
    code = f"""
import contextlib, io, sys
from audiorl.cli import main
for command in {COMMANDS}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
print([m for m in ("torch", "transformers", "numpy", "fastapi", "matplotlib") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["train", "eval"])
def test_recipes_and_evaluations_are_listed_with_what_they_do(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ("mmau-grpo " if command == "train" else "mmau ") in text


def test_help_of_a_recipe_shows_its_options_and_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "mmau_grpo", "--tiny", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for option in ("--out", "--tiny", "--runtime.ranks", "--grpo.kl-beta", "--think, --no-think", "--model.device"):
        assert option in text
    assert "(default: tiny)" in text  # the path that tiny() sets


def option_classes(options: Any) -> Iterator[type]:
    """The dataclass and those of its fields."""
    members = get_args(options) if get_origin(options) in (Union, types.UnionType, Annotated) else (options,)
    for kind in filter(dataclasses.is_dataclass, members):
        yield kind
        for hint in get_type_hints(kind, include_extras=True).values():
            yield from option_classes(hint)


@functools.cache
def documented(kind: type) -> set[str]:
    """The fields with a docstring, in the class or one that it extends."""
    result = set()
    for base in filter(dataclasses.is_dataclass, kind.__mro__):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                result.add(ast.unparse(field.target))
    return result


def undocumented(options: Any) -> list[str]:
    """Fields without a description. Those that hold another dataclass have its description."""
    return [
        f"{kind.__name__}.{name}"
        for kind in option_classes(options)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if name not in documented(kind) and not any(option_classes(hint))
    ]


@dataclasses.dataclass
class Bare:
    runtime: RuntimeConfig
    steps: int
    rate: float
    """Hz."""


def test_a_field_without_a_description_is_noticed() -> None:
    assert undocumented(Bare) == ["Bare.steps"]


@pytest.mark.parametrize("recipe", scripts("recipes"))
def test_every_option_of_a_recipe_is_described(recipe: str) -> None:
    assert undocumented(load_recipe(recipe).Config) == []


@pytest.mark.parametrize("evaluation", scripts("eval"))
def test_every_option_of_an_evaluation_is_described(evaluation: str) -> None:
    assert undocumented(options_type(import_module(f"audiorl.eval.{evaluation}").main)) == []


@pytest.mark.parametrize("name", COMMAND_OPTIONS)
def test_every_option_of_a_command_is_described(name: str) -> None:
    assert undocumented(getattr(cli, name)) == []


def test_the_table_goes_from_before_to_after_to_control(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    print_results(tmp_path, console)
    assert console.export_text() == ""
    (tmp_path / "eval.json").write_text(
        '{"before": {"accuracy": 0.5, "n": 8, "by_task": {"English": {"accuracy": 0.95, "n": 8}}}, '
        '"after": {"accuracy": 0.75, "n": 8, "by_task": {"English": {"accuracy": 0.87, "n": 8}}}, '
        '"control": {"accuracy": 0.5, "n": 8}}'
    )
    print_results(tmp_path, console)
    lines = console.export_text().splitlines()
    heading, accuracy, english = (
        next(line for line in lines if word in line) for word in ("change", "accuracy ", "accuracy, E")
    )
    assert heading.index("before") < heading.index("after") < heading.index("control") < heading.index("change")
    assert [cell.strip() for cell in accuracy.split("│")[2:6]] == ["50.0%", "75.0%", "50.0%", "+25.0 points"]
    assert "8.0 points" in english

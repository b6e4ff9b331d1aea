"""Every command has help, which does not wait for torch, and every option says what it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from audiorl.cli import main
from audiorl.cli.results import print_results

COMMANDS = (
    "", "train", "resume", "report", "eval", "rewards", "rewards score", "rewards serve", "codec", "codec encode",
    "codec decode", "doctor",
)  # fmt: skip


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

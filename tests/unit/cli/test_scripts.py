"""Recipes and evaluations are run by name from any folder, and those of the checkout come before installed ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import audiorl
from audiorl.cli import main
from audiorl.recipes._scripts import find_script, scripts

ROOT = Path(__file__).parents[3]


def test_every_file_has_a_name() -> None:
    assert scripts("recipes")["mmau-grpo"] == ROOT / "audiorl" / "recipes" / "mmau_grpo.py"
    assert set(scripts("eval")) == {"asr", "audit", "codec", "gap", "mmau", "passk", "simul", "text", "tts"}
    for name in ("mmau-grpo", "mmau_grpo", str(ROOT / "audiorl" / "recipes" / "mmau_grpo.py")):
        assert find_script("recipes", name) == ROOT / "audiorl" / "recipes" / "mmau_grpo.py"


def test_without_a_checkout_the_installed_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "audiorl"
    (package / "recipes").mkdir(parents=True)
    (package / "recipes" / "own.py").write_text('"""A recipe of its own."""\n')
    monkeypatch.delitem(sys.modules, "audiorl.recipes", raising=False)
    monkeypatch.setattr(audiorl, "__path__", [str(package)])
    assert scripts("recipes") == {"own": package / "recipes" / "own.py"}


@pytest.mark.parametrize(("command", "kind"), [("train", "recipes"), ("eval", "eval")])
def test_an_unknown_name_lists_all_with_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "mmaus", "--out", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "'mmaus'" in lines[0] and len(lines) == 1 + len(scripts(kind))  # type: ignore[arg-type]
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines[1:])

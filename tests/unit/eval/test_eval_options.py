"""What every evaluation does with its options before it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from audiorl.eval._common import run_evaluation
from audiorl.run.folder import Run
from tests.conftest import make_text
from tests.support.checkpoints import save_run

seen: list[str | None] = []


@dataclass(frozen=True)
class Options:
    newest: ClassVar[bool] = True
    model: str | None = None


def main(options: Options) -> None:
    seen.append(options.model)


def given(monkeypatch: pytest.MonkeyPatch, model: str, newest: bool = True) -> str | None:
    monkeypatch.setattr(Options, "newest", newest)
    run_evaluation(sys.modules[__name__], ["--model", model])
    return seen.pop()


def test_a_run_folder_stands_for_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", "recipe.py", [], {})
    with pytest.raises(SystemExit):
        given(monkeypatch, str(run.dir))
    assert "the run has no checkpoint yet" in capsys.readouterr().err
    for step in (1, 2):
        run.log("sft", step, {"loss": 1.0})
        save_run(run, "sft", step, make_text(), {})
    newest = run.dir / "checkpoints" / "sft" / "step_000002"
    assert given(monkeypatch, str(run.dir)) == str(newest)
    assert capsys.readouterr().err == f"{run.dir}: checkpoints/sft/step_000002\n"
    assert given(monkeypatch, str(newest)) == str(newest)
    assert given(monkeypatch, str(run.dir), newest=False) == str(run.dir)
    assert given(monkeypatch, "Qwen/Qwen2.5-Omni-3B") == "Qwen/Qwen2.5-Omni-3B"
    assert capsys.readouterr().err == ""

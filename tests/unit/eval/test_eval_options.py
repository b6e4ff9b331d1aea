"""What every script of eval/ does with its options before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from audiorl.eval._options import run_script
from audiorl.run.folder import Run
from tests.conftest import make_text


@dataclass(frozen=True)
class Options:
    model: str | None = None


def given(monkeypatch: pytest.MonkeyPatch, model: str, newest: bool = True) -> str | None:
    seen: list[Options] = []
    monkeypatch.setattr("sys.argv", ["text", "--model", model])
    run_script(seen.append, Options, None, newest=newest)
    return seen[0].model


def test_a_run_folder_stands_for_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", "recipe.py", [], {})
    with pytest.raises(SystemExit):
        given(monkeypatch, str(run.dir))
    assert "the run has no checkpoint yet" in capsys.readouterr().err
    for step in (1, 2):
        run.log("sft", step, {"loss": 1.0})
        run.save("sft", step, make_text(), {})
    newest = run.dir / "checkpoints" / "sft" / "step_000002"
    assert given(monkeypatch, str(run.dir)) == str(newest)
    assert capsys.readouterr().err == f"{run.dir}: checkpoints/sft/step_000002\n"
    assert given(monkeypatch, str(newest)) == str(newest)
    assert given(monkeypatch, str(run.dir), newest=False) == str(run.dir)
    assert given(monkeypatch, "Qwen/Qwen2.5-Omni-3B") == "Qwen/Qwen2.5-Omni-3B"
    assert capsys.readouterr().err == ""

"""Arms from a run of simul-quickstart to their tables, and a second call that trains nothing again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from audiorl.cli import main
from tests.support.tools import run_tool

SMALL = ["--tiny", "--ks", "--source", "es", "--target", "en", "--unseen", "unseen_speakers", "--late-steps", "1"]


measure = partial(run_tool, "measure_interpretation")


@pytest.mark.slow
def test_an_arm_is_trained_once_and_measured_on_strangers(tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "arms"
    assert main(["train", "simul-quickstart", *SMALL, "--out", run]) == 0
    first = measure(run, "--out", str(out), "--arms", "hpo")
    second = measure(run, "--out", str(out), "--arms", "hpo", "kl-fixed", "on-time", "wait-2")
    assert "stage2 1/4" in first and "stage2 1/4" not in second and "sft 1/" in second
    known, unseen = (out / "table.md").read_text().split("## ")[1:]
    assert known.startswith("test\n") and unseen.startswith("unseen\n")
    for part in (known, unseen):
        names = [line.split(" | ")[0].removeprefix("| ") for line in part.splitlines() if line.startswith("| ")]
        rows = [name for name in names[2:] if name]
        assert rows == [
            *(
                f"{arm}, 1 runs"
                for arm in ("before", "on time", "after stage1", "after", "HPO", "KL fixed", "SFT on time", "wait-2")
            )
        ]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_other_recipes_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"recipe": "recipes/grpo.py", "argv": [], "config": {}}')
    with pytest.raises(SystemExit, match=f"{run}: a run of recipes/grpo.py; give runs of simul-quickstart"):
        measure(str(run), "--out", str(tmp_path / "arms"))

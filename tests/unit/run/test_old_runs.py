"""Run folders whose recipe has moved since they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiorl.recipes._loader import _recipe_file, load_recipe


def test_a_run_whose_recipe_file_is_gone_resumes_with_the_installed_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "recipes" / "mmau_grpo.py")
    assert _recipe_file(gone) == "mmau-grpo"
    assert f"{gone} is gone; resuming with the installed recipe mmau-grpo" in capsys.readouterr().err
    here = tmp_path / "mmau_grpo.py"
    here.touch()
    assert _recipe_file(str(here)) == str(here), "a file that is there is used"


def test_a_recipe_that_is_gone_and_not_installed(tmp_path: Path) -> None:
    gone = str(tmp_path / "my_recipe.py")
    with pytest.raises(ValueError, match=r"my_recipe\.py: no such recipe"):
        load_recipe(_recipe_file(gone))

"""tools/structure.py: the repository keeps its layers; circles, upward imports and unplaced packages are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools import load_tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def structure():
    with pytest.MonkeyPatch.context() as patch:
        yield load_tool("structure", patch)


def test_the_repository_has_no_circle_and_no_upward_import(structure, capsys):
    problems = structure.main([])
    assert problems == 0, capsys.readouterr().out


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "audiorl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()


def test_lazy_imports_count_and_make_a_circle(structure, tmp_path, capsys):
    write(
        tmp_path,
        {
            "models/policy.py": "def f():\n    from audiorl.algos import kl\n    return kl\n",
            "algos/kl.py": "from importlib import import_module\n\npolicy = import_module('audiorl.models.policy')\n",
        },
    )
    assert structure.main(["--root", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "import circles: 1\n  audiorl.algos <-> audiorl.models" in out
    assert "audiorl/algos/kl.py:3: audiorl.algos imports audiorl.models, which lies above it" in out


def test_an_upward_import_and_a_package_without_a_layer(structure, tmp_path, capsys):
    write(
        tmp_path,
        {"rollout/hf.py": "from ..rl import train\n", "rl/train.py": "", "new/one.py": "import audiorl.train.rl.train"},
    )
    assert structure.report_imports(tmp_path) == 2
    out = capsys.readouterr().out
    assert (
        "audiorl/rollout/hf.py:1: audiorl.rollout imports audiorl.train.rl" in out
        and "audiorl.new is in no layer" in out
    )


def test_lines_of_code_leave_out_comments_and_blank_lines(structure):
    source = '"""Doc\n\nstring."""\n\n# a comment\nx = 1  # behind code\n\n\ndef f():\n    return x\n'
    assert structure.code_lines(source) == {1, 3, 6, 9, 10}
    assert structure.docstring_lines(source) == {1, 2, 3}


@pytest.mark.slow
def test_the_core_path_is_measured(structure, tmp_path):
    trace = structure.trace_recipe(ROOT, ROOT / "mmau-grpo", str(tmp_path / "run"))
    ran = {(str(d.file), d.name): len(d.lines) for d in structure.executed(trace)}
    assert ran["audiorl/train/rl/losses.py", "policy_loss"] > 10
    assert ("audiorl/rollout/vllm.py", "VLLMEngine") not in ran, "imported, never used"
    assert (
        trace.stack[0] == "audiorl/recipes/audio_qa.py:main"
        and trace.stack[-1] == "audiorl/train/rl/losses.py:policy_loss"
    )

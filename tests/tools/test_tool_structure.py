"""tools/structure.py: the repository keeps its layers and names; what breaks them is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools import ROOT, load_tool


@pytest.fixture(scope="module")
def structure():
    with pytest.MonkeyPatch.context() as patch:
        yield load_tool("structure", patch)


def test_repository(structure, capsys):
    problems = structure.main([])
    assert problems == 0, capsys.readouterr().out


PLANTED = {
    "models/policy.py": "def f():\n    from audiorl.algos import kl\n    return kl\n",
    "algos/kl.py": "from importlib import import_module\n\npolicy = import_module('audiorl.models.policy')\n",
    "algos/pair.py": "class Pair: ...\n\n\ndef f(group):\n    return group.each('step')\n",
    "rollout/hf.py": "from ..train import rl\n\n\nclass Pair: ...\n",
    "train/rl.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from audiorl.train import sft\n",
    "train/sft.py": "from audiorl.train.rl import x\n",
    "new/one.py": "import audiorl.rollout.hf\n",
}


def test_planted_faults(structure, tmp_path, capsys, monkeypatch):
    for name, text in PLANTED.items():
        path = tmp_path / "audiorl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert structure.main(["--root", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    for finding in (
        "upward: audiorl.algos.kl:3 imports audiorl.models.policy",
        "upward: audiorl.rollout.hf:1 imports audiorl.train.rl",
        "circle: audiorl.algos.kl <-> audiorl.models.policy",
        "circle: audiorl.train.rl <-> audiorl.train.sft",
        "one name, several classes: Pair in audiorl.algos.pair, audiorl.rollout.hf",
        "method named by a string: audiorl/algos/pair.py:5",
        "no layer: add audiorl.new to LAYERS",
    ):
        assert finding in out


@pytest.mark.slow
def test_step(structure, tmp_path):
    trace = structure.trace_recipe(ROOT, "mmau-grpo", str(tmp_path / "run"))
    ran = {str(Path(file).relative_to(ROOT)) for file in trace.files}
    assert {"audiorl/train/rl/trainer.py", "audiorl/rollout/hf.py", "audiorl/algos/packing.py"} <= ran
    assert "audiorl/rollout/vllm.py" not in ran, "imported, never used"
    assert trace.stack[-1].endswith(":policy_loss")

"""What our worker uses of vLLM's model runners V1 and V2 is in vLLM's source; those for GPUs run nowhere here."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

spec = find_spec("vllm")
pytestmark = pytest.mark.skipif(spec is None, reason="vllm is not installed")
VLLM = Path(spec.origin).parent if spec is not None and spec.origin else Path()
WORKER = Path(__file__).parents[3] / "audiorl" / "rollout" / "vllm_worker.py"
RUNNERS = {"V1": "v1/worker/gpu_model_runner.py", "V2": "v1/worker/gpu/model_runner.py"}


def defined(path: Path, name: str) -> set[str]:
    """Methods and attributes of a class and its bases in vLLM."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    cls = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    names = {n.name for n in ast.walk(cls) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {n.attr for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for base in (b.id for b in cls.bases if isinstance(b, ast.Name)):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == base:
                names |= defined(path, base)
            elif isinstance(node, ast.ImportFrom) and base in {a.asname or a.name for a in node.names}:
                file = VLLM.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
                names |= defined(file, base) if file.is_file() else set()
    return names


def used(*owners: str) -> set[str]:
    """The attributes that our worker reads of these expressions."""
    nodes = (n for n in ast.walk(ast.parse(WORKER.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute))
    return {n.attr for n in nodes if ast.unparse(n.value) in owners}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_model_runner_and_its_adapters_have_what_the_worker_uses(runner: str) -> None:
    names = used("runner", "self.model_runner")
    assert {"get_model", "model_config"} <= names <= defined(VLLM / RUNNERS[runner], "GPUModelRunner")
    names = used("manager")
    assert (
        {"modules", "activate_adapter"} <= names <= defined(VLLM / "lora/model_manager.py", "LRUCacheLoRAModelManager")
    )
    assert "_adapter_manager" in defined(VLLM / "lora/worker_manager.py", "LRUCacheWorkerLoRAManager")

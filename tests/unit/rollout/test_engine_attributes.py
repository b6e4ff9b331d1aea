"""What audiorl uses of vLLM is there: in the model runners V1 and V2, in its engine and in its modules. By vLLM's
source; nothing of it is imported, so that the runners for GPUs are read too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

OURS = Path(__file__).parents[3] / "audiorl" / "rollout"
FILES = (OURS / "vllm.py", OURS / "vllm_worker.py")
RUNNERS = {
    "V1": "v1/worker/gpu_model_runner.py",
    "V2": "v1/worker/gpu/model_runner.py",
}
ENGINE = "v1/engine/llm_engine.py"

spec = find_spec("vllm")
pytestmark = pytest.mark.skipif(spec is None, reason="vllm is not installed")
VLLM = Path(spec.origin).parent if spec is not None and spec.origin else Path()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_file(module: str) -> Path | None:
    """The source of a module of vLLM."""
    place = VLLM.parent.joinpath(*module.split("."))
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)


def imported_from(path: Path) -> Iterator[tuple[str, str, str]]:
    """(module, name, name here) of what a file imports from vLLM."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((str(node.module), alias.name, alias.asname or alias.name) for alias in node.names)


def defined(path: Path, name: str) -> set[str]:
    """Methods and attributes of a class, those of its bases in vLLM included."""
    cls = next(n for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef) and n.name == name)
    names: set[str] = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    sources = {here: (module_file(module), original) for module, original, here in imported_from(path)}
    here = {n.name for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)}
    for base in cls.bases:
        base_name = base.id if isinstance(base, ast.Name) else ""
        file, original = (path, base_name) if base_name in here else sources.get(base_name, (None, ""))
        if file is not None:
            names |= defined(file, original)
    return names


def used(path: Path, *owners: str) -> set[str]:
    """The attributes that a file reads of these expressions."""
    nodes = (n for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute))
    return {n.attr for n in nodes if ast.unparse(n.value) in owners}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_model_runner_has_what_the_worker_uses(runner: str) -> None:
    names = used(FILES[1], "runner", "self.model_runner")
    assert {"get_model", "model_config"} <= names
    assert not names - defined(VLLM / RUNNERS[runner], "GPUModelRunner")


def test_the_manager_of_adapters_has_what_the_worker_uses() -> None:
    """Both runners have one of this class."""
    names = used(FILES[1], "manager")
    assert {"modules", "packed_modules", "activate_adapter"} <= names
    assert not names - defined(VLLM / "lora/model_manager.py", "LRUCacheLoRAModelManager")
    assert "_adapter_manager" in defined(VLLM / "lora/worker_manager.py", "LRUCacheWorkerLoRAManager")


def test_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def f(runner):\n    runner.get_model()\n    runner.weights_of_yesterday = runner.gone\n")
    assert used(mine, "runner") - defined(VLLM / RUNNERS["V2"], "GPUModelRunner") == {"weights_of_yesterday", "gone"}


def test_the_engine_has_what_is_called() -> None:
    names = used(FILES[0], "self._llm")
    assert {"add_request", "collective_rpc", "sleep"} <= names
    assert not names - defined(VLLM / ENGINE, "LLMEngine")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_imported_names_are_in_their_modules(path: Path) -> None:
    missing = []
    for module, name, _ in imported_from(path):
        file = module_file(module)
        top = {
            part
            for node in ast.walk(tree(file) if file else ast.Module([], []))
            for part in (
                [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef)
                else [a.asname or a.name for a in node.names] if isinstance(node, ast.ImportFrom | ast.Import)
                else [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                else [key.value for key in node.keys if isinstance(key, ast.Constant)] if isinstance(node, ast.Dict)
                else []
            )
        }  # fmt: skip
        if name not in top and module_file(f"{module}.{name}") is None:
            missing.append(f"{module}.{name}")
    assert not missing

"""Scripts of `tools/` and `experiments/` as modules."""

from __future__ import annotations

import importlib.util
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def load_tool(name: str, patch: pytest.MonkeyPatch) -> Any:
    """The module of the script NAME.py, which finds its neighbours; `patch` forgets it afterwards."""
    file = next(file for folder in ("tools", "experiments") if (file := ROOT / folder / f"{name}.py").is_file())
    patch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def run_tool(name: str, *arguments: str) -> str:
    """Return what the script NAME.py prints; it runs in this process, which has imported torch and transformers."""
    printed, threads = io.StringIO(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        tool = load_tool(name, patch)
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.chdir(ROOT)
        try:
            tool.main()
        finally:
            torch.set_num_threads(threads)
    return printed.getvalue()

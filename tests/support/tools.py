"""Scripts of `tools/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def load_tool(name: str, patch: pytest.MonkeyPatch) -> Any:
    """The module of tools/NAME.py, which finds its neighbours; `patch` forgets it afterwards."""
    patch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module

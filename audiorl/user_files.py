"""Functions and values of Python files that a user names by path: rewards, judges, experts."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_name(path: str | Path, name: str, what: str = "file") -> Any:
    """Import the Python file at `path` and return its module-level `name`; errors call the file a `what`.

    An exception that the file itself raises on import passes through. Raises ValueError for a file that does not exist,
    is not Python or does not define the name.
    """
    file = Path(path).expanduser()
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{what} {str(path)!r}: {'not a Python file (.py)' if file.is_file() else 'no such file'}")
    file = file.resolve()
    # The name carries the path: two files called reward.py must not replace each other.
    module_name = f"audiorl_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before running it: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    if not hasattr(module, name):
        raise ValueError(f"{what} {str(path)!r}: defines no module-level name {name!r}")
    return getattr(module, name)


def load_function(path: str | Path, name: str, what: str = "file") -> Callable[..., Any]:
    """Like `load_name`; also raises ValueError for a value that cannot be called."""
    function = load_name(path, name, what)
    if not callable(function):
        raise ValueError(f"{what} {str(path)!r}: {name!r} is a {type(function).__name__}, expected a function")
    return function

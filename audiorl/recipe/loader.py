"""Recipes: Python files that say what one kind of run does.

A recipe has a frozen dataclass `Config` whose fields are the command line's options, a function `main(config, run)`,
and `tiny()`, a Config that finishes in seconds; some have `full()`, a Config for real data on GPUs. Of processes that
torchrun started the first runs the recipe; the others do what its training phases ask of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import tyro

from audiorl.config import to_json
from audiorl.recipe.scripts import find_script
from audiorl.run.checkpoint import read_json
from audiorl.run.folder import Run
from audiorl.runtime.placement import processes
from audiorl.runtime.torchrun import follow, process_group, rank


def load_recipe(path: str | Path) -> ModuleType:
    """Import a recipe by its name or path."""
    file = find_script("recipes", path)
    name = f"audiorl_recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    for needed in ("Config", "main", "tiny"):
        if not hasattr(module, needed):
            raise ValueError(f"{file}: a recipe defines Config, main(config, run) and tiny(); {needed} is missing")
    return module


def parse_config(recipe: ModuleType, argv: Sequence[str]) -> Any:
    """The recipe's Config with the overrides of `argv` (`--grpo.lr 1e-6`); `--tiny` starts from `tiny()` instead,
    `--full` from `full()` where the recipe has it."""
    rest = [a for a in argv if a not in ("--tiny", "--full")]
    if "--full" in argv and not hasattr(recipe, "full"):
        raise ValueError(f"{recipe.__file__}: this recipe has no full(); leave --full out")
    default = recipe.tiny() if "--tiny" in argv else recipe.full() if "--full" in argv else recipe.Config()
    return tyro.cli(
        recipe.Config,
        args=rest,
        default=default,
        prog=f"audiorl train {recipe.__file__}",
        description=recipe.__doc__,
        config=(tyro.conf.FlagConversionOff,),
    )


def start(path: str | Path, argv: Sequence[str], out: str | Path) -> Run | None:
    """Run a recipe in a new folder. Processes of torchrun beyond the first follow it and have no run."""
    recipe = load_recipe(path)
    config = parse_config(recipe, argv)
    if rank() > 0:
        _follow()
        return None
    run = Run.create(out, str(Path(path).resolve()), argv, config)
    try:
        with processes():
            recipe.main(config, run)
    except (ValueError, OSError):
        run.discard_if_empty()  # a mistake in the data or options should not block the same --out
        raise
    return run


def resume(folder: str | Path) -> Run | None:
    """Continue a run where its folder says it is. The recipe must still resolve to the same config."""
    if rank() > 0:
        _follow()
        return None
    run = Run.open(folder)
    saved = read_json(run.dir / "config.json")
    recipe = load_recipe(saved["recipe"])
    config = parse_config(recipe, saved["argv"])
    changed = _difference(saved["config"], to_json(config))
    if changed:
        raise ValueError(
            f"{run.dir}/config.json: the recipe now gives another value for {changed}; "
            "restore the recipe, or start a new run"
        )
    with processes():
        recipe.main(config, run)
    return run


def _follow() -> None:
    with process_group():
        follow()


def _difference(old: Any, new: Any, path: str = "") -> str | None:
    """The path of the first value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            found = _difference(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
            if found:
                return found
        return None
    return None if old == new else (path or "the config")

"""Recipes: Python files that say what one kind of run does.

A recipe has a frozen dataclass `Config` whose fields are the command line's options, a function `main(config, run)`,
and `tiny()`, a Config that finishes in seconds; some have `full()`, a Config for real data on GPUs. Of processes that
torchrun started the first runs the recipe; the others do what its training phases ask of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from audiorl.config import to_json
from audiorl.options import new_name, parse, with_new_names
from audiorl.recipe.common import RecipeConfig
from audiorl.recipe.scripts import find_script, scripts
from audiorl.run.folder import Run, check_run_folder
from audiorl.run.lock import locked
from audiorl.run.records import RunConfig, read_record
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
    """The recipe's Config with the overrides of `argv` (`--grpo.kl-beta 0`) on top of `default_config`.

    Raises ValueError for an option that has a new name and for one that the recipe would ignore.
    """
    if issubclass(recipe.Config, RecipeConfig):
        for option in (arg.split("=")[0] for arg in argv):
            if option.startswith("--") and option.endswith(".steps"):
                raise ValueError(
                    f"{option}: the steps of this recipe follow from --epochs, passes over the data, and --max-steps; "
                    "set those"
                )
    return parse(
        recipe.Config,
        [a for a in argv if a not in ("--tiny", "--full")],
        default=default_config(recipe, argv),
        prog=f"audiorl train {recipe.__file__}",
        description=recipe.__doc__,
    )


def default_config(recipe: ModuleType, argv: Sequence[str]) -> Any:
    """`Config()`; with `--tiny` among the arguments `tiny()`, with `--full` `full()`, which not every recipe has."""
    if "--full" in argv and not hasattr(recipe, "full"):
        raise ValueError(f"{recipe.__file__}: this recipe has no full(); leave --full out")
    return recipe.tiny() if "--tiny" in argv else recipe.full() if "--full" in argv else recipe.Config()


def start(path: str | Path, argv: Sequence[str], out: str | Path, trackers: Sequence[str] = ()) -> Run | None:
    """Run a recipe in a new folder, and log to `trackers` (names of `audiorl.run.trackers`).

    Processes of torchrun beyond the first follow it and have no run.
    """
    recipe = load_recipe(path)
    config = parse_config(recipe, argv)
    if rank() > 0:
        _follow()
        return None
    run = Run.create(out, str(Path(path).resolve()), argv, config)
    try:
        with locked(run.dir), processes():
            run.track(trackers)
            recipe.main(config, run)
    except (ValueError, OSError):
        run.discard_if_empty()  # a mistake in the data or options should not block the same --out
        raise
    finally:
        run.close()
    return run


def resume(folder: str | Path, trackers: Sequence[str] = ()) -> Run | None:
    """Continue a run where its folder says it is, on the device where it began.

    The recipe must still resolve to the same config. An option that the run's version did not have may have any value.
    """
    if rank() > 0:
        _follow()
        return None
    folder = Path(folder)
    check_run_folder(folder)
    with locked(folder):
        return _resume(Run.open(folder), trackers)


def _resume(run: Run, trackers: Sequence[str]) -> Run:
    saved = read_record(run.dir / "config.json", RunConfig)
    recipe = load_recipe(_recipe_file(saved.recipe))
    argv = with_new_names(recipe.Config, saved.argv)
    before = _with_new_names(saved.config)
    argv += [word for word in _device_options(before) if word.split("=")[0] not in argv]
    config = parse_config(recipe, argv)
    changed = _difference(before, to_json(config))
    if changed:
        raise ValueError(
            f"{run.dir}/config.json: the recipe now gives another value for {changed}; "
            "restore the recipe, or start a new run"
        )
    try:
        run.track(trackers)
        with processes():
            recipe.main(config, run)
    finally:
        run.close()
    return run


def _recipe_file(path: str) -> str:
    """The recipe of a saved run; where the file is gone, the installed recipe of the same name."""
    name = Path(path).stem.replace("_", "-")
    if Path(path).is_file() or name not in scripts("recipes"):
        return path
    print(f"audiorl: {path} is gone; resuming with the installed recipe {name}", file=sys.stderr)
    return name


def _follow() -> None:
    with process_group():
        follow()


def _with_new_names(config: Any, path: str = "") -> Any:
    """A saved config with today's names of its fields."""
    if not isinstance(config, dict):
        return config
    result = {}
    for name, value in config.items():
        option = f"{path}{name}".replace("_", "-")
        key = (new_name(option) or name).rpartition(".")[2].replace("-", "_")
        result[key] = _with_new_names(value, f"{option}.")
    return result


def _device_options(config: Any, path: str = "--") -> Iterator[str]:
    """The options that name the devices of a saved config."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _device_options(value, f"{path}{name}.")
        elif name == "device":
            yield f"{path}{name}={value}"


def _difference(old: Any, new: Any, path: str = "") -> str | None:
    """The path of the first value of `old` that differs in `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            difference = _difference(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
            if difference:
                return difference
        return None
    return None if old == new else (path or "the config")

"""Recipes: Python files that say what one kind of run does.

A recipe has a frozen dataclass `Config` whose fields are the command line's options, a function `main(config, run)`,
and `tiny()`, a Config that finishes in seconds; some have `full()`, a Config for real data on GPUs. Of processes that
torchrun started the first runs the recipe; the others do what its training phases ask of them.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from audiorl.config import require_finite, to_json
from audiorl.distributed.placement import processes
from audiorl.distributed.torchrun import follow, process_group, rank
from audiorl.options import new_name, parse, with_new_names
from audiorl.recipes._common import RecipeConfig
from audiorl.recipes._scripts import find_script, scripts
from audiorl.run.folder import Run, check_run_folder
from audiorl.run.records import RunConfig, read_record


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
    config = parse(
        recipe.Config,
        [a for a in argv if a not in ("--tiny", "--full")],
        default=default_config(recipe, argv),
        prog=f"audiorl train {recipe.__file__}",
        description=recipe.__doc__,
    )
    require_finite(config)
    return config


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
    with Run.create(out, str(Path(path).resolve()), argv, config) as run:
        try:
            with processes():
                run.track(trackers)
                recipe.main(config, run)
        except (ValueError, OSError):
            run.discard_if_empty()  # a mistake in the data or options should not block the same --out
            raise
    return run


def resume(folder: str | Path, trackers: Sequence[str] = (), trusted: Sequence[str | Path] = ()) -> Run | None:
    """Continue a run where its folder says it is, on the device where it began.

    The recipe must still resolve to the same config. An option that the run's version did not have may have any value.
    Python files that the folder names are run only if they are installed recipes or in `trusted`; ValueError names the
    others. Nothing of the run is changed before both are checked.
    """
    if rank() > 0:
        _follow()
        return None
    folder = Path(folder)
    check_run_folder(folder)
    recipe, config = _checked_recipe(folder, trusted)
    with Run.open(folder) as run, processes():
        run.track(trackers)
        recipe.main(config, run)
    return run


def recorded_defaults(folder: Path) -> dict[str, Any] | None:
    """The default config of a saved run's recipe; None for a recipe that is not installed, which is not run."""
    recipe = Path(read_record(folder / "config.json", RunConfig).recipe).stem.replace("_", "-")
    defaults = to_json(load_recipe(recipe).Config()) if recipe in scripts("recipes") else None
    return defaults if isinstance(defaults, dict) else None


def _checked_recipe(folder: Path, trusted: Sequence[str | Path]) -> tuple[ModuleType, Any]:
    """The recipe of a saved run and its config, which is the saved one."""
    saved = read_record(folder / "config.json", RunConfig)
    try:
        file = find_script("recipes", _recipe_file(saved.recipe))
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: {saved.recipe}: no such recipe; restore the file") from error
    installed = {path.resolve() for path in scripts("recipes").values()}
    recipe_files = [] if file.resolve() in installed else [str(file)]
    _check_trusted(folder, [*recipe_files, *_python_files(saved.config)], trusted)
    recipe = load_recipe(file)
    argv = with_new_names(recipe.Config, saved.argv)
    before = _with_new_names(saved.config)
    argv += [word for word in _device_options(before) if word.split("=")[0] not in argv]
    config = parse_config(recipe, argv)
    changed = _difference(before, to_json(config))
    if changed:
        raise ValueError(
            f"{folder}/config.json: the recipe now gives another value for {changed}; "
            "restore the recipe, or start a new run"
        )
    _check_trusted(folder, list(_python_files(to_json(config))), trusted)
    return recipe, config


def _check_trusted(folder: Path, files: Sequence[str], trusted: Sequence[str | Path]) -> None:
    """Raise ValueError for Python files that a run folder names and the user does not."""
    allowed = {Path(path).expanduser().resolve() for path in trusted}
    unknown = [file for file in dict.fromkeys(files) if Path(file).expanduser().resolve() not in allowed]
    if unknown:
        raise ValueError(
            f"{folder}/config.json: resuming runs Python files that are not part of audiorl: {', '.join(unknown)}; if "
            f"you trust them, name them: audiorl resume {folder} --trust {shlex.join(unknown)}"
        )


def _python_files(value: Any) -> Iterator[str]:
    """The Python files that a config names: FILE.py, or FILE.py:FOLDER of a judge."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _python_files(item)
    elif isinstance(value, str):
        if match := re.fullmatch(r"(.+?\.py)(?::.*)?", value, re.DOTALL):
            yield match[1]
        if Path(value).suffix == ".py" and not (match and match[1] == value):  # as FILE.py/ or A.py:B.py
            yield value


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
    if "lora" in result and result["lora"] is None:  # of a model, until there was a rank of 0
        result["lora"] = {"rank": 0}
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

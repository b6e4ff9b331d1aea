"""Recipes and evaluations by name or path, and what starts and resumes a recipe.

A recipe is a Python file with a function `main(config, run)` and `tiny()`, a configuration that finishes in seconds.
The class of that configuration, a frozen dataclass, holds the recipe's options. Some recipes have `full()`, a
configuration for real data on GPUs, or `PRESETS`, several by name. Other packages add recipes as entry points of the
group `audiorl.recipes`. Of processes that torchrun started the first runs the recipe; the others follow it.
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from audiorl.config import require_sound, torch_device
from audiorl.config.recipe import RecipeConfig
from audiorl.options import options_module, parse, with_values

if TYPE_CHECKING:
    from audiorl.run.folder import Run

ScriptKind = Literal["recipes", "eval"]
_WORDS: dict[ScriptKind, str] = {"recipes": "recipe", "eval": "evaluation"}
PRESETS = {"mmau-grpo": ("audio-qa", "grpo"), "ppo-audio-qa": ("audio-qa", "ppo")}
"""Names of a recipe with one of its presets."""


class UnknownScript(ValueError):
    """No recipe or evaluation has this name. `listing` has a line for each that exists, unless one is called alike."""

    def __init__(self, kind: ScriptKind, name: str):
        near = difflib.get_close_matches(name.replace("_", "-"), [*scripts(kind), *PRESETS], 1)
        every = f"audiorl {'train' if kind == 'recipes' else 'eval'} --help"
        hint = f"did you mean {near[0]}? {every} lists all" if near else "there are:"
        super().__init__(f"no {_WORDS[kind]} {name!r}; {hint}")
        self.listing = "" if near else listing(kind)


def scripts(kind: ScriptKind) -> dict[str, Path]:
    """Return {name as written on the command line, such as "audio-qa": file}: of audiorl.KIND and of entry points.

    A file of recipes without `tiny()` is none, such as the loop that runs by itself.
    """
    spec = find_spec(f"audiorl.{kind}")
    assert spec is not None and spec.submodule_search_locations
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.py"))
    named = {file.stem.replace("_", "-"): file for file in files if not file.stem.startswith("_")}
    own = {n: f for n, f in named.items() if kind == "eval" or "\ndef tiny(" in f.read_text(encoding="utf-8")}
    return own | _added(kind)


@cache
def _added(kind: ScriptKind) -> dict[str, Path]:
    """Return {name: file} of entry points, for which the metadata of all installed packages is read."""
    added = {point.name: find_spec(point.value) for point in entry_points(group=f"audiorl.{kind}")}
    return {name: Path(spec.origin) for name, spec in added.items() if spec is not None and spec.origin}


def find_script(kind: ScriptKind, name: str | Path) -> Path:
    """Return the file of a name ("audio-qa", "audio_qa", "mmau-grpo") or of a path, which has a slash or ends in .py.

    Raises UnknownScript for an unknown name and ValueError for a path without a file.
    """
    if str(name).endswith(".py") or "/" in str(name):
        if not Path(name).is_file():
            stem = Path(name).stem.replace("_", "-")
            known = stem in scripts(kind) or stem in PRESETS
            hint = f"its name, {stem}" if known else "its name or the path of a Python file"
            raise ValueError(f"{name}: no such {_WORDS[kind]}; give {hint}")
        return Path(name)
    spelled = str(name).replace("_", "-")
    if kind == "recipes" and spelled in PRESETS:
        spelled = PRESETS[spelled][0]
    file = scripts(kind).get(spelled)
    if file is None:
        raise UnknownScript(kind, str(name))
    return file


def listing(kind: ScriptKind) -> str:
    """Return a line for each: its name and the first line of its docstring."""
    lines = {name: summary(file) for name, file in scripts(kind).items()}
    if kind == "recipes":
        lines |= {name: f"{recipe} --preset {preset}" for name, (recipe, preset) in PRESETS.items()}
    width = max(map(len, lines))
    return "\n".join(f"  {name:{width}}  {line}" for name, line in sorted(lines.items()))


def summary(file: Path) -> str:
    """Return the first line of the file's docstring. The file is not imported: recipes import torch."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]


def load_recipe(path: str | Path) -> ModuleType:
    """Import a recipe by its name or path."""
    file = find_script("recipes", path)
    spec = spec_from_file_location(f"audiorl_recipe_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    for needed in ("main", "tiny"):
        if not hasattr(module, needed):
            raise ValueError(f"{file}: a recipe defines main(config, run) and tiny(); {needed} is missing")
    return module


def load_options(path: str | Path) -> ModuleType:
    """Load of a recipe what its options need, `tiny()`, `full()` and `PRESETS`, without importing torch."""
    module = options_module(find_script("recipes", path), ("tiny", "full", "PRESETS"))
    return module if hasattr(module, "tiny") else load_recipe(path)  # which says what is missing


def config_class(recipe: ModuleType) -> type[Any]:
    """Return the dataclass of the recipe's options."""
    return type(recipe.tiny())


def starting_words(name: str, *, tiny: bool = False, full: bool = False, preset: str | None = None) -> list[str]:
    """Return the words for `default_config`, with the preset that the recipe's `name` stands for."""
    preset = preset or PRESETS.get(name.replace("_", "-"), (None, None))[1]
    return [*["--tiny"] * tiny, *["--full"] * full, *(["--preset", preset] if preset else [])]


def default_config(recipe: ModuleType, argv: Sequence[str]) -> Any:
    """Return the options that `--tiny`, `--full` and `--preset NAME` among the arguments start from."""
    if "--full" in argv and not hasattr(recipe, "full"):
        raise ValueError(f"{recipe.__file__}: this recipe has no full(); leave --full out")
    if "--preset" not in argv:
        return recipe.tiny() if "--tiny" in argv else recipe.full() if "--full" in argv else config_class(recipe)()
    name = [*argv, ""][argv.index("--preset") + 1]
    presets = getattr(recipe, "PRESETS", {})
    if name not in presets:
        raise ValueError(f"--preset {name}: this recipe has {', '.join(presets) or 'no presets; leave it out'}")
    return recipe.tiny(name) if "--tiny" in argv else presets[name]()


def parse_config(recipe: ModuleType, argv: Sequence[str], quiet: bool = False, also: Sequence[str] = ()) -> Any:
    """Return the recipe's options: those of `argv` on top of a run file's (`--config`) and of `default_config`.

    also: the options of the command. Raises ValueError for an option that does not exist or has a new name, and for one
    that the recipe would ignore.
    """
    default = default_config(recipe, argv)
    words = [word for word in argv if word not in ("--tiny", "--full")]
    if "--preset" in words:
        at = words.index("--preset")
        words[at : at + 2] = []
    config = parse(
        type(default),
        words,
        default=default,
        prog=f"audiorl train {Path(str(recipe.__file__)).stem.replace('_', '-')}",
        description=recipe.__doc__,
        run_file=True,
        elsewhere=("runtime",),
        quiet=quiet,
        also=also,
    )
    if isinstance(default, RecipeConfig):
        given = {arg.split("=")[0].replace("_", "-") for arg in argv}
        for field in fields(default):
            before, after = (getattr(getattr(held, field.name), "steps", None) for held in (default, config))
            option = f"--{field.name.replace('_', '-')}.steps"
            if field.name not in default.counts_steps and (after != before or option in given):
                raise ValueError(
                    f"{option}: the steps of this recipe follow from --epochs, passes over the data, and --max-steps; "
                    "set those"
                )
    return config


def start(path: str | Path, argv: Sequence[str], out: str | Path, trackers: Sequence[str] = ()) -> Run | None:
    """Run a recipe in a new folder, and log to `trackers` (names of `audiorl.run.trackers`).

    Processes of torchrun beyond the first follow it and have no run.
    """
    from audiorl.distributed import processes
    from audiorl.run.folder import Run, newest_checkpoint

    recipe = load_recipe(path)
    config = parse_config(recipe, argv)
    if isinstance(config, RecipeConfig):
        torch_device(config.model.device)
        config = replace(config, path=newest_checkpoint(config.path))
        if flow := getattr(config, "flow", ""):  # that whose sounds reward a thought stays the same, too
            config = replace(config, flow=newest_checkpoint(flow))  # type: ignore[call-arg]
    if _followed():
        return None
    with Run.create(out, str(find_script("recipes", path).resolve()), argv, config) as run:
        try:
            with processes():
                run.track(trackers)
                recipe.main(config, run)
        except Exception:
            run.discard_if_empty()  # a mistake in the data, the options or the reward should not block the same --out
            raise
    return run


def resume(folder: str | Path, trackers: Sequence[str] = (), trusted: Sequence[str | Path] = ()) -> Run | None:
    """Continue a run where its folder says it is, with the options that it recorded.

    Options that the recipe did not have then take its defaults. Python files that the folder names are run only if they
    are installed recipes or in `trusted`; ValueError names the others. Nothing of the run is changed before.
    """
    from audiorl.distributed import processes
    from audiorl.run.folder import Run, check_run_folder

    if _followed():
        return None
    check_run_folder(Path(folder))
    recipe, config = recorded_recipe(Path(folder), trusted)
    with Run.open(folder) as run, processes():
        run.track(trackers)
        recipe.main(config, run)
    return run


def _followed() -> bool:
    """Follow the first process of torchrun to its end where this is another one; tell if it is."""
    from audiorl.distributed.torchrun import follow, process_group, rank

    if rank() == 0:
        return False
    with process_group():
        follow()
    return True


def recorded_recipe(folder: Path, trusted: Sequence[str | Path] = ()) -> tuple[ModuleType, Any]:
    """Return the recipe of a saved run and its options. Raises ValueError for a Python file that is not trusted."""
    from audiorl.run.records import IN_MEMORY, RunConfig, read_record

    saved = read_record(folder / "config.json", RunConfig)
    if saved.argv[:1] == [IN_MEMORY]:
        parts = " and ".join(saved.argv[1:])
        raise ValueError(
            f"{folder}: began in Python with {parts} in memory, which no file holds; go on there: the same call of "
            "audiorl.train_… with resume=True"
        )
    file, installed = Path(saved.recipe), scripts("recipes")
    if not file.is_file():  # an installed recipe may lie elsewhere now
        name = file.stem.replace("_", "-")
        if name not in installed:
            raise ValueError(f"{folder}/config.json: {saved.recipe}: no such recipe; restore the file")
        file = installed[name]
        print(f"audiorl: {saved.recipe} is gone; resuming with the installed recipe {name}", file=sys.stderr)
    own = [] if file.resolve() in {path.resolve() for path in installed.values()} else [str(file)]
    allowed = {Path(path).expanduser().resolve() for path in trusted}
    named = dict.fromkeys([*own, *python_files(saved.config)])
    unknown = [name for name in named if Path(name).expanduser().resolve() not in allowed]
    if unknown:
        raise ValueError(
            f"{folder}/config.json: resuming runs Python files that are not part of audiorl: {', '.join(unknown)}; if "
            f"you trust them, name them: audiorl resume {folder} --trust {shlex.join(unknown)}"
        )
    recipe = load_recipe(file)
    config = with_values(config_class(recipe)(), saved.config, lambda place: f"{folder}/config.json: ")
    try:
        require_sound(config)
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: {error}") from None
    return recipe, config


def python_files(value: Any) -> Iterator[str]:
    """Yield the Python files that options name: FILE.py, or FILE.py:FOLDER of a speech model."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from python_files(item)
    elif isinstance(value, str):
        if match := re.fullmatch(r"(.+?\.py)(?::.*)?", value, re.DOTALL):
            yield match[1]
        if Path(value).suffix == ".py" and not (match and match[1] == value):  # as FILE.py/ or A.py:B.py
            yield value

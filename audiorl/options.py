"""Options: dataclasses filled from the command line (by tyro), from YAML run files, and from values in Python.

Booleans are written as flags or with a value. A run file sets options by name, nested as the dataclasses are, and the
command line overrides it::

    path: Qwen/Qwen2.5-Omni-3B
    data: [avqa/train_qa.json:5000]
    rl:
      group_size: 8
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import tyro
import yaml
from tyro.conf import Positional, Suppress, subcommand

from audiorl.config.checks import require_sound, to_json

T = TypeVar("T")
_POSITIONAL = get_args(Positional[str])[1]
LIST = "--list-options"
"""In place of `--help`: print the words of `words_of` and their values, a line each, for the completion of shells."""
HELP = ("-h", "--help", "--help-all", LIST)
Place = tuple[str, ...]
"""The keys that lead to a value of nested options, such as ("rl", "group_size")."""

OTHER_TOOLS = {
    "model": ("path",), "model-name-or-path": ("path",), "dataset": ("data",), "dataset-name": ("data",),
    "output-dir": ("out",), "report-to": ("log",), "num-train-epochs": ("epochs",),
    "learning-rate": ("optim.lr", "rl-optim.lr", "sft-optim.lr"),
    "num-generations": ("rl.group-size", "answers"), "beta": ("rl.kl-beta", "dpo.beta"),
    "per-device-train-batch-size": ("rl.prompts-per-step", "sft.batch-size", "dpo.batch-size"),
    "max-completion-length": ("sampling.max-new-tokens", "eval-tokens"), "max-length": ("sampling.max-new-tokens",),
    "num-iterations": ("rl.epochs",), "epsilon": ("rl.clip-low",), "epsilon-high": ("rl.clip-high",),
    "use-vllm": ("runtime.engine",), "lora-rank": ("model.lora.rank",), "lora-alpha": ("model.lora.alpha",),
    "train-type": ("lora",), "use-peft": ("lora",), "bf16": ("model.dtype",), "torch-dtype": ("model.dtype",),
    "eval-steps": ("rl.eval-every",), "save-steps": ("rl.save-every", "sft.save-every", "dpo.save-every"),
    "reward-funcs": ("reward-file",), "val-dataset": ("held-out",), "eval-dataset": ("held-out",),
    "resume-from-checkpoint": ("path",),
}  # fmt: skip
"""Names that TRL and ms-swift have for options, and those here, of which a recipe has some."""

_PARTS: dict[tuple[Path, str], tuple[ModuleType, set[int]]] = {}
"""By file and its text: what `options_module` ran of it, and which statements these are."""


def options_module(file: Path, names: Collection[str]) -> ModuleType:
    """Run the part of a Python file that defines `names` and what they need, with its docstring, and return it.

    Options are read by it without what a recipe trains with: torch and transformers take ten seconds to import, and a
    wrong option should not. Files that it imports from are run in parts, too, except those of `audiorl.config`.
    """
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text, str(file))
    if (file, text) not in _PARTS:
        module = ModuleType(f"options of {file}", ast.get_docstring(tree, clean=False))
        module.__file__ = str(file)
        _PARTS[file, text] = module, set()
    module, done = _PARTS[file, text]  # a class that is asked for twice, by two modules, is defined once
    sys.modules[module.__name__] = module  # dataclasses look it up
    defining = {name: statement for statement in tree.body for name in _defined(statement)}
    kept: dict[ast.stmt, set[str]] = {}  # statements, and the names that are wanted of each
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name in defining and name not in kept.get(defining[name], ()):
            kept.setdefault(defining[name], set()).add(name)
            waiting += _used(defining[name])
    for number, statement in enumerate(tree.body):
        if number in done and not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if isinstance(statement, ast.ImportFrom) and statement in kept and not statement.level:
            origin = _file_in_parts(str(statement.module))
            if origin is not None:
                asked = {a.asname or a.name: a.name for a in statement.names if (a.asname or a.name) in kept[statement]}
                part = vars(options_module(origin, asked.values()))
                if part.keys() >= set(asked.values()):  # not those of a module's __getattr__, nor modules
                    vars(module).update({name: part[original] for name, original in asked.items()})
                    continue
        if statement in kept:
            code = compile(ast.Module([statement], []), str(file), "exec", flags=annotations.compiler_flag)
            exec(code, vars(module))
            done.add(number)
    return module


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a file defines."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    found = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found


def _used(statement: ast.stmt) -> list[str]:
    """Return the names that a statement reads; of a class's methods only what `__post_init__` and those it calls do."""
    nodes: list[ast.AST] = [statement]
    if isinstance(statement, ast.ClassDef):
        methods = {node.name: node for node in statement.body if isinstance(node, ast.FunctionDef)}
        nodes = [node for node in ast.iter_child_nodes(statement) if node not in methods.values()]
        waiting = ["__post_init__"]
        while waiting:
            if method := methods.pop(waiting.pop(), None):
                nodes.append(method)
                waiting += [node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)]
    names = (node for part in nodes for node in ast.walk(part) if isinstance(node, ast.Name))
    return [node.id for node in names if isinstance(node.ctx, ast.Load)]


def _file_in_parts(module: str) -> Path | None:
    """Return the file of a module of ours, if it may import more than options need; None for others."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top in ("audiorl", "corpora", "tokenizers_audio") else None
    if spec is None or not spec.submodule_search_locations or rest[:1] in ([], ["config"], ["options"]):
        return None
    place = Path(spec.submodule_search_locations[0], *rest)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def parse(
    options: type[T],
    args: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
    run_file: bool = False,
    elsewhere: Sequence[str] = (),
    quiet: bool = False,
    also: Sequence[str] = (),
) -> T:
    """Return an instance of the dataclass `options` with the values in `args`, on top of `default`.

    run_file: `--config FILE` reads a run file between the two, and `--print-config` prints all options as one and ends.
    elsewhere: groups of the file that are not read here. quiet: do not print what overrides the file. also: options
    that are read elsewhere, see `check_names`. Help and errors of tyro end in SystemExit. Raises ValueError for an
    option that does not exist, and naming file and line for a run file that does not fit.
    """
    if LIST in args:
        print("\n".join(" ".join([word, *values]) for word, values in words_of(options).items()))
        raise SystemExit(0)
    args = ["--help" if word == "--help-all" else word for word in args]
    file, show = None, False
    if run_file:
        file, show, args = _run_file_options(args)
        about = "--config FILE reads options from a YAML file; --print-config prints all options as one."
        description = f"{description or options.__doc__ or ''}\n\n{about}"
    if not {"-h", "--help"} & set(args):
        check_names(options, args, [*also, *(["--config", "--print-config"] if run_file else [])])
    given = default
    if file is not None:
        fields: Any = dataclasses.fields(options)  # type: ignore[arg-type]
        required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        given = file.apply(default or options(**dict.fromkeys(required, tyro.MISSING)), elsewhere)
    chosen: Any = {} if given is None else {"default": given}
    parsed: T = tyro.cli(options, args=_flags(options, args), prog=prog, description=description, **chosen)
    require_sound(parsed)
    if file is not None and not quiet:
        for line in file.overridden(given, parsed):
            print(line, flush=True)
    if show:
        print(to_yaml(parsed), end="")
        raise SystemExit(0)
    return parsed


def parse_known(options: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> tuple[T, list[str]]:
    """`parse` for the first of two dataclasses that share a command line: also return what it has no option for."""
    chosen: Any = {} if default is None else {"default": default}
    parsed, left = tyro.cli(options, args=_flags(options, args), prog=prog, return_unknown_args=True, **chosen)
    require_sound(parsed)
    return parsed, left


def shortened(default: Any, shown: Callable[[str], bool], prefix: str = "") -> Any:
    """Return options for help: equal to `default`, of a type in which those whose paths are not `shown` are hidden."""
    kind = type(default)
    hints = get_type_hints(kind, include_extras=True)
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(kind)}
    changed: list[tuple[str, Any, Any]] = []
    for name, value in values.items():
        path = f"{prefix}{name}".replace("_", "-")
        group = dataclasses.is_dataclass(value)
        if group and any(shown(f"{path}.{below}") for below, _ in names(type(value))):
            values[name] = shortened(value, shown, f"{path}.")
            changed.append((name, type(values[name]), values[name]))
        elif group or not shown(path):
            changed.append((name, Annotated[type(value) if group else hints[name], Suppress], value))
    fields = [(name, hint, dataclasses.field(default_factory=repeat(value).__next__)) for name, hint, value in changed]
    new = dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), frozen=True, namespace={"__doc__": kind.__doc__}
    )
    options: Any = object.__new__(new)
    for name, value in values.items():  # not by the constructor, whose checks know other types
        object.__setattr__(options, name, value)
    return options


def subcommands(commands: Mapping[str, type]) -> Any:
    """Return the union of dataclasses by their names on the command line, for `parse`."""
    named = (Annotated[kind, subcommand(name, prefix_name=False)] for name, kind in commands.items())
    return reduce(or_, named)


def first_word(args: Sequence[str], missing: str) -> None:
    """Raise ValueError with the text `missing` where the first argument is an option, and not the one for help."""
    if not args or (args[0].startswith("-") and args[0] not in HELP):
        raise ValueError(missing)


def check_names(options: Any, args: Sequence[str], also: Sequence[str] = ()) -> None:
    """Raise ValueError for an option that does not exist, naming near ones.

    also: options that are read elsewhere, which a wrong one may have meant.
    """
    existing = words_of(options)
    hints = [(path, (hint, *get_args(hint))) for path, hint in names(options)]
    open_ended = tuple(f"--{path}." for path, kinds in hints if any(get_origin(kind) is dict for kind in kinds))
    for given in (arg.partition("=")[0].replace("_", "-") for arg in args if re.match(r"--[a-zA-Z]", arg)):
        if given in existing or given.startswith(("--tyro", *open_ended)):  # a key of a dictionary is an option
            continue
        known, name = [*existing, *also], given.removeprefix("--")
        leaves = {word.rpartition(".")[2].removeprefix("--"): word for word in reversed(known)}
        meant = [f"--{other}" for other in OTHER_TOOLS.get(name, ()) if f"--{other}" in known]
        meant = meant or [word for word in known if word.endswith(f".{name}")][:3]
        meant = meant or difflib.get_close_matches(given, known, 3, 0.7)
        meant = meant or [leaves[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], leaves, 3, 0.7)]
        hint = f"; did you mean {' or '.join(meant)}?" if meant else "; --help lists the options"
        raise ValueError(f"no option is called {given}{hint}")


def words_of(options: Any) -> dict[str, list[str]]:
    """Return the words of the command line for shells: subcommands, and options, with their values where these are few.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     loss: Literal["ppo", "gspo"] = "ppo"
    ...     tiny: bool = False
    >>> words_of(Options)
    {'--loss': ['ppo', 'gspo'], '--tiny': [], '--no-tiny': [], '--help': []}
    """
    members = get_args(options) if get_origin(options) in (Union, types.UnionType) else ()
    marks = [mark for member in members if get_origin(member) is Annotated for mark in get_args(member)[1:]]
    words: dict[str, list[str]] = {str(mark.name): [] for mark in marks if getattr(mark, "name", None)}
    for path, hint in names(options):
        if path and not dataclasses.is_dataclass(hint):
            literals = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
            words[f"--{path}"] = [str(value) for kind in literals for value in get_args(kind)]
            if hint is bool:
                words[_negated(path)] = []
    return words | {"--help": []}


def _negated(path: str) -> str:
    group, dot, name = path.rpartition(".")
    return f"--{group}{dot}no-{name}"


def names(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path of the option, type) for all fields of a dataclass or a union of them: ("model.dtype", …).

    Positional arguments are none.
    """
    members = get_args(options) if get_origin(options) in (Union, types.UnionType) else (options,)
    for member in members:
        kind = get_args(member)[0] if get_origin(member) is Annotated else member
        if not dataclasses.is_dataclass(kind):
            continue
        for name, hint in get_type_hints(kind, include_extras=True).items():
            path = f"{prefix}{name}".replace("_", "-")
            if get_origin(hint) is Annotated:
                hint, *marks = get_args(hint)
                if _POSITIONAL in marks:
                    continue
                if any(getattr(mark, "name", None) == "" for mark in marks):
                    path = ""
            yield path, hint
            yield from names(hint, f"{path}." if path else prefix)


def _flags(options: Any, args: Sequence[str]) -> list[str]:
    """Write `--x True` as `--x` and `--x False` as `--no-x`, which is how tyro reads booleans."""
    booleans = {f"--{path}" for path, hint in names(options) if hint is bool}
    flags: list[str] = []
    for arg in args:
        option, equals, value = arg.partition("=")
        for word in [option, value] if equals and option.replace("_", "-") in booleans else [arg]:
            if word.lower() not in ("true", "false") or not flags or flags[-1].replace("_", "-") not in booleans:
                flags.append(word)
            elif word.lower() == "false":
                flags[-1] = _negated(flags[-1].removeprefix("--"))
    return flags


# -- values by name ----------------------------------------------------------------------------------------------------


def with_values(default: T, values: Mapping[str, Any], where: Callable[[Place], str], place: Place = ()) -> T:
    """Return the dataclass `default` with nested plain `values`, whose types are checked.

    Raises ValueError that begins with `where(place)` for a name that does not exist and a value that does not fit.
    """
    kinds = get_type_hints(type(default), include_extras=True)
    changes: dict[str, Any] = {}
    for key, value in ((str(key), value) for key, value in values.items()):
        here, name = (*place, key), key.replace("-", "_")
        if name not in kinds:
            prefix = "".join(f"{part}." for part in place)
            paths = [path.replace("-", "_") for path, _ in names(type(default))]
            leaves = [path for path in paths if path.rpartition(".")[2] == key]
            near = leaves or difflib.get_close_matches(key, paths, 3) or difflib.get_close_matches(key, paths, 1, 0)
            listed = ", ".join(prefix + path for path in near[:3])
            raise ValueError(f"{where(here)}no option is called {prefix}{key}; near ones: {listed}")
        current = getattr(default, name)
        if dataclasses.is_dataclass(current) and not isinstance(value, Mapping):
            raise ValueError(f"{where(here)}{'.'.join(here)} is a group of options, not {value!r}")
        if dataclasses.is_dataclass(current):
            changes[name] = with_values(current, value, where, here)
            continue
        try:
            changes[name] = msgspec.convert(value, kinds[name], dec_hook=lambda kind, value: kind(value))
        except (msgspec.ValidationError, OverflowError) as error:
            reason = str(error).replace("`", "").lower()
            raise ValueError(f"{where(here)}{'.'.join(here)}: {reason}, given {value!r}") from None
    try:
        return dataclasses.replace(default, **changes)  # type: ignore[type-var]
    except ValueError as error:
        raise ValueError(f"{where(place)}{error}") from None


# -- run files ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: `1e-6` is a number, which YAML 1.1 reads as text; `no` and `on` are text."""


_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_REPLACED = ("bool", "float", "timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true$|True$|false$|False$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


TWO_FILES = "--config: give one file"


class RunFile:
    """The options in a YAML file, with the line of each.

    Raises ValueError naming file and line for a file that is no mapping of options, or has one twice.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lines: dict[Place, int] = {}
        if not self.path.is_file():
            raise ValueError(f"--config {path}: no such file")
        try:
            loader = _Loader(self.path.read_text(encoding="utf-8"))
            node = loader.get_single_node()
            self._mark(node, ())
            self.values: dict[str, Any] = {} if node is None else loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ValueError(f"{path}:{line}: {error.problem}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:  # a character that no YAML file may have
            raise ValueError(f"{path}: not a YAML file in UTF-8: {' '.join(str(error).split())}") from None

    def _mark(self, node: yaml.Node | None, place: Place) -> None:
        if not isinstance(node, yaml.MappingNode):
            if place or node is None:
                return
            raise ValueError(f"{self.path}:1: give options, such as `seed: 1`, one a line")
        for key, value in node.value:
            here = (*place, str(key.value).replace("-", "_"))
            if here in self.lines:
                raise ValueError(f"{self.path}:{key.start_mark.line + 1}: {'.'.join(here)} is given twice")
            self.lines[here] = key.start_mark.line + 1
            self._mark(value, here)

    def where(self, place: Place) -> str:
        """Return "FILE:LINE: " of an option or a group."""
        return f"{self.path}:{self.lines.get(tuple(key.replace('-', '_') for key in place), 1)}: "

    def apply(self, default: T, leave_out: Sequence[str] = ()) -> T:
        """Return `default` with the file's values, but for the groups in `leave_out`."""
        values = {key: value for key, value in self.values.items() if key not in leave_out}
        return with_values(default, values, self.where)

    def group(self, name: str, default: T) -> T:
        """Return the options of the group `name`, on top of `default`."""
        return with_values(default, self.values.get(name) or {}, self.where, (name,))

    def overridden(self, given: Any, final: Any) -> Iterator[str]:
        """Yield a line for each option of the file that has another value in `final`."""
        for place in self.lines:
            before, after = given, final
            for key in place:
                name = key.replace("-", "_")
                # Parts of a dictionary, or of a group that belongs to another dataclass, are no options of their own.
                before, after = getattr(before, name, None), getattr(after, name, None)
            if not dataclasses.is_dataclass(before) and before != after:
                yield f"{self.where(place)}{'.'.join(place)} is {before!r} here, {after!r} on the command line"


def _run_file_options(args: Sequence[str]) -> tuple[RunFile | None, bool, list[str]]:
    """Return (the file of --config, whether to print, the other arguments)."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    file, rest = None, [word for word in words if word not in ("--print-config", "--print_config")]
    show = len(rest) < len(words)
    if rest.count("--config") > 1:
        raise ValueError(TWO_FILES)
    if "--config" in rest:
        at = rest.index("--config")
        if at + 1 == len(rest):
            raise ValueError("--config: name a YAML file")
        file, rest = RunFile(rest[at + 1]), [*rest[:at], *rest[at + 2 :]]
    return file, show, rest


def to_yaml(options: Any) -> str:
    """Return options as the text of a run file."""
    return yaml.safe_dump(to_json(options), sort_keys=False, allow_unicode=True, width=120)

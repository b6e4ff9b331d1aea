"""The structure of the code: layers and imports, the core path that a recipe runs, and the calls from recipe to loss.

    python tools/structure.py           packages by layer, import circles, upward imports; exit code 1 if there are any
    python tools/structure.py --run     also run `audiorl/recipes/audio_qa.py --tiny` here and measure: which
    definitions of
                                        audiorl it executes and their lines, the modules that importing the recipe
                                        loads, and the functions between the recipe's main and policy_loss (1 minute)
    --recipe FILE                       measure another recipe that trains with policy gradients
    --list                              name every file and definition of the core path

Imports inside functions and under TYPE_CHECKING count like all others.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A package imports those of its own layer or of lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "audiorl",
        "audiorl.errors",
        "audiorl.audio",
        "audiorl.types",
        "audiorl.protocols",
        "audiorl.user_files",
        "tokenizers_audio",
    ),
    ("audiorl.algos", "audiorl.config", "audiorl.options", "audiorl.eval.metrics", "audiorl.distributed"),
    ("audiorl.data", "audiorl.models", "audiorl.models.families"),
    ("audiorl.rollout", "audiorl.speech_models", "audiorl.run", "audiorl.plan"),
    ("audiorl.rewards", "audiorl.tasks", "audiorl.tasks.simul", "audiorl.tasks.tts", "audiorl.report"),
    ("audiorl.eval", "audiorl.report.study", "audiorl.report.view", "audiorl.train", "audiorl.train.optim"),
    ("audiorl.train.rl",),
    ("audiorl.recipes", "audiorl.gpu_check"),
    ("audiorl.cli",),
    ("corpora", "corpora.annotate", "corpora.questions", "corpora.sources"),
)
_SOURCES = ("audiorl/**/*.py", "tokenizers_audio/**/*.py", "corpora/**/*.py")
# What a run needs besides the path from recipe to loss: command line, processes, the run's folder and its report.
_SURROUNDINGS = ("audiorl.cli", "audiorl.options", "audiorl.report", "audiorl.run", "audiorl.distributed")
_LOSS, _LOSS_FILE = "policy_loss", "audiorl/train/rl/losses.py"


# ---------------------------------------------------------------------------------------------- imports and layers


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, and the packages of the importing and of the imported module."""

    file: str
    line: int
    package: str
    imported: str


def imports(root: Path) -> list[Import]:
    """Every import of one package of the repository by another, and `import_module` of a literal name."""
    files = {module_name(file.relative_to(root)): file for pattern in _SOURCES for file in sorted(root.glob(pattern))}
    result = []
    for module, file in files.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for target in imported_modules(node, module):
                package = package_of(target, files)
                if package and package != package_of(module, files):
                    where = str(file.relative_to(root))
                    result.append(Import(where, node.lineno, package_of(module, files) or module, package))
    return result


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(node: Any, module: str) -> list[str]:
    """The dotted names that a statement or call imports; a relative import is resolved against `module`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ".".join(module.split(".")[: -node.level]) if node.level else ""
        return [".".join(filter(None, (base, node.module, alias.name))) for alias in node.names]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def package_of(name: str, modules: Mapping[str, Path]) -> str | None:
    """``audiorl.train.rl`` for audiorl.train.rl.train, ``audiorl`` for a name of audiorl/__init__.py; None for
    other projects."""
    parts = name.split(".")
    if parts[0] != "audiorl":
        return parts[0] if parts[0] in ("tokenizers_audio", "recipes", "eval") else None
    if len(parts) > 2 and parts[1] in ("recipes", "eval"):  # as they are installed
        return parts[1]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in modules else "audiorl"


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one package, each as a sorted list."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for following in arrows.get(stack.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        return seen

    reach = {package: reachable(package) for package in arrows}
    components = {
        tuple(sorted(other for other in reach[package] if package in reach.get(other, ()))) for package in arrows
    }
    return [list(component) for component in sorted(components) if component]


def report_imports(root: Path, layers: Sequence[Sequence[str]] = LAYERS) -> int:
    """Print layers, circles and upward imports; the number of circles, upward imports and packages without a layer."""
    statements = imports(root)
    arrows: dict[str, set[str]] = {}
    for one in statements:
        arrows.setdefault(one.package, set()).add(one.imported)
    height = {package: number for number, layer in enumerate(layers) for package in layer}
    unplaced = sorted({p for one in statements for p in (one.package, one.imported)} - height.keys())
    upward = [one for one in statements if height.get(one.package, len(layers)) < height.get(one.imported, 0)]
    print("layers, from the top:")
    for layer in reversed(layers):
        print("  " + "  ".join(layer))
    print(f"packages: {len(height)}, arrows between them: {sum(map(len, arrows.values()))}")
    loops = circles(arrows)
    print(f"import circles: {len(loops)}")
    for loop in loops:
        print(f"  {' <-> '.join(loop)}")
    print(f"upward imports: {len(upward)}")
    for one in upward:
        print(f"  {one.file}:{one.line}: {one.package} imports {one.imported}, which lies above it")
    for package in unplaced:
        print(f"  {package} is in no layer; add it to LAYERS in tools/structure.py")
    return len(loops) + len(upward) + len(unplaced)


# ----------------------------------------------------------------------------------------------------- the core path


@dataclass
class Trace:
    """What a run executed, recorded by `record` for every thread.

    codes: code objects of functions and methods. classes: (module, qualified name) of what was instantiated by a
    generated `__init__`, as dataclasses have it. stack: functions from the recipe's main to the first policy_loss.
    """

    root: Path
    recipe: Path
    codes: set[CodeType] = field(default_factory=set)
    classes: set[tuple[str, str]] = field(default_factory=set)
    stack: list[str] = field(default_factory=list)

    def record(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self.codes or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # code without that flag is the body of a module or class, which an import runs
        if code.co_filename == "<string>" and code.co_name == "__init__":
            cls = type(frame.f_locals.get("self"))
            self.classes.add((cls.__module__, cls.__qualname__))
        elif code.co_filename.startswith(str(self.root / "audiorl")):
            self.codes.add(code)
            if code.co_name == _LOSS and code.co_filename.endswith(_LOSS_FILE):
                self.stack = calls_from(frame, self.recipe, self.root)


def calls_from(frame: FrameType | None, recipe: Path, root: Path) -> list[str]:
    """The functions of the repository on the call stack, from the recipe's main to `frame`."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith((str(root / "audiorl"), str(recipe))):
            if not code.co_name.endswith(("comp>", "genexpr>")):
                names.append(f"{Path(code.co_filename).relative_to(root)}:{code.co_qualname}")
            if code.co_filename == str(recipe) and code.co_name == "main":
                return names[::-1]
        frame = frame.f_back
    return []


def trace_recipe(root: Path, recipe: Path, out: str) -> Trace:
    """Run the recipe's tiny configuration in this process and record what it executes."""
    trace = Trace(root, recipe)
    sys.path.insert(0, str(root))
    threading.setprofile(trace.record)
    sys.setprofile(trace.record)
    try:
        from audiorl.cli import main

        with redirect_stdout(io.StringIO()):
            code = main(["train", str(recipe), "--tiny", "--out", out])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if code:
        raise SystemExit(f"{recipe}: the recipe ended with exit code {code}")
    return trace


@dataclass(frozen=True)
class Definition:
    """A function, a method, or a class without its methods, and the numbers of its lines."""

    name: str
    file: Path
    lines: frozenset[int]


def executed(trace: Trace) -> list[Definition]:
    """The definitions that ran. A class counts when it was instantiated or one of its methods ran."""
    by_file: dict[Path, set[str]] = {}
    for code in trace.codes:
        by_file.setdefault(Path(code.co_filename), set()).add(code.co_qualname.replace("<locals>.", ""))
    for module, name in trace.classes:
        loaded = sys.modules.get(module)
        source = inspect.getsourcefile(loaded) if loaded else None
        if source and source.startswith(str(trace.root / "audiorl")):
            by_file.setdefault(Path(source), set()).add(name.replace("<locals>.", ""))
    result: list[Definition] = []
    for file, names in sorted(by_file.items()):
        nodes = dict(definitions(ast.parse(file.read_text(encoding="utf-8"))))
        functions = {name for name in names if isinstance(nodes.get(name), ast.FunctionDef | ast.AsyncFunctionDef)}
        classes = {
            name
            for name, node in nodes.items()
            if isinstance(node, ast.ClassDef) and (name in names or any(f.startswith(f"{name}.") for f in functions))
        }
        for name in sorted(functions | classes, key=lambda n: nodes[n].lineno):
            lines = line_numbers(nodes[name])
            if name in classes:
                lines -= {
                    n for child in ast.iter_child_nodes(nodes[name]) if _is_function(child) for n in line_numbers(child)
                }
            result.append(Definition(name, file.relative_to(trace.root), frozenset(lines)))
    return result


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(qualified name, node) of every function and class."""
    for node in ast.iter_child_nodes(tree):
        if _is_function(node) or isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node  # type: ignore[attr-defined]
            yield from definitions(node, f"{prefix}{node.name}.")  # type: ignore[attr-defined]
        else:
            yield from definitions(node, prefix)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def line_numbers(node: Any) -> set[int]:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return set(range(first, node.end_lineno + 1))


def code_lines(source: str) -> set[int]:
    """The numbers of lines that are neither blank nor only a comment; a docstring's lines count."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            numbers |= set(range(token.start[0], token.end[0] + 1))
    return {n for n in numbers if source.splitlines()[n - 1].strip()}


def docstring_lines(source: str) -> set[int]:
    """The numbers of the lines of docstrings, of fields too."""
    strings = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return {n for s in strings if isinstance(s.value.value, str) for n in range(s.lineno, (s.end_lineno or 0) + 1)}  # type: ignore[attr-defined]


def report_core_path(trace: Trace, names: bool) -> None:
    """Print how many definitions ran and how many lines of code they have, by package and, if `names`, by file."""
    ran = executed(trace)
    by_file: dict[Path, set[int]] = {}
    for definition in ran:
        by_file.setdefault(definition.file, set()).update(definition.lines)
    rows = []  # ((lines of code, lines with docstrings, lines with comments and blank ones too), file)
    for file, lines in by_file.items():
        source = (trace.root / file).read_text(encoding="utf-8")
        code = lines & code_lines(source)
        rows.append(((len(code - docstring_lines(source)), len(code), len(lines)), file))
    print(f"what {trace.recipe.name} --tiny runs: {len(ran)} definitions in {len(by_file)} modules of audiorl")
    print("lines of code, with docstrings, with comments and blank lines:")
    packages = {file: ".".join(file.with_suffix("").parts[:2]) for _, file in rows}
    for title, core in (("core path", True), ("around it", False)):
        of_title = [(c, packages[file]) for c, file in rows if (packages[file] not in _SURROUNDINGS) == core]
        _print_counts(title, [c for c, _ in of_title])
        for package in sorted({name for _, name in of_title}):
            _print_counts(f"  {package}", [c for c, name in of_title if name == package])
    if names:
        for counts, file in sorted(rows, reverse=True):
            _print_counts(str(file), [counts])
        for definition in ran:
            print(f"    {definition.file}:{min(definition.lines)} {definition.name} ({len(definition.lines)} lines)")


def _print_counts(title: str, counts: Sequence[tuple[int, int, int]]) -> None:
    print("  " + "".join(f"{sum(column):6d}" for column in zip(*counts, strict=True)) + f"  {title}")


def report_modules(root: Path, recipe: Path) -> None:
    """Print how many modules importing the recipe loads, counted in a process of its own."""
    code = (
        "import json, sys; from importlib.util import module_from_spec, spec_from_file_location as spec\n"
        f"found = spec('recipe', {str(recipe)!r}); module = module_from_spec(found)\n"
        "sys.modules['recipe'] = module; found.loader.exec_module(module)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(root)}
    output = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    loaded = json.loads(output.splitlines()[-1])
    own = [name for name in loaded if name.split(".")[0] in ("audiorl", "tokenizers_audio")]
    heavy = [
        name
        for name in ("torch", "transformers", "matplotlib", "soundfile", "tyro", "ray", "vllm", "deepspeed")
        if name in loaded
    ]
    print(f"importing {recipe.name} loads {len(own)} modules of audiorl and tokenizers_audio, {len(loaded)} in all")
    print(f"  large libraries among them: {', '.join(heavy) or 'none'}")
    for package, count in Counter(".".join(name.split(".")[:2]) for name in own if "." in name).items():
        print(f"  {count:5d} {package}")


def report_hops(trace: Trace) -> None:
    """Print the functions between the recipe's main and the first call of policy_loss."""
    if not trace.stack:
        print(f"hops: {_LOSS} was not called below main of {trace.recipe.name} in this process")
        return
    chain = list(dict.fromkeys(trace.stack))
    print(f"hops from {trace.recipe.name} to {_LOSS}: {len(chain) - 1}, with {len(chain) - 2} functions between them")
    for name in chain:
        print(f"  {name}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the recipe and measure the core path")
    parser.add_argument("--recipe", type=Path, default=ROOT / "audiorl/recipes/audio_qa.py", help="recipe to run")
    parser.add_argument("--list", action="store_true", help="name every file and definition of the core path")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to read")
    options = parser.parse_args(argv)
    problems = report_imports(options.root.resolve())
    if options.run:
        recipe = options.recipe.resolve()
        with tempfile.TemporaryDirectory() as folder:
            trace = trace_recipe(options.root.resolve(), recipe, str(Path(folder) / "run"))
        report_core_path(trace, options.list)
        report_modules(options.root.resolve(), recipe)
        report_hops(trace)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

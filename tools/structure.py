"""Measure the structure of the code: rooms, import circles, names, and the path of one training step.

    python tools/structure.py           rooms by layer, upward imports, circles of files, class names that stand for two
                                        things, methods called by a string; exit code 1 if there are any; sizes
    python tools/structure.py --run     also run a tiny recipe here and count the files and lines of one step (1 minute)
    --recipe NAME                       the recipe to run, by default mmau-grpo
    --list                              name every file of the step

Imports inside functions and under TYPE_CHECKING count like all others.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A room imports rooms of its own layer or of lower ones. Modules without a room, such as
# audiorl/types.py, belong to "audiorl".
LAYERS: tuple[tuple[str, ...], ...] = (
    ("audiorl", "tokenizers_audio"),
    ("audiorl.algos", "audiorl.config", "audiorl.options", "audiorl.eval.metrics", "audiorl.distributed"),
    ("audiorl.data", "audiorl.models"),
    ("audiorl.rollout", "audiorl.speech_models", "audiorl.run", "audiorl.plan"),
    ("audiorl.rewards", "audiorl.tasks"),
    ("audiorl.report",),
    ("audiorl.eval", "audiorl.train"),
    ("audiorl.recipes", "audiorl.gpu_check"),
    ("audiorl.api", "audiorl.cli"),
    ("corpora",),
)
# What a step needs besides its own path: options, the user's rows and rewards, processes, the run's folder and pages.
SURROUNDINGS = tuple(f"audiorl.{room}" for room in ("cli", "config", "data", "distributed", "report", "rewards", "run"))
STEP, LOSS = "train_rl", "policy_loss"

Modules = Mapping[str, Path]


def python_files(root: Path) -> dict[str, Path]:
    """Return {module: file} of the packages that are installed."""
    files = [file for top in ("audiorl", "corpora", "tokenizers_audio") for file in sorted((root / top).rglob("*.py"))]
    return {".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def statements(file: Path) -> Iterator[ast.Import | ast.ImportFrom | ast.Call | ast.ClassDef]:
    """Yield the imports, calls and classes of a file, but not of what it does as a script."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "__name__" in ast.unparse(n.test))]
    top = {node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call) or node in top:
            yield node  # type: ignore[misc]


def imported_names(module: str, file: Path, node: ast.AST) -> list[str]:
    """Return the full names that a statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parent = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        start = parent[: len(parent) - node.level + 1] if node.level else []
        base = ".".join([*start, *filter(None, [node.module])])
        return [f"{base}.{alias.name}" for alias in node.names]
    importing = ("import_module", "__import__")
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in importing:
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def names_a_method(call: ast.Call) -> bool:
    """Return whether a string names what is called: `group.each("step", …)`, `getattr(x, "f")()`."""
    literal = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    remote = getattr(call.func, "attr", "") in ("each", "first", "all", "call") and literal
    return remote or (isinstance(call.func, ast.Call) and getattr(call.func.func, "id", "") == "getattr")


def room_of(module: str) -> str:
    """Return the longest room of LAYERS that the module lies in; a new package of audiorl is its own room."""
    if module.endswith(".__main__"):
        return "audiorl.cli"
    rooms = [room for layer in LAYERS for room in layer if f"{module}.".startswith(f"{room}.")]
    room = max(rooms, key=len, default=module)
    if room == "audiorl" and (ROOT / Path(*module.split(".")[:2])).is_dir() and "." in module:
        return ".".join(module.split(".")[:2])
    return room


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, each sorted."""
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        stack = [start]
        while stack:
            new = arrows.get(stack.pop(), set()) - seen
            seen |= new
            stack += new
        reach[start] = seen
    loops = {tuple(sorted(m for m in reach[start] if start in reach.get(m, ()))) for start in arrows}
    return [list(loop) for loop in sorted(loops) if len(loop) > 1]


def check(root: Path) -> int:
    """Print what is wrong with rooms and names; return how many findings there are."""
    modules = python_files(root)
    rooms = {module: room_of(module) for module in modules}
    layer_of = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    arrows: dict[str, set[str]] = defaultdict(set)
    between: set[tuple[str, str]] = set()
    classes: dict[str, list[str]] = defaultdict(list)
    upward: dict[str, None] = {}
    strings = []
    for module, file in modules.items():
        for node in statements(file):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module)
                continue
            if isinstance(node, ast.Call) and names_a_method(node):
                strings.append(f"{file.relative_to(root)}:{node.lineno}")
            for name in imported_names(module, file, node):
                # A name may be a module, or something that a module defines.
                imported = next((n for n in (name, name.rpartition(".")[0]) if n in modules), module)
                # `from package import module` in the package's own __init__ is how it names its parts: no circle.
                if not f"{imported}.".startswith(f"{module}.") and not module.startswith(f"{imported}."):
                    arrows[module].add(imported)
                room, other = rooms[module], rooms[imported]
                between |= {(room, other)} if room != other else set()
                if module != "audiorl" and layer_of.get(room, len(LAYERS)) < layer_of.get(other, 0):
                    upward[f"upward: {module}:{node.lineno} imports {imported}, which lies above it"] = None
    findings = [*upward, *(f"no layer: add {room} to LAYERS" for room in set(rooms.values()) - layer_of.keys())]
    findings += [f"circle: {' <-> '.join(loop)}" for loop in circles(arrows)]
    repeated = {name: found for name, found in sorted(classes.items()) if len(found) > 1}
    findings += [f"one name, several classes: {name} in {', '.join(found)}" for name, found in repeated.items()]
    findings += [f"method named by a string: {place}" for place in strings]
    for layer in reversed(LAYERS):
        print("  ".join(layer))
    print(f"{len(layer_of)} rooms, {len(between)} arrows between them", *findings, sep="\n")
    for top in dict.fromkeys(module.split(".")[0] for module in modules):
        texts = [f.read_text(encoding="utf-8") for m, f in modules.items() if m.split(".")[0] == top]
        print(f"{top}: {sum(len(text.splitlines()) for text in texts)} lines in {len(texts)} files")
    return len(findings)


# ------------------------------------------------------------------------------------------------------- one step


class Trace:
    """The files whose functions ran while `train_rl` ran, in any thread, and the functions from the recipe to the loss.

    Use as a profile function (`sys.setprofile`).
    """

    def __init__(self, root: Path):
        self.root = str(root / "audiorl")
        self.files: dict[str, set[int]] = defaultdict(set)
        self.stack: list[str] = []
        self.training = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_name == STEP and event in ("call", "return") and code.co_filename.startswith(self.root):
            self.training = event == "call"
        # Code without the flag is the body of a module or class, which an import runs.
        if event != "call" or not self.training or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if code.co_filename.startswith(self.root):
            self.files[code.co_filename].add(code.co_firstlineno)
            if code.co_name == LOSS and not self.stack:
                caller: FrameType | None = frame
                while caller is not None:
                    if caller.f_code.co_filename.startswith(self.root):
                        self.stack.insert(0, f"{caller.f_code.co_filename}:{caller.f_code.co_qualname}")
                    caller = caller.f_back


def trace_recipe(root: Path, recipe: str, out: str) -> Trace:
    """Run the recipe's tiny configuration in this process and record its training."""
    trace = Trace(root)
    sys.path.insert(0, str(root))
    from audiorl.cli import main

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        with redirect_stdout(io.StringIO()):
            code = main(["train", recipe, "--tiny", "--out", out])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if code:
        raise SystemExit(f"{recipe}: the recipe ended with exit code {code}")
    return trace


def report_step(trace: Trace, root: Path, names: bool) -> None:
    """Print how many files and lines, counted whole, one reads for the gradient and for the step."""

    def count(title: str, files: Sequence[str]) -> None:
        lines = {file: len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files}
        print(f"{title}: {len(files)} files, {sum(lines.values())} lines")
        for file, number in sorted(lines.items(), key=lambda item: -item[1]) if names else ():
            print(f"  {number:5d} {Path(file).relative_to(root)}")

    recipes = str(root / "audiorl" / "recipes")
    start = next((i for i, name in enumerate(trace.stack) if name.startswith(recipes)), 0)
    stack = [name.rpartition(":")[0] for name in trace.stack[start:]]
    modules = {str(file): module for module, file in python_files(root).items()}
    own = [file for file in dict.fromkeys(stack) if not modules[file].startswith(SURROUNDINGS)]
    count("from recipe to gradient", own)
    for name in trace.stack[start:]:
        file, _, function = name.rpartition(":")
        print(f"    {Path(file).relative_to(root)} {function}")
    count("the whole step", [f for f in trace.files if not modules[f].startswith(SURROUNDINGS)])
    count("around it", [f for f in trace.files if modules[f].startswith(SURROUNDINGS)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run a tiny recipe and count what one step reads")
    parser.add_argument("--recipe", default="mmau-grpo", help="recipe to run")
    parser.add_argument("--list", action="store_true", help="name every file of the step")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to read")
    options = parser.parse_args(argv)
    findings = check(options.root.resolve())
    if options.run:
        with tempfile.TemporaryDirectory() as folder:
            trace = trace_recipe(options.root.resolve(), options.recipe, str(Path(folder) / "run"))
        report_step(trace, options.root.resolve(), options.list)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

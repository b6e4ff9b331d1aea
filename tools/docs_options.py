"""Tables of options and of public names, written into pages; and a hook of MkDocs for pages that lie elsewhere.

    python tools/docs_options.py          # after an option, a docstring or a public name has changed

A line `<!-- options: audiorl/config/rl.py RLConfig rl -->` is followed by a table of the fields of `RLConfig`, named as
on the command line (`--rl.steps`; with `-` in the last place without a prefix), `<!-- names: audiorl.algos -->` by one
of what that module offers. The tables stand in the repository, where they can be read without building the site.
Sources are parsed, not imported. As MkDocs builds the site, `<!-- page: experiments/README.md -->` becomes that file.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = re.compile(r"^<!-- page: (\S+) -->$", re.MULTILINE)
MARK = re.compile(r"^<!-- options: (\S+) (\w+) (\S+) -->$(?:\n\n(?:\|.*\n)+)?", re.MULTILINE)
NAMES = re.compile(r"^<!-- names: (\S+) -->$(?:\n\n(?:\|.*\n)+)?", re.MULTILINE)
Row = tuple[str, str, str, str]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with the files that it names, for MkDocs. A page that lies elsewhere links to `../docs/`."""
    return PAGE.sub(lambda m: (ROOT / m[1]).read_text(encoding="utf-8").replace("](../docs/", "]("), markdown)


def with_tables(markdown: str) -> str:
    """Return the page with the tables that its marks ask for, in place of those that it has."""

    def options(m: re.Match[str]) -> str:
        prefix = "" if m[3] == "-" else f"{m[3]}."
        return f"<!-- options: {m[1]} {m[2]} {m[3]} -->\n\n{table(ROOT / m[1], m[2], prefix)}\n"

    return NAMES.sub(lambda m: f"<!-- names: {m[1]} -->\n\n{name_table(m[1])}\n", MARK.sub(options, markdown))


def name_table(module: str) -> str:
    """The public functions and classes of a module as a Markdown table, those of its public submodules too."""
    found: dict[str, str] = {}

    def walk(node: Any) -> None:
        for name, member in node.members.items():
            if member.is_alias and (node.exports is None or name not in node.exports):
                continue  # an import, perhaps of a package that griffe has not read
            public = not name.startswith("_") if node.exports is None else name in node.exports
            if member.is_module:
                if not name.startswith("_"):
                    walk(member)
            elif public and (member.is_class or member.is_function) and member.docstring:  # as on the site
                found.setdefault(name, " ".join(re.split(r"\n\s*\n", member.docstring.value.strip())[0].split()))

    walk(_modules()[module])
    rows = [f"| `{name}` | {_escape(text)} |" for name, text in sorted(found.items(), key=lambda i: i[0].lower())]
    return "\n".join(["| name | |", "| --- | --- |", *rows])


def table(file: Path, name: str, prefix: str) -> str:
    """The options of one dataclass as a Markdown table."""
    lines = ["| option | type | default | description |", "| --- | --- | --- | --- |"]
    for option, kind, default, text in fields(file, name):
        flag = f"--{prefix}{option}".replace("_", "-")
        lines.append(f"| `{flag}` | {_code(kind)} | {_code(default)} | {_escape(text)} |")
    return "\n".join(lines)


def fields(file: Path, name: str) -> list[Row]:
    """(field, type, default, docstring) of each public field; of a `FitConfig` also those that it inherits.

    ValueError if the class is not there.
    """
    body = ast.parse(file.read_text(encoding="utf-8")).body
    config = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if config is None:
        raise ValueError(f"{file}: no class {name}")
    rows: dict[str, Row] = {}
    if any(ast.unparse(base) == "FitConfig" for base in config.bases):
        rows = {row[0]: row for row in fields(ROOT / "audiorl/config/supervised.py", "FitConfig")}
    for node, after in zip(config.body, [*config.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = "required" if node.value is None else ast.unparse(node.value)
            kind = ast.unparse(node.annotation).replace(" | ", " or ")  # a pipe would end the cell
            nested = f"The options of `{kind}`." if re.fullmatch(r"\w+(Config|Options|Rewards)", kind) else ""
            rows[node.target.id] = (node.target.id, kind, default, _docstring(after) or nested)
    return list(rows.values())


@cache
def _modules() -> Any:
    import griffe  # comes with the extra docs, and the tables of options need none of it

    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in ("audiorl", "corpora", "tokenizers_audio"):
        loader.load(package)
    loader.resolve_aliases()
    return loader.modules_collection


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(inspect.cleandoc(node.value.value).split())
    return ""


def _code(text: str) -> str:
    return f"`{_escape(text)}`" if text else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").rglob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := with_tables(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))

"""A hook of MkDocs: pages that lie elsewhere in the repository, and tables of options from the dataclasses' docstrings.

A line `<!-- options: audiorl/config/rl.py RLConfig rl -->` in a page becomes a table of the fields of `RLConfig`,
named as on the command line (`--rl.steps`; with `-` in the last place without a prefix). Sources are parsed, not
imported. A line `<!-- page: experiments/README.md -->` becomes that file.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = re.compile(r"^<!-- page: (\S+) -->$", re.MULTILINE)
MARK = re.compile(r"^<!-- options: (\S+) (\w+) (\S+) -->$", re.MULTILINE)
Row = tuple[str, str, str, str]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with its marks filled in; MkDocs calls this. A page that lies elsewhere links to `../docs/`."""
    markdown = PAGE.sub(lambda m: (ROOT / m[1]).read_text(encoding="utf-8").replace("](../docs/", "]("), markdown)
    return MARK.sub(lambda m: table(ROOT / m[1], m[2], "" if m[3] == "-" else f"{m[3]}."), markdown)


def table(file: Path, name: str, prefix: str) -> str:
    """The options of one dataclass as a Markdown table."""
    lines = ["| option | type | default | description |", "| --- | --- | --- | --- |"]
    for option, kind, default, text in fields(file, name):
        flag = f"--{prefix}{option}".replace("_", "-")
        lines.append(f"| `{flag}` | {_code(kind)} | {_code(default)} | {_escape(text)} |")
    return "\n".join(lines)


def fields(file: Path, name: str) -> list[Row]:
    """(field, type, default, docstring) of each public field. ValueError if the class is not there."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    config = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if config is None:
        raise ValueError(f"{file}: no class {name}")
    rows = []
    for node, after in zip(config.body, [*config.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = "required" if node.value is None else ast.unparse(node.value)
            kind = ast.unparse(node.annotation).replace(" | ", " or ")  # a pipe would end the cell
            nested = f"The options of `{kind}`." if re.fullmatch(r"\w+(Config|Options|Rewards)", kind) else ""
            rows.append((node.target.id, kind, default, _docstring(after) or nested))
    return rows


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(inspect.cleandoc(node.value.value).split())
    return ""


def _code(text: str) -> str:
    return f"`{_escape(text)}`" if text else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")

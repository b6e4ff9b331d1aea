"""Pages name what exists: metrics are in the glossary, options have tables with descriptions, links have targets."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted(DOCS.rglob("*.md"))]
HOOK = runpy.run_path(str(ROOT / "tools" / "docs_options.py"))
FAMILIES = (
    "reward|response|group|rollout|policy|critic|kl|sft|preference|reward_model|process_reward|ptx|time|codebook|"
    "discriminator|loss"
)


def test_the_glossary_has_every_metric() -> None:
    glossary = (DOCS / "reference" / "metrics.md").read_text()
    sources = [p for folder in ("train/rl", "train") for p in (ROOT / "audiorl" / folder).glob("*.py")]
    sources += (ROOT / "tokenizers_audio" / "unified").glob("*.py")
    logged = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(rf"({FAMILIES})/[a-z_]+", str(node.value))
    }
    assert len(logged) > 30
    assert sorted(name for name in logged if f"`{name}`" not in glossary) == []


def test_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.search(r"\| extra \| for \|\n(.*?)\n\n", (DOCS / "start.md").read_text(), re.DOTALL)
    assert listed and set(re.findall(r"^\| `([\w-]+)`", listed[1], re.MULTILINE)) == set(extras)
    named = {name for page in PAGES for name in re.findall(r"\bextra `([\w-]+)`", page.read_text())}
    assert named <= set(extras)


def test_tables_of_options_are_of_today() -> None:
    page = (DOCS / "reference" / "options.md").read_text()
    assert HOOK["with_tables"](page) == page, "run python tools/docs_options.py"


@pytest.mark.slow
def test_tables_of_names_are_of_today() -> None:
    pytest.importorskip("griffe")
    pages = {page: page.read_text() for page in sorted((DOCS / "reference" / "api").glob("*.md"))}
    old = [page.name for page, text in pages.items() if HOOK["with_tables"](text) != text]
    assert not old, "run python tools/docs_options.py"


@pytest.mark.parametrize("mark", HOOK["MARK"].findall((DOCS / "reference" / "options.md").read_text()), ids="/".join)
def test_options_have_a_table(mark: tuple[str, str, str]) -> None:
    rows = HOOK["fields"](ROOT / mark[0], mark[1])
    assert rows and [name for name, _, _, text in rows if not text] == []


def test_the_hook_writes_tables(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('class Config:\n    eval_every: int | None = 3\n    """In steps; 0: never."""\n    plain: str\n')
    expected = [
        "| option | type | default | description |",
        "| --- | --- | --- | --- |",
        "| `--rl.eval-every` | `int or None` | `3` | In steps; 0: never. |",
        "| `--rl.plain` | `str` | `required` |  |",
    ]
    assert HOOK["table"](source, "Config", "rl.").splitlines() == expected
    with pytest.raises(ValueError, match="no class Missing"):
        HOOK["table"](source, "Missing", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    places = "audiorl|bench|corpora|docs|experiments|tests|tokenizers_audio|tools"
    named = re.findall(rf"`((?:{places})/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_names_can_be_imported(page: Path) -> None:
    named = re.findall(r"`((?:audiorl|corpora|tokenizers_audio)(?:\.\w+)+)[`(]", page.read_text())
    for name in {name for name in named if not name.endswith(".py")}:
        resolve_name(name)


def test_architecture_names_every_room() -> None:
    page = (DOCS / "reference" / "architecture.md").read_text()
    rooms = [p.parent.name for p in (ROOT / "audiorl").glob("*/__init__.py")]
    assert [room for room in rooms if f"  {room}/" not in page and f" {room}/ " not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/-]+\.md", config)
    assert yaml.safe_load(config)["site_dir"] == "build/site"
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120

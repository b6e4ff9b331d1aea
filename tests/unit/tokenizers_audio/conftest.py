"""Each tiny codec is made once, when a test first asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.codecs import FAMILIES


class Folders(dict[str, Path]):
    def __init__(self, root: Path):
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        self[name] = self.root / name
        next(family for family in FAMILIES if family.name == name).save(self[name])
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name -> folder of its tiny codec."""
    return Folders(tmp_path_factory.mktemp("codecs"))

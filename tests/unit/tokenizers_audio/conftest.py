"""Each tiny codec is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.codecs import FAMILIES


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name -> folder of its tiny codec."""
    made = {}
    for family in FAMILIES:
        made[family.name] = tmp_path_factory.mktemp("codecs") / family.name
        family.save(made[family.name])
    return made

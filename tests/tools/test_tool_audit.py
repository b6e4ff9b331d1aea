"""tools/audit.py: licences that nobody has allowed, and vulnerabilities with and without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tools import load_tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def audit() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_tool("audit", patch)


@pytest.mark.parametrize(
    "text",
    ["MIT", "BSD-3-Clause", "3-Clause BSD License", "Apache 2.0 License", "MPL-2.0 AND (Apache-2.0 OR MIT)",
     "GPL-3.0-only OR MIT", "Apache-2.0 WITH LLVM-exception AND BSD-2-Clause", "LGPL-2.1-or-later", "ISC license"],
)  # fmt: skip
def test_allowed_licences(audit: Any, text: str) -> None:
    assert audit.is_allowed(text)


@pytest.mark.parametrize(
    "text", ["", "GPL-3.0-or-later", "MIT AND GPL-3.0-only", "Proprietary", "AGPL-3.0", "My MIT-like licence"]
)
def test_other_licences(audit: Any, text: str) -> None:
    assert not audit.is_allowed(text)
    (line,) = audit.check_licences([("numpy", "BSD-3-Clause"), ("new", text), ("zhconv", text)])
    assert line.startswith("new: ") and repr(text) in line


def test_every_installed_package_is_allowed(audit: Any) -> None:
    packages = list(audit.licences())
    assert len(packages) > 50 and not audit.check_licences(packages)


def test_vulnerabilities(audit: Any) -> None:
    entry = {"id": "PYSEC-1", "fix_versions": ["2.1"], "description": "x"}
    table = {"dependencies": [{"name": "a", "version": "2.0", "vulns": [entry]}, {"name": "b", "skip_reason": "x"}]}
    answer = [sys.executable, "-c", f"print({json.dumps(table)!r}); raise SystemExit(1)"]
    assert audit.vulnerabilities(answer) == ["a 2.0: PYSEC-1, fixed in 2.1"]
    audit.ACCEPTED["PYSEC-1"] = "for the test"
    assert audit.vulnerabilities(answer) == []


def test_without_a_network(audit: Any) -> None:
    offline = [sys.executable, "-c", "raise OSError('no route to host')"]
    assert audit.vulnerabilities(offline) == "OSError: no route to host"

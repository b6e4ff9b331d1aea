"""Each input from a public bug report gives the right value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import Case, all_cases


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.kind} {case.given}")
def test_case(case: Case, tmp_path: Path) -> None:
    outcome = case.outcome(tmp_path)
    assert case.holds(outcome), outcome


@pytest.mark.parametrize("kind", sorted({case.kind for case in all_cases()}))
def test_a_kind_has_inputs_of_its_own(kind: str) -> None:
    """What is mended is the kind, not the reported example."""
    assert sum(case.source == "own" for case in all_cases() if case.kind == kind) >= 3

"""EmergentTTS-Eval (Manku et al. 2025, arXiv 2505.23009): texts that are hard to say well, each of a category.

Rows of its file, and of one of your own; all but the text and the category are optional::

    {"unique_id_eval": 0, "category": "Questions", "text_to_synthesize": "You did what?", "evolution_depth": 0}
    {"id": "q1", "category": "Questions", "text": "You did what?"}
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from audiorl.data.rows import read_checked
from audiorl.data.schema import check, check_limit
from audiorl.data.schema.results import CaseRow

CATEGORIES = ("Emotions", "Paralinguistics", "Foreign Words", "Syntactic Complexity", "Questions", "Pronunciation")
"""As the benchmark's file calls them; the paper calls the last one Complex Pronunciation."""


@dataclass(frozen=True)
class Case:
    """A text to be said. `depth`: how often it was made harder, from 0; None where it is not known."""

    name: str
    text: str
    category: str
    depth: int | None = None


def read_cases(
    path: str | Path, categories: Collection[str] = CATEGORIES, limit: int | None = None
) -> tuple[Case, ...]:
    """Return the first `limit` texts of a file (JSON lines, a JSON list or Parquet).

    A row without an id is called by its number from 0, as the benchmark calls its recordings.
    """
    check_limit(limit)
    cases: dict[str, Case] = {}
    rows: dict[str, int] = {}
    for number, row in read_checked(Path(path), lambda row: check(row, CaseRow)):
        text = row.text_to_synthesize or row.text
        given = row.unique_id_eval if row.unique_id_eval is not None else row.id
        name = str(len(cases)) if given is None else str(given).strip()
        if text is None:
            fault = "field 'text_to_synthesize': missing; give the text to say, there or as 'text'"
        elif row.category not in categories:
            fault = f"field 'category': {row.category!r} is none of {', '.join(sorted(categories))}"
        elif name in cases:
            fault = f"field 'id': {name!r} is also the id of row {rows[name]}; give every row its own"
        else:
            cases[name], rows[name] = Case(name, text.strip(), row.category, row.evolution_depth), number
            if len(cases) == limit:
                break
            continue
        raise ValueError(f"{path}: row {number}, {fault}")
    return tuple(cases.values())

"""Inputs from public bug reports: for each its source, the right value and what comes out.

python tools/cases.py           a Markdown table, and the number of cases that are not right (the exit code is 1 then)
python tools/cases.py A6 A14    of some kinds
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cases import Refused, all_cases


def main(kinds: list[str]) -> int:
    """Print the table; return the exit code."""

    def cell(value: Any) -> str:
        text = f"refused: {value.text}" if isinstance(value, Refused) else str(value)
        return " ".join(text.split())[:90].replace("|", "\\|")

    cases = [case for case in all_cases() if not kinds or case.kind in kinds]
    wrong = 0
    print("| kind | source | input | right | now | |\n| --- | --- | --- | --- | --- | --- |")
    for case in cases:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # tables of commands that cases run
            outcome = case.outcome(Path(folder))
        held = case.holds(outcome)
        wrong += not held
        columns = (case.kind, case.source, case.given, case.right, outcome, "" if held else "WRONG")
        print(f"| {' | '.join(map(cell, columns))} |", flush=True)
    print(f"\n{len(cases)} inputs of {len({case.kind for case in cases})} kinds, {wrong} not right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

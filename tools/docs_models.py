"""The table of model families and their checks in docs/models.md, from the conformance suite.

python tools/docs_models.py          # after a family or a check of the suite has changed
"""

from __future__ import annotations

import inspect
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "models.md"
MARK = re.compile(r"<!-- models -->\n.*?<!-- end of models -->", re.DOTALL)


def checks() -> dict[str, str]:
    """Return what each check of the suite says, by its name."""
    from tests.unit.models import test_model_families as suite

    tests = {n.removeprefix("test_"): t for n, t in vars(suite).items() if n.startswith("test_")}
    return {
        n: " ".join((inspect.getdoc(t) or "").split())
        for n, t in tests.items()
        if "family" in inspect.signature(t).parameters
    }


def lines(kind: str) -> int:
    """Return how many lines of code a model_type has to itself: classes and functions, without the tiny model."""
    from audiorl.models.families import RECOGNISER_TYPES, audio_llm, encoder_decoder, generic, qwen_omni, recogniser

    named = recogniser(kind) if kind in RECOGNISER_TYPES else qwen_omni.family_of(kind) or audio_llm(kind)
    shared = {generic.AudioLLM, encoder_decoder.EncoderDecoder}
    classes = {*named.__mro__, *getattr(named, "decoder_class", object).__mro__} - shared
    parts: list[Any] = [c for c in classes if c.__module__.startswith(generic.__package__ or "")]
    for module in {inspect.getmodule(c) for c in parts} - {generic}:
        functions = inspect.getmembers(module, inspect.isfunction)
        parts += [f for n, f in functions if f.__module__ == getattr(module, "__name__", "") and n != "tiny"]
    return sum(len(inspect.getsourcelines(part)[0]) for part in parts)


def tables() -> str:
    """Return the families as rows and the checks as columns, what the checks say, and what is not checked and why."""
    from tests.support.families import FAMILIES

    names = checks()
    rows = [f"| family | `model_type` | lines | {' | '.join(names)} | vLLM |", "|---" * (len(names) + 4) + "|"]
    notes: list[str] = []
    for kind, case in sorted(FAMILIES.items(), key=lambda item: item[1].title.lower()):
        cells = []
        for name in names:
            reason = case.why_not(name)
            if reason is not None and reason not in notes:
                notes.append(reason)
            made = f"with {case.eyes_need}" if name == "pictures" and case.eyes_need else "yes"
            cells.append(made if reason is None else f"no ({notes.index(reason) + 1})")
        read_by = f"`{case.vllm}`" if case.vllm else "no"
        rows.append(f"| {case.title} | `{kind}` | {lines(kind)} | {' | '.join(cells)} | {read_by} |")
    median = int(statistics.median(map(lines, FAMILIES)))
    code = f"- **lines**: Code of the family alone, beside what families share; {median} in the median."
    said = [f"- **{name}**: {text}" for name, text in names.items()]
    return "\n".join(
        [*rows, "", code, *said, "", *(f"({i}) {note[0].upper()}{note[1:]}.  " for i, note in enumerate(notes, 1))]
    )


def page() -> str:
    """Return the page as it should be."""
    return MARK.sub(
        lambda _: f"<!-- models -->\n\n{tables()}\n<!-- end of models -->", PAGE.read_text(encoding="utf-8")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
